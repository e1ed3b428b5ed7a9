"""Kernels in C++ are compiled once, whole or not at all, and what is missing is said in one line."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch

from kernel_attention import native
from kernel_attention.errors import InputError

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small C++ file, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    native.load_kernels.cache_clear()
    file = tmp_path / "twice.cpp"
    file.write_text('extern "C" int twice(int x) { return 2 * x; }')
    yield file
    native.load_kernels.cache_clear()


def test_a_library_is_compiled_once_and_kept(source, monkeypatch):
    assert native.load_kernels(source).twice(21) == 42
    kept = list((native.cache_folder() / "kernels").iterdir())
    assert [file.suffix for file in kept] == [".so"]
    native.load_kernels.cache_clear()
    monkeypatch.setenv("PATH", "")  # no compiler is needed again
    assert native.load_kernels(source).twice(4) == 8


def test_another_source_has_a_library_of_its_own(source):
    native.load_kernels(source)
    source.write_text('extern "C" int twice(int x) { return x + x + 1; }')
    native.load_kernels.cache_clear()
    assert native.load_kernels(source).twice(21) == 43
    assert len(list((native.cache_folder() / "kernels").iterdir())) == 2


def test_without_a_compiler_the_message_says_what_to_do(source, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"need a C\+\+ compiler.*impl='auto'"):
        native.load_kernels(source)


def test_a_compiler_that_fails_leaves_nothing_behind(source):
    source.write_text("this is no C++")
    with pytest.raises(InputError, match=r"does not compile twice\.cpp \(.*error") as caught:
        native.load_kernels(source)
    assert "\n" not in str(caught.value)
    assert list((native.cache_folder() / "kernels").iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_named(source, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(InputError, match="taken/kernel-attention/kernels: cannot be written"):
        native.load_kernels(source)


@pytest.mark.parametrize("dtype", native.TYPES)
def test_the_product_is_that_of_blas(dtype):
    """As Fortran calls it: matrices lie in columns."""
    number = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}[dtype]
    a, b, c = torch.randn(3, 5, dtype=dtype), torch.randn(5, 2, dtype=dtype), torch.zeros(3, 2, dtype=dtype)
    integer = ctypes.c_int
    product = ctypes.cast(native.matrix_product(dtype), ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13))
    letter = ctypes.c_char_p(b"N")
    m, n, k = (ctypes.byref(integer(size)) for size in (2, 3, 5))
    one, zero = ctypes.byref(number(1)), ctypes.byref(number(0))
    from_b, from_a, to_c = map(native.address, (b, a, c))
    product(letter, letter, m, n, k, one, from_b, m, from_a, k, zero, to_c, m)
    torch.testing.assert_close(c, a @ b)


def test_what_no_kernel_takes_is_said():
    x = torch.randn(1, 2, 4)
    assert native.why_not_native(x, torch.float32) is None
    assert "bfloat16" in native.why_not_native(x, torch.bfloat16)


@pytest.mark.parametrize("damage", ["empty", "half", "text", "folder"])
def test_a_damaged_library_is_compiled_again(source, damage):
    """Half of one would end the process where the missing half is read."""
    native.load_kernels(source)
    (library,) = (native.cache_folder() / "kernels").iterdir()
    whole = library.read_bytes()
    library.unlink()  # its bytes stay for this process, which has loaded them
    if damage == "folder":
        library.mkdir()
    else:
        library.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "text": b"hello"}[damage])
    native.load_kernels.cache_clear()
    if damage == "folder":
        with pytest.raises(InputError, match="cannot be written"):
            native.load_kernels(source)
    else:
        assert native.load_kernels(source).twice(21) == 42
        assert library.read_bytes() == whole


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh", r"does not compile twice\.cpp \(it says nothing\)"),
        ("#!/bin/sh\nfor last; do :; done; echo hello > $last", r"cannot be loaded \("),
        ("#!/no/such/shell", r"cannot be run \("),
    ],
)
def test_a_compiler_that_makes_no_library_is_named(source, tmp_path, monkeypatch, script, message):
    compiler = tmp_path / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(InputError, match=message):
        native.load_kernels(source)
