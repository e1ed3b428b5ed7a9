"""The decoding states of a causal model where Hugging Face's ``generate`` keeps keys and values."""

from __future__ import annotations

from torch import Tensor

from kernel_attention.core.decoding import reorder
from kernel_attention.models.decoding import DecodingState


class DecodingCache:
    """What ``generate`` carries as ``past_key_values``: the state of every layer after the tokens read.

    Its size is constant where every mechanism has a recurrent form of constant size.

    Args:
        state: the states.
        length: tokens read, padding included.
    """

    is_compileable = False

    def __init__(self, state: DecodingState, length: int) -> None:
        self.state = state
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, padding included."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences ``beam_idx`` (B',) int64; beam search calls this after every step."""
        self.state = reorder(self.state, beam_idx)
