"""A crash, a full disk, a damaged or a hostile file never costs more than the last checkpoint."""

import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_run
import torch
from tiny_run import build, run

from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.training import folders
from sparseformer.training.checkpoint import (
    load_latest_checkpoint,
    load_model_weights,
    lock_run,
    prune_checkpoints,
    restore,
    save_checkpoint,
    write_atomic,
)
from sparseformer.training.manifest import FILES, write_manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux limits and signals")


@pytest.fixture
def two_saves(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of steps 2 and 4."""
    run(tmp_path, 4)
    return tmp_path


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints/step-0000004"


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("checkpoint-file:4", [".tmp-step-0000004", "step-0000002"]),
        ("checkpoint-rename:2", [".tmp-step-0000004", "step-0000002"]),
        ("checkpoint-prune:3", ["step-0000002", "step-0000004", "step-0000006"]),
    ],
    ids=["after the first file", "before the rename", "before retention"],
)
def test_a_killed_run_goes_on_bitwise_equal(tmp_path: Path, point: str, left: list[str]) -> None:
    expected_losses, expected_weights = run(tmp_path / "whole", 8)
    child = subprocess.run(
        [sys.executable, tiny_run.__file__, tmp_path / "killed", "8"],
        env=os.environ | {"SPARSEFORMER_FAULT": point, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert child.returncode == -signal.SIGKILL
    assert names(tmp_path / "killed") == left
    losses, weights = run(tmp_path / "killed", 8)
    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert names(tmp_path / "killed") == ["step-0000002", "step-0000008"]


def test_everything_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut left a checkpoint with its final name and files of 0 bytes."""
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def record_sync(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save_checkpoint(tmp_path, 2, *build(), {})
    assert done == [
        *FILES,
        "MANIFEST.json",
        ".tmp-step-0000002",
        "rename to step-0000002",
        "checkpoints",
    ]


def test_a_crash_while_replacing_brings_the_old_one_back(two_saves: Path) -> None:
    newest(two_saves).rename(two_saves / "checkpoints/.replaced-step-0000004")
    checkpoint = load_latest_checkpoint(two_saves)
    assert checkpoint is not None
    assert checkpoint.step == 4
    assert names(two_saves) == ["step-0000002", "step-0000004"]


def test_a_save_clears_away_what_a_killed_one_left(two_saves: Path) -> None:
    for name in (".tmp-step-0000003", ".tmp-step-0000005"):
        (two_saves / "checkpoints" / name).mkdir()
        (two_saves / "checkpoints" / name / "model.safetensors").write_text("torn")
    save_checkpoint(two_saves, 5, *build(), {})
    assert names(two_saves) == ["step-0000002", "step-0000004", "step-0000005"]


def test_a_half_deleted_folder_is_never_taken_for_a_checkpoint(
    two_saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_halfway(path: Path) -> None:
        (path / "state.json").unlink()
        raise PermissionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", stop_halfway)
        with pytest.raises(CheckpointError, match=r"step-0000002 can't be deleted"):
            prune_checkpoints(two_saves, keep=1, best_step=None)
    said: list[str] = []
    checkpoint = load_latest_checkpoint(two_saves, report=said.append)
    assert checkpoint is not None
    assert (checkpoint.step, said, names(two_saves)) == (4, [], ["step-0000004"])


def test_training_on_keeps_no_file_mapped(two_saves: Path) -> None:
    """Moments that were views of the file kept a deleted checkpoint on the disk."""
    checkpoint = load_latest_checkpoint(two_saves)
    model, optimizer = build()
    assert checkpoint is not None
    restore(checkpoint, model, optimizer)
    assert str(two_saves) not in Path("/proc/self/maps").read_text()


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def cut_in_half(folder: Path) -> None:
    os.truncate(folder / "optimizer.safetensors", 3000)


def edit_manifest(**fields: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "MANIFEST.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def remove_all_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


DAMAGES = {
    "byte flipped": (flip_a_byte, "the sha256 of model.safetensors isn't the manifest's"),
    "cut in half": (cut_in_half, "optimizer.safetensors has 3000 bytes in place of"),
    "empty folder": (remove_all_files, "MANIFEST.json is missing"),
    "no manifest": (lambda f: (f / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
    "empty manifest": (lambda f: (f / "MANIFEST.json").write_text(""), "MANIFEST.json isn't JSON"),
    "no version": (edit_manifest(format_version=None), "has format version None"),
    "no files": (edit_manifest(files={}), "MANIFEST.json lists []"),
    "other paths": (edit_manifest(files={"../../x": {}}), "MANIFEST.json lists ['../../x']"),
    "no hashes": (
        edit_manifest(files=dict.fromkeys(FILES)),
        "has no size and sha256 of model.safetensors",
    ),
    "other step": (edit_manifest(step=40), "MANIFEST.json is of step 40"),
    "missing file": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(
    two_saves: Path, damage: str
) -> None:
    """Resuming took the newest folder, whatever was in it, and died or started from zero."""
    harm, reason = DAMAGES[damage]
    harm(newest(two_saves))
    said: list[str] = []
    checkpoint = load_latest_checkpoint(two_saves, report=said.append)
    assert checkpoint is not None
    assert checkpoint.step == 2
    (line,) = said
    assert reason in line
    assert "corrupt-step-0000004" in line
    run(two_saves, 4)
    assert names(two_saves) == ["corrupt-step-0000004", "step-0000002", "step-0000004"]


def test_setting_aside_never_overwrites(two_saves: Path) -> None:
    (two_saves / "checkpoints/corrupt-step-0000004").mkdir()
    flip_a_byte(newest(two_saves))
    load_latest_checkpoint(two_saves)
    assert "corrupt-step-0000004.2" in names(two_saves)
    assert list((two_saves / "checkpoints/corrupt-step-0000004").iterdir()) == []


def test_a_newer_format_is_refused_and_left_alone(two_saves: Path) -> None:
    edit_manifest(format_version=2)(newest(two_saves))
    for load in (load_latest_checkpoint, lambda path: load_model_weights(path, build()[0])):
        with pytest.raises(CheckpointError, match=r"format version 2, .* reads version 1"):
            load(two_saves)
    assert names(two_saves) == ["step-0000002", "step-0000004"]


def test_training_never_starts_from_zero_without_being_told(two_saves: Path) -> None:
    for name in names(two_saves):
        cut_in_half(two_saves / "checkpoints" / name)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="--allow-fresh"):
            load_latest_checkpoint(two_saves)
    assert load_latest_checkpoint(two_saves, allow_fresh=True) is None
    assert load_latest_checkpoint(two_saves / "new") is None


def test_reading_weights_leaves_a_damaged_folder_alone(two_saves: Path) -> None:
    flip_a_byte(newest(two_saves))
    with pytest.raises(CheckpointError, match=r"step-0000004 is damaged: the sha256"):
        load_model_weights(two_saves, build()[0])
    assert names(two_saves) == ["step-0000002", "step-0000004"]


@contextlib.contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize(
    "max_bytes", [1000, 8000, 13000], ids=["model file", "optimizer file", "state file"]
)
def test_a_full_disk_leaves_the_last_checkpoint(two_saves: Path, max_bytes: int) -> None:
    """A full disk left a truncated file in the newest checkpoint."""
    model, optimizer = build()
    tiny_run.train_step(model, optimizer, 0)
    sizes = {path.name: path.stat().st_size for path in newest(two_saves).iterdir()}
    state = {"filler": "x" * 14000}
    assert sizes["model.safetensors"] < 8000 < sizes["optimizer.safetensors"] < 13000
    with limit(resource.RLIMIT_FSIZE, max_bytes), pytest.raises(CheckpointError) as caught:
        save_checkpoint(two_saves, 5, model, optimizer, state)
    message = r"Writing .*/checkpoints/step-0000005 needs \d+ bytes and failed \(.*File too large"
    assert caught.match(message)
    assert names(two_saves) == ["step-0000002", "step-0000004"]
    checkpoint = load_latest_checkpoint(two_saves)
    assert checkpoint is not None
    assert checkpoint.step == 4


def test_a_disk_without_room_is_noticed_before_writing(
    two_saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(two_saves)._replace(free=999)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="only 999 bytes are free"):
        save_checkpoint(two_saves, 5, *build(), {})
    assert names(two_saves) == ["step-0000002", "step-0000004"]


def test_write_atomic_keeps_the_old_text_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_atomic(path, "old\n")
    with (
        limit(resource.RLIMIT_FSIZE, 100),
        pytest.raises(CheckpointError, match="needs 5000 bytes"),
    ):
        write_atomic(path, "x" * 5000)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [
        ("results.json", "old\n")
    ]


class _MakesFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_pickle_is_never_loaded(two_saves: Path, file: str) -> None:
    marker = two_saves / "marker"
    (newest(two_saves) / file).write_bytes(pickle.dumps(_MakesFolder(marker)))
    write_manifest(newest(two_saves), 4, 1)
    said: list[str] = []
    checkpoint = load_latest_checkpoint(two_saves, report=said.append)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert f"{file} isn't a safetensors file" in said[0]
    assert not marker.exists()


def _zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(100 << 20))
    return buffer.getvalue()


def _long_header() -> bytes:
    header = b'{"__metadata__":{"tied":"' + b" " * (20 << 20) + b'"}}'
    return len(header).to_bytes(8, "little") + header


NESTED = b"[" * 100_000
BOMBS = {
    "header of 2^40 bytes": ("model.safetensors", lambda: (1 << 40).to_bytes(8, "little") + b"{}"),
    "long header": ("model.safetensors", _long_header),
    "nested header": ("model.safetensors", lambda: len(NESTED).to_bytes(8, "little") + NESTED),
    "zip": ("optimizer.safetensors", _zip_bomb),
    "nested state": ("state.json", lambda: NESTED),
    "nested manifest": ("MANIFEST.json", lambda: NESTED[:60_000]),
    "endless manifest": ("MANIFEST.json", lambda: b" " * (100 << 20)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_quickly_and_in_little_memory(two_saves: Path, bomb: str) -> None:
    file, content = BOMBS[bomb]
    (newest(two_saves) / file).write_bytes(content())
    if file != "MANIFEST.json":
        write_manifest(newest(two_saves), 4, 1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    said: list[str] = []
    start = time.perf_counter()
    with limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (50 << 20)):
        checkpoint = load_latest_checkpoint(two_saves, report=said.append)
    assert time.perf_counter() - start < 1.0
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert file in said[0]


def test_a_second_run_is_refused_until_the_first_process_is_gone(tmp_path: Path) -> None:
    program = "import sys; from sparseformer.training.runfolder import lock_run\n"
    program += "lock = lock_run(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by the process with pid {child.pid}"):
            lock_run(tmp_path)
        child.kill()
    with lock_run(tmp_path), pytest.raises(ConfigError, match=f"pid {os.getpid()};"):
        lock_run(tmp_path)
    lock_run(tmp_path).close()


def test_a_run_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't be written .* choose another"):
        lock_run(tmp_path / "file" / "run")
