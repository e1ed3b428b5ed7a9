"""Kernels in C++ for processors, compiled by the machine's own compiler when a layer asks for them.

The library installs and runs without a compiler. A layer whose option ``impl`` is "native" compiles its
kernels on its first call, in a few seconds, and keeps them in the user's cache folder for later processes.

The kernels call no PyTorch, so one small file is all that a compiler reads. They take addresses of tensors,
and of the matrix product in the BLAS that PyTorch was built with.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from kernel_attention.errors import InputError, writing
from kernel_attention.user_cache import cache_folder

# Sums may change their order, so that a loop of them fills the processor's vectors. Infinities and NaN stay.
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
_PRODUCTS = {torch.float32: "sgemm_", torch.float64: "dgemm_"}
TYPES = {torch.float32: "float", torch.float64: "double"}


def why_not_native(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why no kernel takes x in the precision ``dtype``; None: one does where a compiler is at hand."""
    if x.device.type != "cpu" and not x.is_meta:
        return f"its kernels are for processors, and the input lies on {x.device}"
    if dtype not in TYPES:
        return f"its kernels compute in float32 and float64, and the input is in {str(dtype)[6:]}"
    return None


@functools.cache
def load_kernels(source: Path) -> ctypes.CDLL:
    """The functions of a C++ file, compiled for this processor; from the cache folder where they lie there.

    A library's name holds a digest of its bytes. One that is damaged would end the process when it is used,
    so it is compiled again.

    Raises:
        InputError: where no compiler is found or it fails, or the cache folder cannot be written.
    """
    key = _digest(b"\0".join([source.read_bytes(), " ".join(_FLAGS).encode(), _processor()]))
    folder = cache_folder() / "kernels"
    kept = sorted(folder.glob(f"{source.stem}-{key}-*.so"))
    library = next((one for one in kept if _is_whole(one)), None) or _compile(source, folder, key)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise InputError(f"native kernels: {library} cannot be loaded ({error}); use impl='auto'") from None


@functools.cache
def matrix_product(dtype: torch.dtype) -> ctypes.c_void_p:
    """The address of the matrix product in PyTorch's BLAS, as Fortran calls it."""
    torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(getattr(ctypes.CDLL(str(torchs)), _PRODUCTS[dtype]), ctypes.c_void_p)
    except (OSError, AttributeError):
        raise InputError(
            f"native kernels: this build of PyTorch shows no {_PRODUCTS[dtype]} ({torchs}); use impl='auto'"
        ) from None


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where the numbers of a contiguous tensor lie; null for None."""
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of the usual names; None where there is none."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if (found := shutil.which(name))), None)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    """True where a kept library has the bytes that its name says; one that has not is removed."""
    try:
        if _digest(library.read_bytes()) == library.stem.rpartition("-")[2]:
            return True
        library.unlink()
    except OSError:  # not readable, or another process has just removed it
        pass
    return False


def _compile(source: Path, folder: Path, key: str) -> Path:
    """Compile into ``folder``, whole or not at all; another process may do the same at the same time."""
    compiler = find_compiler()
    if compiler is None:
        raise InputError(
            "native kernels need a C++ compiler, and none of $CXX, c++, g++ and clang++ is installed; "
            "install one, or use impl='auto'"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder)
    with temporary as name:
        made = Path(name) / "made.so"
        command = [compiler, *_FLAGS, str(source), "-o", str(made)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise InputError(
                f"native kernels: {compiler} cannot be run ({error.strerror}); use impl='auto'"
            ) from None
        if run.returncode != 0 or not made.is_file():
            lines = run.stderr.strip().splitlines() or ["it says nothing"]
            said = next((line for line in lines if "error" in line), lines[-1])
            raise InputError(
                f"native kernels: {compiler} does not compile {source.name} ({said}); use impl='auto'"
            )
        library = folder / f"{source.stem}-{key}-{_digest(made.read_bytes())}.so"
        with writing(library):
            with made.open("rb+") as file:
                os.fsync(file.fileno())  # else a power cut can leave the name without the bytes
            os.replace(made, library)
    return library


def _processor() -> bytes:
    """A name of processors that need kernels of their own: several may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.partition("\t")[0].strip() in ("model name", "flags", "Features")]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(named))]).encode()
