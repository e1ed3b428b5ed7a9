"""Text from a trained language model."""

from __future__ import annotations

import torch

from kernel_attention.errors import InputError
from kernel_attention.experiments.training.language_experiment import read_vocabulary
from kernel_attention.experiments.training.saved import SavedRun
from kernel_attention.models.decoding import generate


def generate_text(
    run: SavedRun,
    prompt: str,
    *,
    tokens: int = 50,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    model_seed: int | None = None,
) -> str:
    """Continue a prompt. Return the prompt as the vocabulary reads it, and the tokens that follow.

    Args:
        run: a run of the task ``language``.
        prompt: at least one token long; words that the vocabulary lacks are read as <unk>.
        tokens: number of tokens to generate.
        temperature: 0 takes the most likely token; see ``kernel_attention.models.decoding.generate``.
        top_k: draw among this number of most likely tokens.
        seed: seed of the draws.
        model_seed: seed of the model (default: the first of the run).

    Raises:
        InputError: for a run of another task, an empty prompt, or a text longer than the model's max_len.
    """
    if run.recipe.task_name != "language":
        raise InputError(
            f"run {run.folder}: task {run.recipe.task_name} generates no text (accepted: language)"
        )
    vocabulary = read_vocabulary(run.facts)
    read = torch.from_numpy(vocabulary.encode(prompt))
    if not len(read):
        raise InputError(f"prompt={prompt!r} has no token to begin with")
    model = run.model(model_seed)
    follow = generate(
        model,
        read[None],
        tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )
    return vocabulary.decode([*read.tolist(), *(int(token) for token in follow)])
