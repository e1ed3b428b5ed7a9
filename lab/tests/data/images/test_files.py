"""The files of folders and archives: each in one pass, and nothing that leads out of them."""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import random
import stat
import tarfile
import tracemalloc
import zipfile

import pytest
from data.images.image_data import make_set, pack, square
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention_lab.data.images.files import file_stamps, read_files, read_images

KINDS = (".tar", ".tar.gz", ".tar.xz", ".tar.bz2", ".zip")


def members(archive, *entries):
    """A tar archive of (name, content) or of ``TarInfo``."""
    with tarfile.open(archive, "w") as file:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                file.addfile(entry)
            else:
                member = tarfile.TarInfo(entry[0])
                member.size = len(entry[1])
                file.addfile(member, io.BytesIO(entry[1]))
    return archive


def link(name, target, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize("suffix", KINDS)
def test_an_archive_holds_the_bytes_of_its_folder(tmp_path, suffix):
    make_set(tmp_path / "set")
    (tmp_path / "set/train/notes.txt").write_text("no image")
    (tmp_path / "set/train/cat/._0.png").write_bytes(b"of macOS")
    folder = list(read_images(tmp_path / "set"))
    assert [path for path, _ in folder] == sorted(path for path, _ in folder)
    assert folder[0] == ("test/cat/0.png", (tmp_path / "set/test/cat/0.png").read_bytes())
    assert len(folder) == 18
    archive = pack(tmp_path / "set", tmp_path / f"packed{suffix}")
    assert sorted(read_images(archive)) == folder
    files = list(read_files(archive, lambda name: name.endswith(".txt")))
    assert ("train/notes.txt", b"no image") in files
    assert ("train/cat", None) in files, "folders have no content"
    assert not any(path.startswith(".") for path, _ in files)


def test_a_folder_follows_links_but_not_in_circles(tmp_path):
    """Subsets of ImageNet are folders of links."""
    make_set(tmp_path / "whole")
    for label in ("cat", "dog"):
        (tmp_path / "part/train").mkdir(parents=True, exist_ok=True)
        (tmp_path / "part/train" / label).symlink_to(tmp_path / "whole/train" / label)
    (tmp_path / "part/again").symlink_to(tmp_path / "part")
    expected = [f"train/{label}/{number}.png" for label in ("cat", "dog") for number in range(3)]
    assert [path for path, _ in read_images(tmp_path / "part")] == expected
    assert [path for path, *_ in file_stamps(tmp_path / "part")] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../cat/0.png", "leads out of the archive"),
        ("train/../../0.png", "leads out of the archive"),
        ("/etc/0.png", "leads out of the archive"),
        ("..\\cat\\0.png", "leads out of the archive"),
        ("C:/cat/0.png", "leads out of the archive"),
    ],
)
def test_a_path_that_climbs_out_is_refused(tmp_path, name, message):
    archive = members(tmp_path / "a.tar", ("train/cat/0.png", square(1)), (name, square(2)))
    with pytest.raises(InputError, match=message) as error:
        list(read_images(archive))
    assert repr(name) in str(error.value)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(zipfile.ZipInfo(name), square(2))
    with pytest.raises(InputError, match=message):
        list(read_images(tmp_path / "a.zip"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_an_archive_is_refused(tmp_path, kind):
    archive = members(tmp_path / "a.tar", ("a.png", square(1)), link("b.png", "a.png", kind))
    with pytest.raises(InputError, match=r"b\.png is a link to a\.png"):
        list(read_images(archive))


def test_a_link_in_a_zip_is_refused(tmp_path):
    member = zipfile.ZipInfo("b.png")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(member, "/etc/passwd")
    with pytest.raises(InputError, match=r"b\.png is a link"):
        list(read_images(tmp_path / "a.zip"))


def test_a_name_twice_is_refused(tmp_path):
    archive = members(tmp_path / "a.tar", ("cat/0.png", square(1)), ("./cat/0.png", square(2)))
    with pytest.raises(InputError, match=r"has cat/0\.png twice"):
        list(read_images(archive))


@pytest.mark.parametrize("suffix", KINDS)
def test_a_truncated_archive_is_refused_wherever_it_was_cut(tmp_path, suffix):
    """tarfile alone takes an archive that ends between two members, or within a header, as whole."""
    generator = random.Random(0)
    files = [(f"train/{number}.png", generator.randbytes(1536)) for number in range(40)]
    if suffix == ".tar":
        archive = members(tmp_path / "whole.tar", *files)
    else:
        (tmp_path / "files/train").mkdir(parents=True)
        for name, content in files:
            (tmp_path / "files" / name).write_bytes(content)
        archive = pack(tmp_path / "files", tmp_path / f"whole{suffix}")
    whole = archive.read_bytes()
    assert len(list(read_images(archive))) == 40
    cut = tmp_path / f"cut{suffix}"
    # A member of the plain tar takes 2,048 bytes: the cuts are between members, in contents and in headers.
    for size in (2048, 4096, 6144 + 100, 6144 + 512, 6144 + 700, 40 * 2048):
        cut.write_bytes(whole[: min(size, len(whole) - 30)])
        with pytest.raises(InputError, match="cannot be read as an archive"):
            list(read_images(cut))


def test_a_tar_that_was_cut_before_it_was_compressed_is_refused(tmp_path):
    whole = members(tmp_path / "a.tar", ("a.png", square(1)), ("b.png", square(2))).read_bytes()
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(whole[:1024]))
    with pytest.raises(InputError, match="it is truncated"):
        list(read_images(tmp_path / "a.tar.xz"))


@pytest.mark.parametrize(
    "content", [b"", b"plain text, no archive\n" * 400, b"\xfd7zXZ\x00junk", b"PK\x03\x04junk"]
)
def test_a_file_that_is_no_archive_is_named(tmp_path, content):
    (tmp_path / "a.tar.xz").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.tar\.xz: cannot be read as an archive") as error:
        list(read_images(tmp_path / "a.tar.xz"))
    assert "\n" not in str(error.value)


def test_a_member_that_no_memory_holds_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_ATTENTION_MEMORY_LIMIT", "0.001")
    big = bytes(2 << 20)
    with pytest.raises(InputError, match="more than the limit"):
        list(read_images(members(tmp_path / "a.tar", ("a.png", big))))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.png").write_bytes(big)
    with pytest.raises(InputError, match="more than the limit"):
        list(read_images(tmp_path / "set"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_no_file_of_a_set(tmp_path):
    """Reading one would wait for ever."""
    make_set(tmp_path / "set")
    os.mkfifo(tmp_path / "set/train/cat/9.png")
    with pytest.raises(InputError, match=r"9\.png: is no file"):
        list(read_images(tmp_path / "set"))


def header(name, size, kind=tarfile.REGTYPE):
    """The header of a tar member that claims ``size`` bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("name", ["notes.txt", ".hidden.png", "train/cat/0.png"])
@pytest.mark.parametrize("size", [10_000, 2**36, 2**62])
def test_a_member_that_claims_more_than_there_is_ends_at_once(tmp_path, name, size):
    (tmp_path / "a.tar").write_bytes(header(name, size) + bytes(4000))
    with pytest.raises(InputError, match=r"a\.tar: (cannot be read as an archive|train/cat)"):
        list(read_images(tmp_path / "a.tar"))


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_header_that_memory_would_hold_whole_is_refused(tmp_path, kind):
    """A GiB of it is 160 kB of xz; of the 64 MiB here no more than a few may be read."""
    content = header("long", 1 << 26, kind) + bytes((1 << 26) + 1024)
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(content, preset=0))
    tracemalloc.start()
    with pytest.raises(InputError, match="header has more than 1048576 bytes"):
        list(read_images(tmp_path / "a.tar.xz"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_a_zip_member_is_read_no_further_than_it_claims(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", bytes(1 << 26))
    content = (tmp_path / "a.zip").read_bytes()
    small = (1000).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(content.replace((1 << 26).to_bytes(4, "little"), small))
    tracemalloc.start()
    with contextlib.suppress(InputError):
        list(read_images(tmp_path / "a.zip"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


SPARSE = [
    f"GNU.sparse.{name}" for name in ("map", "major", "minor", "realsize", "size", "numblocks", "offset")
]
RECORDS = st.dictionaries(
    st.sampled_from([*SPARSE, "size", "path", "mtime"]),
    st.one_of(st.sampled_from(["0", "1", "0,", "0,x", "-1", "1e9", "9" * 5000]), st.text(max_size=5)),
    max_size=4,
)


@given(records=RECORDS, damage=st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=6))
def test_any_header_of_a_tar_is_read_or_refused(tmp_path_factory, records, damage):
    lines = [f"{key}={value}\n".encode(errors="replace") for key, value in records.items()]
    body = b"".join(b"%d %s" % (len(line) + 1 + len(str(len(line) + 4)), line) for line in lines)
    member = bytearray(header("train/cat/0.png", 100))
    for place, value in damage:
        member[place] = value
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member)
    content = header("records", len(body), tarfile.XHDTYPE) + body + bytes(-len(body) % 512)
    path = tmp_path_factory.getbasetemp() / "any.tar"
    path.write_bytes(content + bytes(member) + bytes(512) + bytes(1024))
    read = 0
    with contextlib.suppress(InputError):  # and nothing else
        read = sum(len(file.content or b"") for file in read_files(path, lambda name: True))
    assert read <= 2048


@pytest.mark.parametrize("suffix", [".tar", ".zip", ""])
def test_a_name_that_is_no_text_is_escaped(tmp_path, suffix):
    make_set(tmp_path / "set")
    os.rename(tmp_path / "set/test/cat", os.fsencode(tmp_path / "set/test") + b"/caf\xe9")
    place = tmp_path / f"set{suffix}"
    if suffix:
        try:
            pack(tmp_path / "set", place)
        except UnicodeEncodeError:
            pytest.skip("this archive holds no such name")
    paths = [path for path, _ in read_images(place)]
    assert "test/caf\\udce9/0.png" in paths
    assert all(path.encode() for path in paths)


def test_a_link_in_a_circle_is_named(tmp_path):
    make_set(tmp_path / "set")
    (tmp_path / "set/train/loop.png").symlink_to("loop.png")
    with pytest.raises(InputError, match=r"loop\.png: cannot be read"):
        list(read_images(tmp_path / "set"))


def test_an_image_is_read_when_it_is_asked_for(tmp_path):
    make_set(tmp_path / "set")
    images = read_images(tmp_path / "set")
    next(images)
    (tmp_path / "set/test/cat/1.png").write_bytes(b"changed")
    assert next(images)[1] == b"changed"
