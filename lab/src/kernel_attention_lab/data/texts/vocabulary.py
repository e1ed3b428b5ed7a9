"""Vocabularies: words of the training text, bytes, or byte pairs; each is text -> token numbers and back.

Legend: T tokens of a text, V tokens of a vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from kernel_attention.errors import InputError, require_positive, unknown

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


class Vocabulary(ABC):
    """Text to token numbers and back.

    Attributes:
        kind: "word", "byte" or "bpe".
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of tokens, V."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, (T,) int64."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The vocabulary as plain JSON values; ``vocabulary_from_state`` is the inverse."""

    def fingerprint(self) -> str:
        """SHA-256 of the state: equal for two vocabularies that give every text the same numbers."""
        return hashlib.sha256(json.dumps(self.state(), sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Kind, size and fingerprint, which a run compares."""
        return {"kind": self.kind, "size": self.size, "fingerprint": self.fingerprint()}


class WordVocabulary(Vocabulary):
    """The words between blanks; ``<unk>`` for all others and ``<eos>`` for the end of a line.

    ``decode(encode(text))`` is the text again, except for unknown words and the width of blanks.

    Args:
        words: the tokens in the order of their numbers; ``<unk>`` and ``<eos>`` are among them.

    Raises:
        InputError: for words that are no list of different words, or lack the two.
    """

    kind = "word"

    def __init__(self, words: Sequence[str]) -> None:
        are_words = all(isinstance(word, str) and word and not word.isspace() for word in words)
        if not are_words or len(set(words)) < len(words):
            raise InputError("words of a vocabulary must be different words")
        for special in (UNKNOWN, END_OF_LINE):
            if special not in words:
                raise InputError(f"words of a vocabulary must contain {special}")
        self.words = list(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}
        self._unknown = self._numbers[UNKNOWN]
        self._end = self._numbers[END_OF_LINE]

    @classmethod
    def from_text(cls, text: str, *, min_count: int = 1, max_size: int | None = None) -> WordVocabulary:
        """The words of a training text, the most frequent first (among equals in alphabetical order).

        Args:
            text: the training text.
            min_count: rarer words are left out.
            max_size: largest V, ``<unk>`` and ``<eos>`` included.
        """
        require_positive(min_count=min_count)
        if max_size is not None and max_size < 3:
            raise InputError(f"max_size={max_size} must be at least 3: {UNKNOWN}, {END_OF_LINE} and a word")
        counts = Counter(text.split())
        specials = [UNKNOWN, END_OF_LINE]
        frequent = [word for word in counts if counts[word] >= min_count and word not in specials]
        frequent.sort(key=lambda word: (-counts[word], word))
        return cls(specials + frequent[: None if max_size is None else max_size - 2])

    @property
    def size(self) -> int:
        """V."""
        return len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """One token a word, one ``<eos>`` a line feed."""
        tokens: list[int] = []
        for number, line in enumerate(text.split("\n")):
            if number:
                tokens.append(self._end)
            tokens.extend(self._numbers.get(word, self._unknown) for word in line.split())
        return np.array(tokens, dtype=np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Words with a blank between them; a new line for every ``<eos>``."""
        words = " ".join("\n" if token == self._end else self.words[token] for token in map(int, tokens))
        return words.replace(" \n", "\n").replace("\n ", "\n")

    def state(self) -> dict[str, Any]:
        """The words."""
        return {"kind": self.kind, "words": self.words}


class ByteVocabulary(Vocabulary):
    """The 256 bytes of UTF-8; ``decode(encode(text))`` is the text."""

    kind = "byte"

    @property
    def size(self) -> int:
        """256."""
        return 256

    def encode(self, text: str) -> np.ndarray:
        """One token a byte."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Bytes that are no UTF-8, as a model may write them, become U+FFFD."""
        return bytes(map(int, tokens)).decode(errors="replace")

    def state(self) -> dict[str, Any]:
        """Nothing but the kind."""
        return {"kind": self.kind}


class BytePairVocabulary(Vocabulary):
    """Byte-level byte-pair encoding of Hugging Face's ``tokenizers``; ``decode(encode(text))`` is the text.

    Args:
        definition: the content of a ``tokenizer.json``.

    Raises:
        InputError: where the library is missing or does not read the definition.
    """

    kind = "bpe"

    def __init__(self, definition: str) -> None:
        self._definition = definition
        try:
            self._tokenizer = _tokenizers().Tokenizer.from_str(definition)
        except InputError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"not a definition of a tokenizer ({error})") from None

    @classmethod
    def from_text(cls, text: str, *, max_size: int = 8192) -> BytePairVocabulary:
        """Merges learnt from a training text: at least the 256 bytes, at most ``max_size`` tokens."""
        if max_size < 256:
            raise InputError(f"max_size={max_size} must be at least 256, the bytes")
        library = _tokenizers()
        byte_level = library.pre_tokenizers.ByteLevel
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=max_size, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False
        )
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        return cls(tokenizer.to_str())

    @property
    def size(self) -> int:
        """V."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, (T,) int64."""
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def state(self) -> dict[str, Any]:
        """The tokenizer's own definition."""
        return {"kind": self.kind, "tokenizer": self._definition}


KINDS = ("word", "byte", "bpe")


def build_vocabulary(kind: str, text: str, *, min_count: int = 1, max_size: int | None = None) -> Vocabulary:
    """The vocabulary of a training text.

    Args:
        kind: "word", "byte" or "bpe".
        text: the training text; no other split may be part of it.
        min_count: of words.
        max_size: of words (default: all) and byte pairs (default: 8192).

    Raises:
        InputError: for an unknown kind or a size that cannot be.
    """
    if kind == "word":
        return WordVocabulary.from_text(text, min_count=min_count, max_size=max_size)
    if kind == "bpe":
        return BytePairVocabulary.from_text(text, max_size=8192 if max_size is None else max_size)
    if kind == "byte":
        return ByteVocabulary()
    raise unknown("vocabulary", kind, KINDS)


def vocabulary_from_state(state: Any) -> Vocabulary:
    """The vocabulary of a state; InputError where the state is of another form."""
    kind = state.get("kind") if isinstance(state, Mapping) else None
    if kind == "word" and isinstance(state.get("words"), list):
        return WordVocabulary(state["words"])
    if kind == "byte":
        return ByteVocabulary()
    if kind == "bpe" and isinstance(state.get("tokenizer"), str):
        return BytePairVocabulary(state["tokenizer"])
    raise InputError(f"not a saved vocabulary (kind {kind!r}; accepted: {', '.join(KINDS)})")


def require_same_vocabulary(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """InputError where a vocabulary (as it describes itself) is not the one a model was trained with."""
    if dict(found) != dict(expected):
        kinds = [f"{one.get('kind')} of {one.get('size')} tokens" for one in (found, expected)]
        if kinds[0] == kinds[1]:
            kinds = [f"{kind} ({str(one.get('fingerprint'))[:8]})" for kind, one in zip(
                kinds, (found, expected), strict=True
            )]  # fmt: skip
        raise InputError(
            f"tokenizer mismatch: the vocabulary is {kinds[0]}, the model was trained with {kinds[1]}"
        )


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            "vocabulary 'bpe' needs Hugging Face's tokenizers: pip install 'kernel-attention-lab[language]'"
        ) from None
    return tokenizers
