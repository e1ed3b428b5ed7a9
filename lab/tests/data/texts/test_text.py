"""Texts: the files, data sets and splits that are read, what is refused, and that packing loses no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention_lab.data.texts.contexts import ContextSampler, ordered_contexts, training_contexts
from kernel_attention_lab.data.texts.text import (
    IGNORED,
    SPLITS,
    TextData,
    load_text,
    pack_contexts,
    read_text,
)
from kernel_attention_lab.data.texts.vocabulary import WordVocabulary

PTB = Path(__file__).parents[4] / "shared" / "data" / "language" / "ptb"
PTB = PTB if PTB.is_dir() else Path(__file__).parents[5] / "shared" / "data" / "language" / "ptb"


@pytest.fixture
def folder(tmp_path):
    for name, text in (("train", "a b\na c\n"), ("valid", "b a\n"), ("test", "c\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


@given(st.integers(2, 60), st.integers(1, 70))
def test_packing_loses_no_token(count, length):
    """Every token but the first is a target exactly once, after the token before it; no context is padded."""
    tokens = np.arange(count) + 100
    inputs, targets = pack_contexts(tokens, length)
    assert (
        inputs.shape == targets.shape == (-(-(count - 1) // min(length, count - 1)), min(length, count - 1))
    )
    counted = targets != IGNORED
    assert sorted(targets[counted]) == tokens[1:].tolist()
    assert (targets[counted] == inputs[counted] + 1).all()
    assert (np.diff(inputs, axis=1) == 1).all(), "contexts are runs of the text"


@given(st.integers(1, 13), st.integers(1, 5), st.integers(1, 7), st.integers(0, 3))
def test_rounds_are_one_endless_row_of_epochs(length, size, steps, seed):
    """Whatever the rounds' length, the batches in a row are whole epochs, each case once."""
    sampler = ContextSampler(length, size, steps, seed)
    row = []
    for number in range(12):
        sampler.set_epoch(number)
        row += list(sampler)
        assert len(row) == (number + 1) * steps
    per_epoch = -(-length // size)
    for start in range(0, len(row) - per_epoch + 1, per_epoch):
        epoch = [case for batch in row[start : start + per_epoch] for case in batch]
        assert sorted(epoch) == list(range(length))
    longer = ContextSampler(length, size, 12 * steps, seed)
    assert list(longer) == row


def test_training_and_ordered_batches_cover_the_text():
    tokens = np.arange(30)
    loader = training_contexts(tokens, 4, 3, steps=3, seed=1)
    for batches in (loader, ordered_contexts(tokens, 4, 3)):
        wanted = [int(target) for batch in batches for target in batch.targets.flatten() if target != IGNORED]
        assert sorted(wanted) == list(range(1, 30))


def test_a_folder_of_text_files_by_path_and_by_name(folder):
    expected = TextData(folder.name, "a b\na c\n", "b a\n", "c\n")
    assert load_text(str(folder)) == load_text(folder.name, folder.parent) == expected
    below = folder.parent / "language"
    below.mkdir()
    folder.rename(below / "texts")
    assert load_text("texts", folder.parent).train == "a b\na c\n"


def test_other_names_of_the_splits(folder):
    for old, new in (("train.txt", "wiki.train.tokens"), ("valid.txt", "validation.txt")):
        (folder / old).rename(folder / new)
    assert load_text(str(folder)).split("validation") == "b a\n"


def test_one_file_is_cut_by_lines(tmp_path):
    lines = [f"line {number}\n" for number in range(40)]
    (tmp_path / "all.txt").write_text("".join(lines))
    data = load_text(str(tmp_path / "all.txt"))
    assert [data.split(split).count("\n") for split in SPLITS] == [36, 2, 2]
    assert data.train + data.validation + data.test == "".join(lines)


@pytest.mark.filterwarnings("ignore")  # its own: dill on pyarrow
def test_a_real_hugging_face_folder(folder):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    from datasets.table import InMemoryTable

    table = InMemoryTable.from_pydict({"text": ["a b", "c"]})
    parts = {name: datasets.Dataset(table, fingerprint=name) for name in SPLITS}
    datasets.DatasetDict(parts).save_to_disk(str(folder / "saved"))
    assert load_text(str(folder / "saved")).validation == "a b\nc\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"good\nba\xffd\n", r"byte 0xff at offset 7 \(line 2\) is not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_unreadable_files(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_text(path)


def test_bad_data_sets(folder, tmp_path):
    with pytest.raises(InputError, match="dataset 'nothing': not found"):
        load_text("nothing", tmp_path)
    (folder / "test.txt").unlink()
    with pytest.raises(InputError, match="has no test text"):
        load_text(str(folder))
    (folder / "two.txt").write_text("a\nb\n")
    with pytest.raises(InputError, match="at least 3 are needed"):
        load_text(str(folder / "two.txt"))
    with pytest.raises(InputError, match="unknown split 'dev'"):
        TextData("t", "a", "b", "c").split("dev")
    with pytest.raises(InputError, match="T at least 2"):
        pack_contexts(np.array([1]), 3)
    with pytest.raises(InputError, match="length=0"):
        pack_contexts(np.array([1, 2]), 0)


@pytest.mark.skipif(not PTB.is_dir(), reason="Penn Treebank is not here")
def test_penn_treebank_has_its_known_size():
    """The figures of Mikolov's split: 10,000 words; 929,589 / 73,760 / 82,430 tokens, line ends included."""
    data = load_text(str(PTB))
    vocabulary = WordVocabulary.from_text(data.train)
    assert vocabulary.size == 10000
    assert [len(vocabulary.encode(data.split(split))) for split in SPLITS] == [929589, 73760, 82430]
