"""Token data sets from their files: what is read, and what is refused in one line that names it."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from data.images.image_data import make_cifar
from PIL import Image
from tasks.token_data import make_images, make_tokens

from kernel_attention.errors import InputError
from kernel_attention_lab.data.texts.vocabulary import vocabulary_from_state
from kernel_attention_lab.data.tokens.loading import TOKEN_DATASETS, Limits, load_tokens, words_of

SHARED = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[5] / "shared" / "data")


@pytest.fixture
def root(tmp_path):
    return make_tokens(tmp_path)


def decoded(split, vocabulary, case):
    return [vocabulary.decode(sequence) for sequence in split.case(case)]


def test_sst_is_words_of_the_training_split(root):
    loaded = load_tokens("sst2", root)
    data, vocabulary = loaded.data, vocabulary_from_state(loaded.data.vocabulary)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [43, 11, 13]
    lines = (root / "sst/stsa.binary.test").read_text().splitlines()
    assert loaded.test_texts == [line[2:] for line in lines]
    assert data.test.targets.tolist() == [int(line[0]) for line in lines]
    assert decoded(data.test, vocabulary, 3) == [lines[3][2:]]
    train = {
        word
        for line in (root / "sst/stsa.binary.train").read_text().splitlines()
        for word in line[2:].split()
    }
    assert set(vocabulary.words) == train | {"<unk>", "<eos>"}
    (root / "sst/stsa.binary.test").write_text("1 unheard of\n")
    assert load_tokens("sst2", root).data.test.case(0)[0].tolist() == [0, 0], (
        "no word of the test split is known"
    )


def test_rare_words_and_large_vocabularies_are_cut(root):
    words = load_tokens("sst5", root, Limits(max_vocabulary=4)).data
    assert words.vocabulary_size == 6
    assert words.class_names[4] == "very positive"
    assert load_tokens("sst5", root, Limits(min_count=10_000)).data.vocabulary_size == 2


def test_text_is_the_bytes_of_imdb(root):
    data = load_tokens("lra/text", root).data
    assert (data.vocabulary_size, data.max_len, data.validation) == (256, 4000, None)
    with gzip.open(root / "imdb/train.jsonl.gz", "rt", encoding="utf-8") as file:
        first = json.loads(next(file))["text"]
    assert bytes(data.train.case(0)[0]).decode() == first
    assert "–" in first, "three bytes of UTF-8"


def test_imdb_as_it_is_distributed(root):
    reference = load_tokens("imdb", root)
    for split in ("train", "test"):
        lines = gzip.decompress((root / f"imdb/{split}.jsonl.gz").read_bytes()).decode().splitlines()
        for index, record in enumerate(map(json.loads, lines)):
            folder = root / "folders/aclImdb" / split / ("pos" if record["label"] else "neg")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index:03}_7.txt").write_text(record["text"], encoding="utf-8")
    found = load_tokens("imdb", root / "folders")
    assert sorted(found.test_texts) == sorted(reference.test_texts)
    assert found.data.vocabulary == reference.data.vocabulary
    assert found.data.train.targets.tolist() == [0] * 11 + [1] * 11


@pytest.mark.filterwarnings("ignore")  # its own: dill on pyarrow
def test_imdb_as_hugging_face_saves_it(root):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    reference = load_tokens("imdb", root)
    splits = {}
    for split in ("train", "test"):
        lines = gzip.decompress((root / f"imdb/{split}.jsonl.gz").read_bytes()).decode().splitlines()
        splits[split] = datasets.Dataset.from_list([json.loads(line) for line in lines])
    datasets.DatasetDict(splits).save_to_disk(str(root / "saved/imdb"))
    found = load_tokens("imdb", root / "saved")
    assert np.array_equal(found.data.test.tokens, reference.data.test.tokens)
    assert found.test_texts == reference.test_texts


def test_retrieval_is_pairs_of_bytes(root):
    data = load_tokens("lra/retrieval", root).data
    assert data.train.parts == 2
    assert [len(split) for split in (data.train, data.validation, data.test)] == [21, 8, 9]
    row = (root / "tsv_data/new_aan_pairs.eval.tsv").read_text().splitlines()[5].split("\t")
    assert [bytes(sequence).decode() for sequence in data.validation.case(5)] == row[3:]
    assert data.validation.targets[5] == float(row[0])


def test_images_from_folders_archive_and_torchvision_are_the_same(tmp_path):
    make_images(tmp_path / "folders")
    data = load_tokens("lra/image", tmp_path / "folders").data
    assert data.train.targets.tolist() == [3, 3, 9, 9]
    assert [int(data.train.case(case)[0][0]) for case in range(4)] == [60, 61, 200, 201]
    assert data.train.lengths.tolist() == [1024] * 4
    (tmp_path / "archive").mkdir()
    with tarfile.open(tmp_path / "archive/cifar10_part.tar", "w") as archive:
        archive.add(tmp_path / "folders/cifar10", "cifar10")
    assert np.array_equal(load_tokens("lra/image", tmp_path / "archive").data.test.tokens, data.test.tokens)
    batches = tmp_path / "torchvision/cifar-10-batches-py"
    batches.mkdir(parents=True)
    colour = np.zeros((1, 3, 1024), np.uint8)
    colour[:, 0], colour[:, 1], colour[:, 2] = 10, 100, 250
    content = {b"data": colour.reshape(1, -1), b"labels": [7]}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (batches / name).write_bytes(pickle.dumps(content))
    data = load_tokens("lra/image", tmp_path / "torchvision").data
    assert (len(data.train), len(data.test)) == (5, 1)
    assert set(data.train.tokens) == {round(0.299 * 10 + 0.587 * 100 + 0.114 * 250)}
    (batches / "test_batch").write_bytes(pickle.dumps({b"data": io.BytesIO, b"labels": [7]}))
    with pytest.raises(InputError, match="test_batch: not readable"):
        load_tokens("lra/image", tmp_path / "torchvision")


def test_gray_values_are_those_of_earlier_releases(tmp_path):
    """Image files as Pillow's mode L rounds, torchvision's as NumPy's sum over the channels does."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    # Colours whose gray is k + 1/2 to the last digit: here the order of the sum decides.
    halves = [(r, g, b) for r in range(256) for g in range(0, 256, 3) for b in range(0, 256, 3)
              if (299 * r + 587 * g + 114 * b) % 1000 == 500]  # fmt: skip
    assert len(halves) > 1024
    pixels[3] = np.array(halves[-1024:], np.uint8).reshape(32, 32, 3)
    for split in ("train", "test"):
        folder = tmp_path / "files/cifar10" / split / "frog"
        folder.mkdir(parents=True)
        for number, image in enumerate(pixels):
            Image.fromarray(image).save(folder / f"{number}.png")
    data = load_tokens("lra/image", tmp_path / "files").data
    for number, image in enumerate(pixels):
        gray = np.asarray(Image.fromarray(image).convert("L")).reshape(-1)
        assert np.array_equal(data.train.case(number)[0], gray)
    make_cifar(tmp_path / "batches/cifar-10-batches-py")
    planes = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2).reshape(4, 3, 1024))
    content = {b"data": planes.reshape(4, -1), b"labels": [6] * 4}
    (tmp_path / "batches/cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(content))
    (tmp_path / "batches/cifar-10-batches-py/batches.meta").unlink()
    data = load_tokens("lra/image", tmp_path / "batches").data
    expected = np.rint(np.einsum("c,ncp->np", np.array([0.299, 0.587, 0.114]), planes)).astype(np.uint8)
    assert np.array_equal(data.test.tokens.reshape(4, 1024), expected)
    assert data.test.targets.tolist() == [6] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "train/cat").rename(root / "train/kitten"), "'kitten' is no class of CIFAR-10"),
        (lambda root: shutil.rmtree(root / "test"), "has no images of the test split"),
        (lambda root: (root / "test/cat/0.png").write_bytes(b"junk"), "test/cat/0.png: not readable"),
        (lambda root: [Image.new("RGB", (8, 8)).save(path) for path in root.rglob("*.png")], "8 x 8 pixels"),
    ],
)
def test_bad_images_of_lra_are_named(tmp_path, change, message):
    change(make_images(tmp_path) / "cifar10")
    with pytest.raises(InputError) as error:
        load_tokens("lra/image", tmp_path)
    assert message in str(error.value)
    assert str(tmp_path / "cifar10") in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "dataset", "message"),
    [
        ("sst/stsa.binary.train", b"", "sst2", "stsa.binary.train: is empty"),
        ("sst/stsa.binary.dev", b"1 caf\xe9 au lait\n", "sst2", "byte 0xe9 in line 1 is not UTF-8"),
        (
            "sst/stsa.binary.test",
            b"1 fine\n2 dull\n",
            "sst2",
            "line 2 begins with '2', expected a class from 0 to 1",
        ),
        ("sst/stsa.binary.test", b"1\n", "sst2", "line 1 begins with '1'"),
        ("imdb/train.jsonl.gz", b"not gzip", "imdb", "train.jsonl.gz: cannot be read"),
        (
            "imdb/test.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n'),
            "lra/text",
            "line 1 is not an object with text and label",
        ),
        (
            "imdb/test.jsonl.gz",
            gzip.compress(b'{"text": "a", "label": 2}\n'),
            "imdb",
            "line 1 has the label 2",
        ),
        ("imdb/test.jsonl.gz", gzip.compress(b'{"text": " ", "label": 1}\n'), "imdb", "line 1 has no text"),
        ("imdb/test.jsonl.gz", gzip.compress(b'{"text": "a", "label": 1}\n')[:-9], "imdb", "cannot be read"),
        ("tsv_data/new_aan_pairs.test.tsv", b"1.0\ta\tb\tone text\n", "lra/retrieval", "line 1 has 4 fields"),
        (
            "tsv_data/new_aan_pairs.test.tsv",
            b"1.0\ta\tb\t\ttext\n",
            "lra/retrieval",
            "line 1 has an empty text",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_a_bad_file_is_named(root, file, content, dataset, message):
    (root / file).write_bytes(content)
    with pytest.raises(InputError) as error:
        load_tokens(dataset, root)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "dataset", "message"),
    [
        ("sst/stsa.fine.dev", "sst5", "has no validation file"),
        ("imdb/test.jsonl.gz", "imdb", "has no test split"),
        ("tsv_data/new_aan_pairs.eval.tsv", "lra/retrieval", "has no validation file"),
    ],
)
def test_a_missing_split_is_named(root, file, dataset, message):
    (root / file).unlink()
    with pytest.raises(InputError, match=message):
        load_tokens(dataset, root)


def test_an_unknown_data_set():
    with pytest.raises(InputError, match="did you mean 'sst2'"):
        load_tokens("sst-2")
    assert "lra/listops" in TOKEN_DATASETS


def test_words_of_a_review():
    assert (
        words_of("It's GOOD!<br /><br />Don't miss (a) re-run.") == "it's good ! don't miss ( a ) re - run ."
    )
    assert words_of("they wo n't , it 's") == "they wo n't , it 's", "text that is cut into words stays so"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
def test_the_real_sst_and_cifar():
    data = load_tokens("sst2", SHARED).data
    assert [len(split) for split in (data.train, data.validation, data.test)] == [6920, 872, 1821]
    data = load_tokens("sst5", SHARED).data
    assert [len(split) for split in (data.train, data.validation, data.test)] == [8544, 1101, 2210]
