"""Our vocabularies as tokenizers of Hugging Face: the same numbers for a text."""

from __future__ import annotations

from typing import Any

from kernel_attention.experiments.data.texts.vocabulary import (
    END_OF_LINE,
    UNKNOWN,
    BytePairVocabulary,
    Vocabulary,
    WordVocabulary,
)
from kernel_attention.experiments.data.tokens.loading import BREAK, WORD

PADDING = "<|pad|>"
"""The token that fills up a batch. Its number is V, which no text has; the models never look at it."""


def make_tokenizer(vocabulary: Vocabulary, max_len: int, *, sentences: bool = False) -> Any:
    """A tokenizer that gives every text the numbers that the vocabulary gives it.

    Args:
        vocabulary: of the run.
        max_len: the model's longest sequence.
        sentences: whether words are those of ``words_of``, as in classification, or stand between blanks.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(vocabulary, sentences),
        model_max_length=max_len,
        pad_token=PADDING,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _tokenizer(vocabulary: Vocabulary, sentences: bool) -> Any:
    import tokenizers

    if isinstance(vocabulary, BytePairVocabulary):
        return tokenizers.Tokenizer.from_str(vocabulary.state()["tokenizer"])
    if isinstance(vocabulary, WordVocabulary):
        return _word_tokenizer(vocabulary, sentences)
    letters = _letters_of_bytes()
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def _word_tokenizer(vocabulary: WordVocabulary, sentences: bool) -> Any:
    import tokenizers
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    numbers = {word: number for number, word in enumerate(vocabulary.words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=numbers, unk_token=UNKNOWN))
    # Python knows four separators of ASCII as white space that Unicode's definition lacks.
    steps: list[Any] = [normalizers.Replace(Regex("[\x1c-\x1f]"), " ")]
    if sentences:
        steps += [normalizers.Lowercase(), normalizers.Replace(Regex(BREAK), " ")]
        made.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    else:
        steps += [normalizers.Replace("\n", f" {END_OF_LINE} ")]
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.normalizer = normalizers.Sequence(steps)
    # A blank stands before every word, the first one too, so that a continuation can be put after a prompt.
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("^"), " "),
            decoders.Fuse(),
            decoders.Replace(f" {END_OF_LINE}", "\n"),
            decoders.Replace("\n ", "\n"),
        ]
    )
    return made


def _letters_of_bytes() -> list[str]:
    """The letters by which byte-level tokenizers write the 256 bytes.

    Printable characters of Latin-1 stand for themselves, and the others, in order, for U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
