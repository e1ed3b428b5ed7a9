"""Models made of any attention mechanism."""

from kernel_attention.models.control.decision_transformer import (
    DecisionTransformer,
    Memory,
    RecurrentMemory,
    SlidingMemory,
    make_memory,
)
from kernel_attention.models.control.policies import Policy, StatePolicy
from kernel_attention.models.encoder_layer import ChannelAttention, EncoderLayer
from kernel_attention.models.language.causal import CausalLanguageModel, generate
from kernel_attention.models.sequence import SequenceEncoder
from kernel_attention.models.sequence_classifier import SequenceClassifier
from kernel_attention.models.sublayers import ShortConvolution, SparseExperts
from kernel_attention.models.tokens import (
    PositionClassifier,
    TokenClassifier,
    TokenEncoder,
    TokenPairClassifier,
)
from kernel_attention.models.vision import Segmenter, VisionTransformer

__all__ = [
    "CausalLanguageModel",
    "ChannelAttention",
    "DecisionTransformer",
    "EncoderLayer",
    "Memory",
    "Policy",
    "PositionClassifier",
    "RecurrentMemory",
    "Segmenter",
    "SequenceClassifier",
    "SequenceEncoder",
    "ShortConvolution",
    "SlidingMemory",
    "SparseExperts",
    "StatePolicy",
    "TokenClassifier",
    "TokenEncoder",
    "TokenPairClassifier",
    "VisionTransformer",
    "generate",
    "make_memory",
]
