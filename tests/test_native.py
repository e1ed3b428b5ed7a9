"""Engines in C++ are built by a command, whole or not at all, and what is missing is said in one line."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
import torch

from kernel_attention import native
from kernel_attention.errors import InputError

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the engines in C++ are for Linux"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


SOURCE = 'extern "C" int twice(int x) { return 2 * x; }'


@pytest.fixture
def library(tmp_path, monkeypatch) -> native.NativeLibrary:
    """A small C++ file, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    file = tmp_path / "twice.cpp"
    file.write_text(SOURCE)
    return native.NativeLibrary("doubling", file)


def kept() -> list[Path]:
    return list((native.cache_folder() / "kernels").iterdir())


def test_a_library_is_built_by_command_and_once(library, monkeypatch):
    assert not library.is_built
    with pytest.raises(InputError, match=r"twice\.cpp is not built: run python -m kernel_attention"):
        library.function("twice")
    library.build()
    assert library.is_built
    assert library.function("twice")(21) == 42
    assert [file.suffix for file in kept()] == [".so"]
    monkeypatch.setenv("PATH", "")  # no compiler is needed again
    library.build()
    again = native.NativeLibrary("doubling", library.source)
    assert again.is_built
    assert again.function("twice")(4) == 8


def test_another_source_has_a_library_of_its_own(library):
    library.build()
    library.source.write_text(SOURCE.replace("2 * x", "x + x + 1"))
    assert not library.look()
    library.build()
    assert library.function("twice")(21) == 43
    assert len(kept()) == 2


def test_without_a_compiler_the_message_says_so(library, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"need a C\+\+ compiler"):
        library.build()


def test_a_compiler_that_fails_leaves_nothing_behind(library):
    library.source.write_text("this is no C++")
    with pytest.raises(InputError, match=r"does not compile twice\.cpp \(.*error") as caught:
        library.build()
    assert "\n" not in str(caught.value)
    assert kept() == []


def test_a_cache_folder_that_cannot_be_made_is_named(library, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(InputError, match="taken/kernel-attention/kernels: cannot be written"):
        library.build()


def test_the_command_says_what_is_built_and_builds_it(library, monkeypatch, capsys):
    source = library.source.parent / "doubling" / "native.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    monkeypatch.setattr(native, "sources", lambda: [source])
    assert native.command([]) == 0
    assert capsys.readouterr().out == "doubling: not built: run python -m kernel_attention.native build\n"
    assert native.command(["build"]) == native.command(["status"]) == 0
    built, said = capsys.readouterr().out.splitlines()
    assert built == said == f"doubling: {kept()[0]}"
    assert native.command(["make"]) == 2
    monkeypatch.setenv("PATH", "")
    source.write_text(SOURCE + " ")
    assert native.command(["build"]) == 2
    assert "need a C++ compiler" in capsys.readouterr().err


def test_the_sources_are_those_of_the_engines():
    assert [source.parent.name for source in native.sources()] == ["primal"]


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


def test_what_the_library_does_not_compute_is_said(library):
    x = torch.randn(1, 2, 4)
    assert library.why_not(x, torch.float32) == "it is not built: run python -m kernel_attention.native build"
    library.build()
    assert library.why_not(x, torch.float32) is None
    assert "bfloat16" in library.why_not(x, torch.bfloat16)


@pytest.mark.parametrize("damage", ["empty", "half", "text", "folder"])
def test_a_damaged_library_counts_as_none_and_is_built_again(library, damage):
    """Half of one would end the process where the missing half is read."""
    path = library.build()
    whole = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "text": b"hello"}[damage])
    assert not library.look()
    if damage == "folder":
        with pytest.raises(InputError, match="cannot be written"):
            library.build()
    else:
        assert library.build().read_bytes() == whole
        assert library.function("twice")(21) == 42


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh", r"does not compile twice\.cpp \(it says nothing\)"),
        ("#!/bin/sh\nfor last; do :; done; echo hello > $last", r"cannot be loaded \("),
        ("#!/no/such/shell", r"cannot be run \("),
    ],
)
def test_a_compiler_that_makes_no_library_is_named(library, tmp_path, monkeypatch, script, message):
    compiler = tmp_path / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(InputError, match=message):
        _ = library.build() and library.function("twice")
