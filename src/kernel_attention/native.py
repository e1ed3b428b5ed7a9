"""Engines in C++, built once for this machine by an explicit command.

    python -m kernel_attention.native          # what is built
    python -m kernel_attention.native build    # compile it, in a few seconds, with the machine's own compiler

The library installs and runs without a compiler. ``build`` keeps what it compiles in the user's cache folder,
and every process that starts afterwards has it: ``impl="auto"`` takes it where it was measured to be faster.
Nothing else compiles.

The C++ files call no PyTorch, so one small file is all that a compiler reads. They take addresses of tensors,
and of the matrix product in the BLAS that PyTorch was built with.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_attention.errors import InputError, writing
from kernel_attention.files import cache_folder

COMMAND = "python -m kernel_attention.native build"
TYPES = {torch.float32: "float", torch.float64: "double"}

# Sums may change their order, so that a loop of them fills the processor's vectors. Infinities and NaN stay.
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
_PRODUCTS = {torch.float32: "sgemm_", torch.float64: "dgemm_"}


class NativeLibrary:
    """The functions of a C++ file, where it was built for this processor.

    A library's name holds a digest of its bytes. One that is damaged would end the process when it is used,
    so it counts as not built.

    Args:
        name: of the mechanism.
        source: the C++ file.

    Attributes:
        is_built: whether it was when this process imported it, or built it. A compiler reads this.
    """

    def __init__(self, name: str, source: Path) -> None:
        self.name, self.source = name, source
        self.is_built = False
        self.look()

    def why_not(self, x: Tensor, dtype: torch.dtype) -> str | None:
        """The reason why the library does not take x in the precision ``dtype``; None: it does."""
        if x.device.type != "cpu" and not x.is_meta:
            return f"it is for CPUs, and the input lies on {x.device}"
        if dtype not in TYPES:
            return f"it computes in float32 and float64, and the input is in {str(dtype)[6:]}"
        return None if self.is_built else f"it is not built: run {COMMAND}"

    def look(self) -> bool:
        """Look for the library anew; whether it is there."""
        self._loaded: ctypes.CDLL | None = None
        self.is_built = self.path() is not None
        return self.is_built

    def path(self) -> Path | None:
        """Where the library lies; None where it is not built."""
        kept = sorted(_folder().glob(f"{self.name}-*.so"))
        if not kept:
            return None
        key = self._key()
        return next((one for one in kept if one.stem.split("-")[-2] == key and _is_whole(one)), None)

    def build(self) -> Path:
        """Compile the file, unless that was done already.

        Raises:
            InputError: where no compiler is found or it fails, or the cache folder cannot be written.
        """
        path = self.path() or _compile(self.source, f"{self.name}-{self._key()}")
        self.look()
        return path

    def function(self, name: str) -> Any:
        """A function of the library, which is loaded by the first call.

        Raises:
            InputError: where it is not built, or cannot be loaded.
        """
        if self._loaded is None:
            path = self.path()
            if path is None:
                raise InputError(f"{self.source.name} is not built: run {COMMAND}")
            try:
                self._loaded = ctypes.CDLL(str(path))
            except OSError as error:
                raise InputError(f"{path} cannot be loaded ({error}); use impl='auto'") from None
        return getattr(self._loaded, name)

    def _key(self) -> str:
        return _digest(b"\0".join([self.source.read_bytes(), " ".join(_FLAGS).encode(), _processor()]))


def sources() -> list[Path]:
    """The C++ files of all engines."""
    return sorted(Path(__file__).parent.glob("mechanisms/*/*.cpp"))


def why_not_built() -> str | None:
    """The reason why an engine in C++ is missing here; None: all are built."""
    built = (NativeLibrary(source.parent.name, source).is_built for source in sources())
    return None if all(built) else f"it is not built: run {COMMAND}"


@functools.cache
def matrix_product(dtype: torch.dtype) -> ctypes.c_void_p:
    """The address of the matrix product in PyTorch's BLAS, as Fortran calls it."""
    torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(getattr(ctypes.CDLL(str(torchs)), _PRODUCTS[dtype]), ctypes.c_void_p)
    except (OSError, AttributeError):
        raise InputError(
            f"this build of PyTorch shows no {_PRODUCTS[dtype]} ({torchs}); use impl='auto'"
        ) from None


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where the numbers of a contiguous tensor lie; null for None."""
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of the usual names; None where there is none."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if (found := shutil.which(name))), None)


def _folder() -> Path:
    return cache_folder() / "kernels"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    """True where a library has the bytes that its name says."""
    try:
        return _digest(library.read_bytes()) == library.stem.rpartition("-")[2]
    except OSError:  # not readable, or another process has just removed it
        return False


def _compile(source: Path, name: str) -> Path:
    """Compile into the cache, whole or not at all; another process may do the same at the same time."""
    compiler, folder = find_compiler(), _folder()
    if compiler is None:
        raise InputError(
            "engines in C++ need a C++ compiler, and none of $CXX, c++, g++ and clang++ is installed"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder)
    with temporary as place:
        made = Path(place) / "made.so"
        line = [compiler, *_FLAGS, str(source), "-o", str(made)]
        try:
            run = subprocess.run(line, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise InputError(f"{compiler} cannot be run ({error.strerror})") from None
        if run.returncode != 0 or not made.is_file():
            lines = run.stderr.strip().splitlines() or ["it says nothing"]
            said = next((line for line in lines if "error" in line), lines[-1])
            raise InputError(f"{compiler} does not compile {source.name} ({said})")
        library = folder / f"{name}-{_digest(made.read_bytes())}.so"
        with writing(library):
            with made.open("rb+") as file:
                os.fsync(file.fileno())  # else a power cut can leave the name without the bytes
            os.replace(made, library)
    return library


def _processor() -> bytes:
    """A name of processors that need libraries of their own: several may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.partition("\t")[0].strip() in ("model name", "flags", "Features")]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(named))]).encode()


def command(arguments: list[str]) -> int:
    """The command: print what is built, or build it."""
    if arguments not in ([], ["status"], ["build"]):
        print("usage: python -m kernel_attention.native [status | build]", file=sys.stderr)
        return 2
    for source in sources():
        library = NativeLibrary(source.parent.name, source)
        try:
            path = library.build() if arguments == ["build"] else library.path()
        except InputError as error:
            print(f"{library.name}: {error}", file=sys.stderr)
            return 2
        print(f"{library.name}: {path or f'not built: run {COMMAND}'}")
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
