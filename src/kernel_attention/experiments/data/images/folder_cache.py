"""Caches that are folders, whole or absent, named after the size and time of their source."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.images.files import file_stamps

Content = TypeVar("Content")


def cached_folder(
    folder: Path, read: Callable[[Path], Content | None], build: Callable[[Path], None]
) -> Content:
    """The content of a cache, which is built first where it is missing or damaged.

    Args:
        folder: of the cache.
        read: the content of such a folder; None where it is missing or damaged.
        build: fills an empty folder.

    Raises:
        InputError: for a cache that cannot be written.
    """
    content = read(folder)
    if content is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as temporary:
                new = Path(temporary) / "new"
                new.mkdir()
                build(new)
                _publish(new, folder, read)
        except OSError as error:
            raise InputError(f"cache {folder}: cannot be written ({error.strerror or error})") from None
        content = read(folder)
        if content is None:
            raise InputError(f"cache {folder}: is damaged as soon as it is written")
    return content


def cache_name(place: Path, settings: str, label: str) -> str:
    """The source's name, ``label``, and a hash of ``settings`` and of the source's size and time."""
    digest = hashlib.sha256(settings.encode())
    for path, size, changed in file_stamps(place):
        digest.update(f"\n{path} {size} {changed}".encode(errors="surrogateescape"))
    stem = place.name.partition(".")[0] or place.resolve().name
    return f"{stem}-{label}-{digest.hexdigest()[:16]}"


def _publish(new: Path, folder: Path, read: Callable[[Path], object]) -> None:
    """Move a finished cache to its place; where another process put a whole one meanwhile, that one stays."""
    for _ in range(2):
        try:
            os.rename(new, folder)
        except OSError:
            if read(folder) is not None:
                return
            os.rename(folder, new.parent / "damaged")
        else:
            return
    raise OSError(f"{folder} is taken")
