"""The corruptions of ImageNet-C (Hendrycks & Dietterich 2019, arXiv:1903.12261), by imagecorruptions-imaug.

The library draws from NumPy's global generator, except in two corruptions that take a seed of their own. Here
every image, corruption and severity has its own seed. So an image is corrupted in the same way whatever
images stand beside it, and the caller's generator is as it was before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np

from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.files import cache_folder, write_atomically, write_text_atomically
from kernel_attention_lab.child_process import process_pool
from kernel_attention_lab.data.fetching import made_once

CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
    "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 32  # pixels of a side: the library refuses less

_TAKE_A_SEED = ("impulse_noise", "glass_blur")  # without one they draw from the system's entropy
_BLOCK = 64  # images a process takes at a time


def corrupt_image(
    image: np.ndarray, corruption: str, severity: int, *, seed: int = 0, index: int = 0
) -> np.ndarray:
    """One corrupted image.

    Args:
        image: (H, W, 3) uint8, both sides at least 32 pixels.
        corruption: a name of ``CORRUPTIONS``.
        severity: 1 to 5.
        seed: of the random part.
        index: the number of the image in its data set; images with different numbers get different draws.

    Returns:
        (H, W, 3) uint8.

    Raises:
        InputError: for an unknown corruption or severity, and for another shape or type of image.
    """
    _check_images(np.asarray(image)[None])
    _check_choice(corruption, severity)
    return _corrupted(np.asarray(image), corruption, severity, seed, index)


def corrupt_images(
    images: np.ndarray, corruption: str, severity: int, *, seed: int = 0, indices: Sequence[int] | None = None
) -> np.ndarray:
    """Corrupted images, each as ``corrupt_image`` gives it.

    Args:
        images: (n, H, W, 3) uint8.
        corruption: a name of ``CORRUPTIONS``.
        severity: 1 to 5.
        seed: of the random part.
        indices: the numbers of the images in their data set, by default 0 to n - 1.

    Returns:
        (n, H, W, 3) uint8.

    Raises:
        InputError: as ``corrupt_image`` does, and where ``indices`` does not have one number an image.
    """
    _check_images(images)
    _check_choice(corruption, severity)
    return _block(images, _numbers(indices, len(images)), corruption, severity, seed)


def corrupted_images(
    images: np.ndarray,
    *,
    indices: Sequence[int] | None = None,
    seed: int = 0,
    corruptions: Sequence[str] = CORRUPTIONS,
    cache: str | Path | None = None,
    workers: int = 1,
    on_progress: Callable[[str], object] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Every corruption of a set of images at all five severities, from the cache where it is there.

    The cache has one file a corruption. It is written when the corruption is complete, so an interrupted call
    continues at the first missing one. The folder's name is a digest of the images, their numbers, the seed
    and the versions of the libraries.

    Args:
        images: (n, H, W, 3) uint8, both sides at least 32 pixels.
        indices: the numbers of the images in their data set, by default 0 to n - 1.
        seed: of the random part.
        corruptions: names of ``CORRUPTIONS``.
        cache: folder of the cache, by default ``corruptions`` in the user's cache folder.
        workers: processes that corrupt at the same time; 1 is this process alone. A script that asks for more
            needs ``if __name__ == "__main__":``, because they import it.
        on_progress: called with a line of progress before a corruption is made.

    Yields:
        The corruption's name and its images, (5, n, H, W, 3) uint8 by severity, a read-only memory map.

    Raises:
        InputError: for input as ``corrupt_images`` refuses it, and where the cache cannot be written.
    """
    _check_images(images)
    numbers = _numbers(indices, len(images))
    for corruption in corruptions:
        _check_choice(corruption, 1)
    require_positive(workers=workers)
    folder = Path(cache) if cache is not None else cache_folder() / "corruptions"
    folder /= _key(images, numbers, seed)
    return _from_cache(
        images, numbers, seed, corruptions, folder, workers, on_progress or (lambda line: None)
    )


def library_versions() -> dict[str, str]:
    """The versions of the libraries on which the corrupted pixels depend."""
    _library()
    import cv2

    versions = {name: version(name) for name in ("imagecorruptions-imaug", "scikit-image", "scipy", "pillow")}
    return versions | {"opencv": cv2.__version__, "numpy": np.__version__}


def _from_cache(
    images: np.ndarray,
    numbers: np.ndarray,
    seed: int,
    corruptions: Sequence[str],
    folder: Path,
    workers: int,
    on_progress: Callable[[str], object],
) -> Iterator[tuple[str, np.ndarray]]:
    shape = (len(SEVERITIES), *images.shape)
    with contextlib.ExitStack() as held:
        # No process starts before the first corruption that has to be made.
        pool = held.enter_context(process_pool(workers, _use_one_thread)) if workers > 1 else None
        for corruption in corruptions:
            path = folder / f"{corruption}.npy"

            read = functools.partial(_opened, path, shape)
            make = functools.partial(_write, path, images, numbers, seed, pool, workers, on_progress)
            yield corruption, made_once(path, read, make)


def _opened(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The file's array; None where it is missing, damaged or of another shape."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return array if array.shape == shape and array.dtype == np.uint8 else None


def _write(
    path: Path,
    images: np.ndarray,
    numbers: np.ndarray,
    seed: int,
    pool: Executor | None,
    workers: int,
    on_progress: Callable[[str], object],
) -> None:
    """Write the five severities of a corruption, a block of images at a time."""
    on_progress(f"corrupting {len(images)} images: {path.stem}")

    def write(file: IO[bytes]) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(SEVERITIES), *images.shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for severity in SEVERITIES:
            for start in range(0, len(images), _BLOCK * workers):
                parts = [slice(first, first + _BLOCK) for first in _starts(start, workers, len(images))]
                work = functools.partial(_block, corruption=path.stem, severity=severity, seed=seed)
                each = [[np.ascontiguousarray(images[part]) for part in parts], [numbers[p] for p in parts]]
                for block in pool.map(work, *each) if pool is not None else map(work, *each):
                    file.write(block.tobytes())

    about = {"images": list(images.shape), "seed": seed, "libraries": library_versions()}
    write_text_atomically(path.parent / "about.json", json.dumps(about, indent=2))
    write_atomically(path, write)


def _starts(start: int, workers: int, count: int) -> range:
    return range(start, min(start + _BLOCK * workers, count), _BLOCK)


def _use_one_thread() -> None:
    import cv2

    cv2.setNumThreads(1)


def _block(images: np.ndarray, numbers: np.ndarray, corruption: str, severity: int, seed: int) -> np.ndarray:
    pairs = zip(images, numbers.tolist(), strict=True)
    return np.stack([_corrupted(image, corruption, severity, seed, index) for image, index in pairs])


def _corrupted(image: np.ndarray, corruption: str, severity: int, seed: int, index: int) -> np.ndarray:
    corrupt = _library().corrupt
    drawn = _seed_of(seed, index, corruption, severity)
    options = {"seed": drawn} if corruption in _TAKE_A_SEED else {}
    state = np.random.get_state()
    np.random.seed(drawn)
    try:
        # `zoom_blur` and `snow` print where a rounded size differs by a pixel, which they mend themselves.
        with contextlib.redirect_stdout(io.StringIO()):
            return corrupt(image, severity=severity, corruption_name=corruption, **options)
    finally:
        np.random.set_state(state)


def _seed_of(seed: int, index: int, corruption: str, severity: int) -> int:
    """The seed of one image, corruption and severity, below 2^32."""
    words = (seed, index, CORRUPTIONS.index(corruption), severity)
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def _library() -> Any:
    try:
        import imagecorruptions
    except ModuleNotFoundError:
        raise
    except ImportError as error:  # OpenCV with windows, on a machine that has no libraries for windows
        raise InputError(
            f"corruptions need OpenCV, which cannot be loaded here ({error}): pip uninstall opencv-python; "
            "pip install --force-reinstall opencv-python-headless"
        ) from None
    return imagecorruptions


def _key(images: np.ndarray, numbers: np.ndarray, seed: int) -> str:
    digest = hashlib.sha256(json.dumps([images.shape, seed, library_versions()], sort_keys=True).encode())
    digest.update(numbers.tobytes())
    for image in images:  # one at a time: the images may be a memory map larger than the memory
        digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()[:32]


def _numbers(indices: Sequence[int] | None, count: int) -> np.ndarray:
    numbers = np.arange(count) if indices is None else np.asarray(indices)
    if numbers.shape != (count,) or numbers.dtype.kind not in "iu" or (numbers < 0).any():
        raise InputError(f"indices must be {count} whole numbers of at least 0, one an image")
    return numbers.astype(np.int64)


def _check_images(images: np.ndarray) -> None:
    is_right = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 4
    if not is_right or images.shape[-1] != 3 or len(images) == 0 or min(images.shape[1:3]) < SMALLEST:
        what = f"shape {images.shape}, {images.dtype}" if isinstance(images, np.ndarray) else type(images)
        raise InputError(f"images to corrupt must be (n, H, W, 3) uint8 with H, W >= {SMALLEST}, not {what}")


def _check_choice(corruption: str, severity: int) -> None:
    if corruption not in CORRUPTIONS:
        raise unknown("corruption", corruption, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise InputError(f"severity={severity!r} must be one of 1, 2, 3, 4, 5")
