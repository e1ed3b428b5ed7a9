"""Where sets are looked for, what is listed, what an unknown name hears; a download leaves no halves."""

from pathlib import Path

import pytest

from kernel_attention.errors import InputError
from kernel_attention.files import cache_folder
from kernel_attention_lab.data import list_time_series, load_time_series
from kernel_attention_lab.data.archive import locate


def test_the_bundled_sets_are_listed_without_importing_aeon(run_python):
    code = (
        "import sys; from kernel_attention_lab.data import list_time_series, load_time_series;"
        "names = [info.name for info in list_time_series()]; load_time_series('JapaneseVowels');"
        "print('aeon' in sys.modules, 'BasicMotions' in names, 'JapaneseVowels' in names)"
    )
    assert run_python(code).split() == ["False", "True", "True"]


def test_what_is_listed_can_be_located_and_lies_there(toy):
    listed = list_time_series(toy.root)
    assert "Toy" in [info.name for info in listed]
    assert [info.name.lower() for info in listed] == sorted(info.name.lower() for info in listed)
    for info in listed:
        location = locate(info.name, toy.root)
        assert location.train.is_relative_to(info.path)
    assert {info.source for info in listed} == {"data root", "aeon"}


def test_zips_and_flat_files_are_listed_and_halves_are_not(toy, tmp_path):
    toy.zip()
    for name in ("Flat_TRAIN.ts", "Flat_TEST.ts", "Half_TRAIN.ts"):
        (tmp_path / name).touch()
    names = {info.name: info.path for info in list_time_series(tmp_path) if info.source == "data root"}
    assert names == {"Toy": tmp_path / "Toy.zip", "Flat": tmp_path}


def test_the_environment_variable_is_the_default_root_and_the_argument_wins(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_ATTENTION_DATA", str(toy.root))
    assert locate("Toy").train.parent == toy.folder
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(InputError, match="unknown dataset 'Toy'"):
        locate("Toy", other)


def test_the_data_root_is_searched_before_the_bundled_sets(toy):
    toy.folder.rename(toy.root / "BasicMotions")
    for path in (toy.root / "BasicMotions").iterdir():
        path.rename(path.with_name(path.name.replace("Toy", "BasicMotions")))
    assert len(load_time_series("BasicMotions", toy.root).train) == 4
    assert len(load_time_series("BasicMotions").train) == 40


def test_the_cache_is_searched_last(toy):
    cache_folder().mkdir()
    toy.folder.rename(cache_folder() / "Toy")
    assert locate("Toy").train.parent == cache_folder() / "Toy"


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_data_root_that_does_not_exist(by, tmp_path, monkeypatch):
    gone = str(tmp_path / "gone")
    if by == "variable":
        monkeypatch.setenv("KERNEL_ATTENTION_DATA", gone)
    origin = "data_root" if by == "argument" else "environment variable KERNEL_ATTENTION_DATA"
    for call in (lambda root: load_time_series("JapaneseVowels", root), list_time_series):
        with pytest.raises(InputError, match=rf"^{origin} '.*gone' does not exist; accepted: "):
            call(gone if by == "argument" else None)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("japanese_vowels", "JapaneseVowels"),
        ("Handwritting", "Handwriting"),
        ("Toyy", "Toy"),
        ("PEMSSF", "PEMS-SF"),
    ],
)
def test_an_unknown_name_hears_the_nearest_ones(name, near, toy):
    with pytest.raises(InputError) as error:
        load_time_series(name, toy.root)
    message = str(error.value)
    assert message.startswith(f"unknown dataset {name!r}; did you mean ")
    assert repr(near) in message
    assert "BasicMotions" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["", ".", "..", "../Toy", "Toy/Toy", "/etc", "a" * 300, "a\nb", None, 3])
def test_a_name_that_is_none(name, toy):
    with pytest.raises(InputError, match=r"^dataset .* is not the name of a data set") as error:
        load_time_series(name, toy.root)
    assert "\n" not in str(error.value)


def test_a_folder_with_one_of_the_two_files(toy):
    (toy.folder / "Toy_TEST.ts").unlink()
    with pytest.raises(InputError, match=r"dataset 'Toy': .*Toy has no Toy_TEST.ts"):
        load_time_series("Toy", toy.root)


def test_an_empty_folder_is_no_set(tmp_path):
    (tmp_path / "Empty").mkdir()
    with pytest.raises(
        InputError,
        match=r"dataset 'Empty': .*Empty has no Empty_TRAIN.ts and Empty_TEST.ts \(it has: nothing\)",
    ):
        load_time_series("Empty", tmp_path)


class _Archive:
    """Stands for aeon's loader, whose addresses are fixed and need the internet."""

    def __init__(self, monkeypatch, files, failure=None):
        self.folders = []
        self.files, self.failure = files, failure
        monkeypatch.setattr("aeon.datasets.load_classification", self)

    def __call__(self, name, split, extract_path):
        folder = Path(extract_path) / name
        folder.mkdir()
        self.folders.append(Path(extract_path))
        for file, content in self.files.items():
            (folder / file).write_text(content)
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize("root_given", [True, False])
def test_a_download_arrives_whole_in_the_root_or_the_cache_and_is_used_again(
    root_given, toy, tmp_path, monkeypatch
):
    files = {f"Handwriting_{split}.ts": toy.text() for split in ("TRAIN", "TEST")}
    archive = _Archive(monkeypatch, files)
    root = tmp_path / "root"
    root.mkdir()
    destination = root if root_given else cache_folder()
    for _ in range(2):
        assert len(load_time_series("Handwriting", root if root_given else None).train) == 4
    assert len(archive.folders) == 1
    assert archive.folders[0].parent == destination
    assert [path.name for path in destination.iterdir()] == ["Handwriting"]


@pytest.mark.parametrize("failure", [ValueError("no\nnetwork"), OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_download_leaves_no_half(failure, tmp_path, monkeypatch):
    _Archive(monkeypatch, {"Handwriting_TRAIN.ts": "half"}, failure)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else InputError
    with pytest.raises(expected) as error:
        load_time_series("Handwriting", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "\n" not in str(error.value)
    if expected is InputError:
        assert "its download failed" in str(error.value)
        assert "put Handwriting_TRAIN.ts and Handwriting_TEST.ts" in str(error.value)


def test_a_data_root_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file' is not a folder"):
        load_time_series("JapaneseVowels", tmp_path / "file")
