"""The files of an image set, one after the other: of a folder, or of an archive that is read where it is."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple, Protocol

from kernel_attention.errors import InputError, reading
from kernel_attention.limits import require_memory

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
ARCHIVE_SUFFIXES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tbz2", ".tgz", ".txz", ".zip")

_BLOCK = 512  # of a tar file; one block of zeros ends it
_READ_AT_ONCE = 1 << 16  # bytes; tarfile copies the unread ones at every read, so many are slow
_MOST_HEADER = 1 << 20  # bytes of a member's header, long names and records of attributes among them
_LOOKED_AT = 100  # files
_OPENERS = ((b"\xfd7zXZ\x00", lzma.open), (b"\x1f\x8b", gzip.open), (b"BZh", bz2.open))


class SetFile(NamedTuple):
    """A file of an image set: its path below the place, with ``/``, and its bytes; None for a folder.

    The path is text that can be written anywhere: what is no UTF-8 in it is escaped.
    """

    path: str
    content: bytes | None


class FileStamp(NamedTuple):
    """Tells whether a file is another one: path, bytes, times in ns, and its number in the file system.

    ``changed`` is when the system last saw a change of the file. Programs set ``modified``, and archives and
    images of containers often to one moment for all files.
    """

    path: str
    size: int
    modified: int
    changed: int
    number: int


def is_image(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def read_images(place: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of every image of a folder or an archive, in one pass.

    The rules and errors are those of ``read_files``. An image is a file with a suffix of ``IMAGE_SUFFIXES``.

    Raises:
        InputError: where there is no image, and as ``read_files`` does.
    """
    found = False
    for path, content in read_files(place, is_image):
        if content is not None:
            found = True
            yield path, content
    if not found:
        raise InputError(f"{place}: has no images (accepted: {', '.join(IMAGE_SUFFIXES)})")


def read_files(place: Path, wanted: Callable[[str], bool]) -> Iterator[SetFile]:
    """The folders of a place, and its files whose names are ``wanted``, in one pass.

    A folder is read in the order of names and follows links. A tar archive (plain, gzip, bzip2 or xz) is read
    as a stream, in its own order, and a zip archive in that of its directory; nothing is unpacked. Files and
    folders whose name begins with a dot, and ``__MACOSX``, are left out.

    Raises:
        InputError: for a place that is missing, unreadable, truncated or no archive; for a member that is a
            link, appears twice, or has a path that is absolute or leads out of the archive.
    """
    place = Path(place)
    if place.is_dir():
        entries = _folder(place, wanted)
    elif place.is_file():
        entries = _distinct(_archive(place, wanted), place)
    else:
        kind = "is neither a folder nor a file" if place.exists() else "does not exist"
        raise InputError(f"{place}: {kind} (accepted: a folder of images, or {', '.join(ARCHIVE_SUFFIXES)})")
    return entries


def file_stamps(place: Path) -> Iterator[FileStamp]:
    """The stamp of an archive, or of every file of a folder.

    Raises:
        InputError: where it cannot be read.
    """
    try:
        if not place.is_dir():
            yield _stamp(place.name, place.stat())
            return
        for path, file, is_folder in _walk(place):
            if not is_folder:
                yield _stamp(path, file.stat())
    except OSError as error:
        raise InputError(f"{error.filename or place}: cannot be read ({error.strerror or error})") from None


def _stamp(path: str, state: os.stat_result) -> FileStamp:
    return FileStamp(path, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


def _folder(folder: Path, wanted: Callable[[str], bool]) -> Iterator[SetFile]:
    for path, file, is_folder in _walk(folder):
        if is_folder:
            yield SetFile(path, None)
        elif wanted(file.name):
            yield SetFile(path, read_file(file))


def _walk(folder: Path, path: str = "", above: tuple[str, ...] = ()) -> Iterator[tuple[str, Path, bool]]:
    """(path below the folder, path, whether it is a folder) of what a folder holds, in the order of names.

    A folder is followed by what it holds.
    """
    real = os.path.realpath(folder)
    if real in above:  # a link to a folder that contains it
        return
    with reading(f"folder {folder}"), os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if not _is_hidden(entry.name):
            name = f"{path}{readable(entry.name)}"
            with reading(entry.path):
                is_folder = entry.is_dir()  # it may be a link in a circle
            yield name, Path(entry.path), is_folder
            if is_folder:
                yield from _walk(Path(entry.path), f"{name}/", (*above, real))


def readable(name: str) -> str:
    """A file's name as text that can be written: what is no UTF-8 in it is escaped, as by ``ascii``."""
    return name.encode(errors="backslashreplace").decode()


def read_file(path: Path) -> bytes:
    """The bytes of a regular file; InputError where it is another thing, or larger than memory allows."""
    with reading(f"file {path}"):
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise InputError(f"{path}: is no file")
        require_memory(f"file {path}", state.st_size, "leave it out")
        return path.read_bytes()


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _archive(place: Path, wanted: Callable[[str], bool]) -> Iterator[SetFile]:
    try:
        with place.open("rb") as file:
            start = file.read(6)
        if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            yield from _zip_members(place, wanted)
            return
        opener = next((opener for magic, opener in _OPENERS if start.startswith(magic)), None)
        with contextlib.closing(opener(place) if opener else place.open("rb")) as stream:
            yield from _tar_members(stream, place, wanted)
    except InputError:
        raise
    except Exception as error:  # the standard library's readers raise anything for a damaged file
        reason = (
            (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        )
        raise InputError(f"file {place}: cannot be read as an archive ({reason})") from None


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _TarStream(io.RawIOBase):
    """The bytes of a tar, with what tarfile does not look after.

    It remembers its last bytes, because tarfile takes a tar that was cut between members as whole. It ends
    the reading of a truncated one, which tarfile goes on with for as many bytes as a header claims. It reads
    no further than ``limit``, as tarfile takes headers of any size into memory.
    """

    def __init__(self, stream: _Readable) -> None:
        self.stream = stream
        self.last = b""
        self.position, self.limit = 0, _MOST_HEADER
        self.has_ended = False

    def read(self, size: int = -1) -> bytes:
        if self.has_ended:
            raise EOFError("it is truncated")
        if self.position >= self.limit + _READ_AT_ONCE:
            raise tarfile.ReadError(f"a member's header has more than {_MOST_HEADER} bytes")
        found = self.stream.read(size)
        self.position += len(found)
        self.has_ended = not found
        self.last = (self.last + found)[-_BLOCK:] if len(found) < _BLOCK else found[-_BLOCK:]
        return found


def _tar_members(stream: _Readable, place: Path, wanted: Callable[[str], bool]) -> Iterator[SetFile]:
    tar = _TarStream(stream)
    with tarfile.open(fileobj=tar, mode="r|", bufsize=_READ_AT_ONCE) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else tarfile keeps every member that it has seen
            tar.limit = archive.offset + _MOST_HEADER  # where the next one begins
            path = _inside(member.name, place)
            if path is None:
                continue
            if member.isdir():
                yield SetFile(path, None)
            elif member.issym() or member.islnk():
                raise InputError(
                    f"{place}: {member.name} is a link to {member.linkname}; accepted: files only"
                )
            elif member.isfile() and wanted(PurePosixPath(path).name):
                require_memory(f"{place}: {path}", member.size, "leave it out")
                content = archive.extractfile(member)
                assert content is not None
                yield SetFile(path, content.read())
    tar.limit = sys.maxsize
    while not tar.has_ended:  # the rest of a compressed stream is checked as it is read
        tar.read(_READ_AT_ONCE)
    if len(tar.last) < _BLOCK or any(tar.last):
        raise InputError(f"file {place}: cannot be read as an archive (it is truncated)")


def _zip_members(place: Path, wanted: Callable[[str], bool]) -> Iterator[SetFile]:
    with zipfile.ZipFile(place) as archive:
        for member in archive.infolist():
            path = _inside(member.filename, place)
            if path is None:
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                raise InputError(f"{place}: {member.filename} is a link; accepted: files only")
            if member.is_dir():
                yield SetFile(path, None)
            elif wanted(PurePosixPath(path).name):
                require_memory(f"{place}: {path}", member.file_size, "leave it out")
                with archive.open(member) as content:  # no more of it than its header says
                    yield SetFile(path, content.read(member.file_size))


def _inside(name: str, place: Path) -> str | None:
    """The path of a member without ``./``; None for a hidden one and for the archive's own folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or PureWindowsPath(name).is_absolute():
        raise InputError(f"{place}: member {name!r} has a path that leads out of the archive")
    if not path.parts or any(map(_is_hidden, path.parts)):
        return None
    return readable(path.as_posix())


def _distinct(entries: Iterator[SetFile], place: Path) -> Iterator[SetFile]:
    seen: set[str] = set()
    for entry in entries:
        if entry.content is not None:
            if entry.path in seen:
                raise InputError(f"{place}: has {entry.path} twice")
            seen.add(entry.path)
        yield entry


def holds_file(place: Path, wanted: Callable[[str], bool]) -> bool:
    """True where one of the first files of a folder or an archive is wanted; False where none can be read."""
    looked_at = 0

    def is_found(name: str) -> bool:
        nonlocal looked_at
        looked_at += 1
        if looked_at > _LOOKED_AT:
            raise InputError(f"{place}: has nothing wanted among its first files")
        return wanted(name)

    try:
        return any(content is not None for _, content in read_files(place, is_found))
    except InputError:
        return False
