"""Singular-value spectra of the kernels that attention layers learn (Primal-Attention, figure 1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.attention import AttentionLayer


@dataclass(frozen=True)
class LayerSpectrum:
    """Spectrum of one layer: ``singular_values`` (heads, K), each over the largest of its matrix, averaged
    over sequences.
    """

    layer: int
    mechanism: str
    singular_values: Tensor


@contextlib.contextmanager
def captured_inputs(model: nn.Module) -> Iterator[dict[int, tuple[Tensor, Tensor | None]]]:
    """Inside the block, layer index -> (x, key_padding_mask) of the last call of every attention layer of
    ``model``.
    """
    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    seen: dict[int, tuple[Tensor, Tensor | None]] = {}

    def remember(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            seen[index] = (args[0].detach(), kwargs.get("key_padding_mask"))

        return hook

    handles = [
        layer.register_forward_pre_hook(remember(i), with_kwargs=True) for i, layer in enumerate(layers)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_spectra(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor | None]], num_values: int = 64
) -> list[LayerSpectrum]:
    """Leading singular values of every layer's kernel or attention matrix, relative to the largest.

    Args:
        model: called as ``model(x, key_padding_mask)``; layers without a ``kernel_matrix`` are passed over.
        batches: (x, key_padding_mask) pairs; every sequence costs an N x N decomposition per head.
        num_values: how many values to keep.
    """
    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    values: dict[int, list[Tensor]] = {}
    was_training = model.training
    model.eval()
    try:
        for x, mask in batches:
            with captured_inputs(model) as seen:
                model(x, mask)
            for index, (layer_input, layer_mask) in seen.items():
                if hasattr(layers[index], "kernel_matrix"):
                    kernel = layers[index].kernel_matrix(layer_input.float(), key_padding_mask=layer_mask)  # type: ignore[operator]
                    values.setdefault(index, []).append(_relative_spectrum(kernel.float(), num_values))
    finally:
        model.train(was_training)
    return [
        LayerSpectrum(index, type(layers[index]).__name__, torch.cat(spectra).mean(dim=0).cpu())
        for index, spectra in sorted(values.items())
    ]


def _relative_spectrum(kernel: Tensor, num_values: int) -> Tensor:
    """(B, h, N, N) -> (B, h, num_values), zeros past N."""
    spectrum = torch.linalg.svdvals(kernel)
    spectrum = spectrum / spectrum[..., :1].clamp_min(torch.finfo(spectrum.dtype).tiny)
    missing = max(num_values - spectrum.size(-1), 0)
    return torch.nn.functional.pad(spectrum[..., :num_values], (0, missing))
