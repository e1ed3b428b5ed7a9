"""Models made of any attention mechanism."""

from kernel_attention.models.causal import CausalLanguageModel
from kernel_attention.models.decoding import generate
from kernel_attention.models.sequence import EncoderLayer, SequenceClassifier, SequenceEncoder
from kernel_attention.models.tokens import TokenClassifier, TokenEncoder, TokenPairClassifier

__all__ = [
    "CausalLanguageModel",
    "EncoderLayer",
    "SequenceClassifier",
    "SequenceEncoder",
    "TokenClassifier",
    "TokenEncoder",
    "TokenPairClassifier",
    "generate",
]
