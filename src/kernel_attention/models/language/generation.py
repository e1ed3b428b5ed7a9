"""The text that a causal model writes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernel_attention.core.validation import require_weight
from kernel_attention.errors import InputError
from kernel_attention.models.language.causal import CausalLanguageModel
from kernel_attention.models.language.decoding import DecodingState


def generate(
    model: CausalLanguageModel,
    prompt: Tensor,
    count: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The tokens that follow a prompt, one after the other.

    Args:
        model: put it into evaluation mode first; its dropout is not switched off here.
        prompt: (B, N) tokens, N at least 1.
        count: how many tokens to generate.
        temperature: 0 takes the most likely token; otherwise draws from softmax(logits / temperature).
        top_k: draw among the most likely tokens only.
        generator: for the draws; None: PyTorch's global one.

    Yields:
        (B,) tokens. They are not kept here: the memory is that of the state.

    Raises:
        InputError: before the first token, for arguments out of range and a text beyond max_len.
    """
    if count < 0:
        raise InputError(f"count={count} must be at least 0")
    require_weight(temperature=temperature)
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    if prompt.dim() != 2 or prompt.size(1) == 0:
        raise InputError(f"prompt has shape {tuple(prompt.shape)}, expected (B, N) with N at least 1")
    model.check_length(prompt.size(1) + max(count - 1, 0))
    return _generate(model, prompt, count, temperature, top_k, generator)


def _generate(
    model: CausalLanguageModel,
    prompt: Tensor,
    count: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    state: DecodingState | None = None
    tokens = prompt
    for _ in range(count):
        with torch.inference_mode():  # not around yield: the caller keeps its own gradient mode
            if state is None:
                logits, state = model.prefill(prompt)
            else:
                logits, state = model.step(tokens, state)
            tokens = draw_tokens(logits, temperature, top_k, generator)
        yield tokens


def draw_tokens(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """The next tokens (B,) from logits (B, V), most likely or drawn as ``generate`` says."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
