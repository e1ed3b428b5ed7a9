"""The bytes of image files as arrays of equal size, decoded by several processes where there are many.

A file is turned as its EXIF orientation says. Gray, palette and CMYK images become RGB. An alpha channel is
dropped, as torchvision and timm do. Of 16 bits the upper 8 are kept. Floating-point images are refused.
With an ``image_size`` the short side is resized to it (bicubic) and the middle is cut out.
"""

from __future__ import annotations

import io
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.limits import require_memory
from kernel_attention_lab.child_process import process_pool
from kernel_attention_lab.extras import install_hint

# Those of the accepted suffixes. Pillow knows more, and starts Ghostscript on a program in PostScript.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_NARROW = 16  # long side by short side
_BATCH_FILES = 256
_BATCH_BYTES = 1 << 23
_PATIENCE = 30.0  # seconds of decoding here before other processes are started, which takes seconds too

Content = bytes | np.ndarray
"""Of an image: its file, or its pixels (height, width, 3) uint8 where it is not encoded."""

Batch = list[tuple[str, Content]]


def decode_image(content: Content, where: str, image_size: int = 0) -> np.ndarray:
    """The pixels of an image file, (height, width, 3) uint8.

    Args:
        content: the bytes of the file, or its pixels.
        where: names the file in errors.
        image_size: height and width of the result; 0 keeps those of the file.

    Raises:
        InputError: as ``opened_image``, and for an image of floating-point values.
    """
    if isinstance(content, np.ndarray):
        from PIL import Image

        return np.asarray(_fit(Image.fromarray(content), image_size), dtype=np.uint8)
    with opened_image(content, where) as image:
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(image)
        return np.asarray(_fit(_rgb(upright, where), image_size), dtype=np.uint8)


@contextmanager
def opened_image(content: bytes, where: str) -> Iterator[Any]:
    """Pillow's image of a file, to be decoded inside the block.

    Raises:
        InputError: where the bytes are no whole image of a format in ``IMAGE_SUFFIXES``, or one of more
            pixels than memory allows, or than Pillow's ``MAX_IMAGE_PIXELS``.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise InputError(install_hint(error, "reading images") or str(error)) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                width, height = image.size
                require_memory(f"{where}: {width} x {height} pixels", 4 * width * height, "leave it out")
                yield image
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{where}: has too many pixels ({error})") from None
    except UnidentifiedImageError:
        raise InputError(
            f"{where}: not readable as an image (it is no image of a known format); accepted: "
            f"{', '.join(_FORMATS)}"
        ) from None
    except Exception as error:  # Pillow's plugins raise anything for a damaged file
        reason = str(error) or type(error).__name__
        raise InputError(f"{where}: not readable as an image ({reason})") from None


def _rgb(image: Any, where: str) -> Any:
    from PIL import Image

    if image.mode == "F":
        raise InputError(f"{where}: has floating-point values (accepted: images of 8 or 16 bits)")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((np.clip(values, 0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # Pillow warns of some palettes with transparency otherwise
    return image.convert("RGB")


def _fit(image: Any, size: int) -> Any:
    from PIL import Image

    if not size or image.size == (size, size):
        return image
    scale = size / min(image.size)
    width, height = (max(round(side * scale), size) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    if max(width, height) > _NARROW * size:  # the whole of it at that size could fill the memory
        across, down = _needed(image.width, width, size), _needed(image.height, height, size)
        scale = image.width / width, image.height / height
        box = (across[0] * scale[0], down[0] * scale[1], across[1] * scale[0], down[1] * scale[1])
        width, height = across[1] - across[0], down[1] - down[0]
        left, top = left - across[0], top - down[0]
        image = image.resize((width, height), Image.Resampling.BICUBIC, box)
    else:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return image.crop((left, top, left + size, top + size))


def _needed(side: int, resized: int, size: int) -> tuple[int, int]:
    """Of ``resized`` pixels, where those begin and end to which those below the middle ``size`` reach.

    Bicubic interpolation reaches over two pixels of the image or of the result, whichever are larger.
    """
    first, reach = (resized - size) // 2, math.ceil(3 * max(1.0, resized / side))
    return max(first - reach, 0), min(first + size + reach, resized)


def decode_images(
    files: Iterable[tuple[str, Content]], place: str, image_size: int = 0, workers: int | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(path, pixels) of every file, in their order, with few files in memory at a time.

    Args:
        files: (path, bytes or pixels).
        place: stands before the path in errors.
        image_size: of ``decode_image``.
        workers: processes; by default 4, or the number of cores where that is smaller. 1 decodes here, as any
            number does in the first seconds. The result does not depend on it.

    Raises:
        InputError: as ``decode_image``.
        RuntimeError: where another process ended before its time.
    """
    workers = min(4, os.cpu_count() or 1) if workers is None else workers
    decode = partial(_decode_batch, place, image_size)
    batches = _batches(files)
    begun = time.monotonic()
    for batch in batches:
        yield from zip((path for path, _ in batch), decode(batch), strict=True)
        if workers > 1 and time.monotonic() - begun > _PATIENCE:
            break
    else:
        return
    pool = process_pool(workers)
    try:
        waiting: deque[tuple[Batch, Future[list[np.ndarray]]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(decode, batch)))
            if len(waiting) > 2 * workers:
                yield from _next_batch(waiting)
        while waiting:
            yield from _next_batch(waiting)
    except BrokenProcessPool:
        raise RuntimeError(
            f"{place}: a process that decodes its images has ended; a script must call this below "
            "`if __name__ == '__main__':`, and workers=1 needs no other process"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _next_batch(
    waiting: deque[tuple[Batch, Future[list[np.ndarray]]]],
) -> Iterator[tuple[str, np.ndarray]]:
    batch, decoded = waiting.popleft()
    yield from zip((path for path, _ in batch), decoded.result(), strict=True)


def _decode_batch(place: str, image_size: int, batch: Batch) -> list[np.ndarray]:
    return [decode_image(content, f"{place}: {path}", image_size) for path, content in batch]


def _batches(files: Iterable[tuple[str, Content]]) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for file in files:
        batch.append(file)
        size += len(file[1])
        if len(batch) == _BATCH_FILES or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
