"""Files that are whole or absent, and readers that execute nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import stat
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from runs.small_runs import SRC

from kernel_attention.errors import InputError
from kernel_attention.files import is_unfinished, write_atomically
from kernel_attention.training import checkpoint
from kernel_attention.training.checkpoint import check_checkpoint, read_state
from kernel_attention.weights import read_weights, write_weights
from kernel_attention_lab.plain_yaml import read_yaml
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.runs import files


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file):
        file.write(b"ne")
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_write_leaves_the_old_file_and_a_leftover_that_is_cleaned(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kernel_attention.files import write_atomically\n"
        "def write(file): file.write(b'ne'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), write)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=os.environ | {"PYTHONPATH": str(SRC)}, check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (leftover,) = set(tmp_path.iterdir()) - {path}
    assert is_unfinished(leftover)
    files.remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_cleaning_takes_nothing_of_the_users(tmp_path):
    names = [".hidden", ".notes.tmp", "x.12.tmp", "seed-0", ".gitignore"]
    for name in names:
        (tmp_path / name).touch()
    files.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_files_are_readable_for_whom_the_umask_says(tmp_path):
    old = os.umask(0o027)
    try:
        files.write_json(tmp_path / "file.json", {})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file.json").stat().st_mode) == 0o640


def test_json_refuses_what_other_readers_refuse(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "file.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_csv_has_a_column_for_every_key(tmp_path):
    files.write_csv(tmp_path / "file.csv", [{"a": 1}, {"a": 2, "b": "x,y"}])
    assert (tmp_path / "file.csv").read_bytes() == b'a,b\r\n1,\r\n2,"x,y"\r\n'


def test_weights_come_back_bit_for_bit(tmp_path):
    weights = {
        "a": torch.randn(3, 5).t(),
        "b": torch.tensor([1, 2]),
        "c": torch.randn(2, dtype=torch.bfloat16),
    }
    write_weights(tmp_path / "w.safetensors", weights)
    found = read_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "header", "pickle"])
def test_damaged_weights_are_refused(damage, tmp_path):
    path = tmp_path / "w.safetensors"
    write_weights(path, {"a": torch.randn(3, 5)})
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "truncated": whole[:-7],
        "header": b"\xff" * 8 + whole[8:],
        "pickle": pickle.dumps({}),
    }
    path.unlink() if damage == "missing" else path.write_bytes(damaged[damage])
    with pytest.raises(InputError, match="cannot be read" if damage == "missing" else "not readable as safe"):
        read_weights(path)


def test_any_flipped_bit_of_weights_is_refused_or_without_effect(tmp_path):
    """Every byte of a file: in the header, the checksum, the tensors."""
    path = tmp_path / "w.safetensors"
    weights = {"a": torch.randn(3, 5), "b": torch.arange(4), "scalar": torch.tensor(2.0)}
    write_weights(path, weights)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(len(whole)):
        for bit in (0, 5, 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                found = read_weights(path)
            except InputError as error:
                message = str(error)
            else:
                assert found.keys() == weights.keys()
                assert all(torch.equal(found[name], weights[name]) for name in weights)
                message = None
            assert place < begin or (message and "checksum" in message)


def test_weights_of_an_earlier_version_open_and_it_is_said_once(tmp_path, caplog):
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, path)
    for _ in range(3):
        assert torch.equal(read_weights(path)["a"], torch.ones(2))
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has no checksum (it was written by an earlier version): its weights are not checked"
    ]


@pytest.mark.parametrize("read", [read_json, read_yaml, read_weights, check_checkpoint])
def test_a_file_without_an_end_is_not_read(read, tmp_path):
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("device", "loop", "pipe", "."):
        with pytest.raises(InputError, match="cannot be read"):
            read(tmp_path / name)


@pytest.mark.parametrize("text", [None, "", "{", '{"a": NaN', "\xff", "[" * 100_000])
def test_damaged_json_is_refused(text, tmp_path):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="not readable as JSON" if text is not None else "cannot be read"):
        read_json(path)


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def test_a_checkpoint_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = dict.fromkeys(("callbacks", "epoch", "global_step", "loops", "optimizer_states", "state_dict"))
    torch.save(parts | {"callbacks": {"bomb": Bomb()}}, tmp_path / "zip.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Bomb()))
    for name in ("zip.ckpt", "plain.ckpt"):
        with pytest.raises(InputError, match="more than tensors and plain values"):
            read_state(tmp_path / name)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [{}, [1], {"state_dict": {}}, torch.zeros(3)], ids=str)
def test_another_file_of_torch_is_no_trainer_state(content, tmp_path):
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(InputError, match="not a trainer's state"):
        read_state(tmp_path / "last.ckpt")


def test_any_damage_to_a_trainer_state_is_refused_or_without_effect(trained, tmp_path):
    """Cut or flipped anywhere."""
    whole = (trained / "seed-0/last.ckpt").read_bytes()
    path = tmp_path / "last.ckpt"
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"last\.ckpt"):
            read_state(path)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for place in torch.randint(len(whole), (120,), generator=generator).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            found = read_state(path)
        except InputError:
            refused += 1
            continue
        assert plain(found) == plain(torch.load(trained / "seed-0/last.ckpt", weights_only=True))
    assert refused > 60


def test_every_flipped_bit_of_a_checkpoint_is_refused_or_without_effect(tmp_path):
    state = dict.fromkeys(checkpoint._PARTS) | {
        "optimizer": {"first": torch.arange(4.0), "second": torch.ones(2)}
    }
    checkpoint.write_state(path := tmp_path / "last.ckpt", state)
    whole, expected = path.read_bytes(), plain(read_state(path))
    for place in range(len(whole)):
        for bit in {0, place % 8} if place > len(whole) - 600 else [place % 8]:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                found = read_state(path)
            except InputError:
                continue
            assert plain(found) == expected, f"bit {bit} of byte {place}"


def plain(state):
    """A trainer's state with tensors as lists, so that two of them can be compared."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def test_run_files_hold_plain_json(trained):
    texts = [path.read_text() for path in trained.rglob("*.json")]
    assert texts
    for text in texts:
        json.loads(text, parse_constant=lambda name: pytest.fail(f"a file holds {name}"))


def test_a_state_that_the_disk_does_not_take_is_an_error_of_the_system(tmp_path, forks):
    """PyTorch words it as a failed check of its file format."""
    code = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from kernel_attention.training.checkpoint import write_state\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: write_state(Path(sys.argv[1]), {'a': torch.zeros(100_000)})\n"
        "except OSError as error: print(error.strerror)\n"
    )
    done = forks.run("-c", code, str(tmp_path / "last.ckpt"))
    assert done.stdout.strip() == os.strerror(errno.EFBIG), done.stderr
    assert list(tmp_path.iterdir()) == []
