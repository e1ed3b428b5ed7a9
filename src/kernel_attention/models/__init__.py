"""Models made of any attention mechanism."""

from kernel_attention.models.sequence import EncoderLayer, SequenceClassifier, SequenceEncoder

__all__ = ["EncoderLayer", "SequenceClassifier", "SequenceEncoder"]
