"""Build the C++ kernels for this machine's CPU on first use, cache them, and load them."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from sparseformer.kernels.common.folders import cache_folder

logger = logging.getLogger("sparseformer")

SOURCE = Path(__file__).parents[1] / "entmax" / "cpp" / "rows.cpp"
_COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: scores of -inf and NaN must keep their meaning.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math")
_LINK_FLAGS = ("-shared", "-fPIC", "-pthread")
# For the CPU at hand as GCC and Clang write it on x86, then on Arm, then for any of its kind.
_TARGETS = (("-march=native",), ("-mcpu=native",), ())
_TIMEOUT_SECONDS = 300
_ERROR_CHARACTERS = 300
_lock = threading.Lock()


class NativeError(Exception):
    """The C++ kernels can't be built or loaded; says why in a few words."""


def why_no_compiler() -> str | None:
    """Return None if the C++ kernels can be used, else the reason in a few words.

    Builds them on the first call on a machine, and loads them on the first call of a process.
    """
    with _lock:
        return _load()[1]


def library() -> ctypes.CDLL:
    """Return the loaded kernels.

    Raises:
        ValueError: they can't be used; says why.
    """
    with _lock:
        loaded, reason = _load()
    if loaded is None:
        raise ValueError(f"the C++ kernels can't be used: {reason}.")
    return loaded


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return _open_or_build(), None
    except (NativeError, OSError, subprocess.TimeoutExpired) as error:
        reason = " ".join(str(error).split())
        logger.warning("sparseformer runs in plain PyTorch on the CPU: %s.", reason)
        return None, reason


def _open_or_build() -> ctypes.CDLL:
    command = _find_compiler()
    name = _name(command)
    folder = _cache_folder()
    cached = None if folder is None else _open_cached(folder, name)
    if cached is not None:
        return cached
    try:
        return _build(command, folder, name)
    except OSError as error:
        raise NativeError(f"they can't be kept in {folder} ({error})") from None


def _open_cached(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load what an earlier process built; remove what is damaged."""
    for path in folder.glob(f"{name}-*.so"):
        try:
            if _is_intact(path):
                return ctypes.CDLL(str(path))
            path.unlink(missing_ok=True)
        except OSError:
            # Removed by another process just now, or built against another machine's libraries.
            continue
    return None


def _build(command: list[str], folder: Path | None, name: str) -> ctypes.CDLL:
    # In the cache itself, so that the file moves there in one step and no process sees half of it.
    with tempfile.TemporaryDirectory(dir=folder) as private:
        built = Path(private) / "kernels.so"
        _compile(command, built)
        built.chmod(0o700)
        if folder is None:
            return ctypes.CDLL(str(built))
        path = folder / f"{name}-{_digest(built.read_bytes())}.so"
        os.replace(built, path)
        return ctypes.CDLL(str(path))


def _find_compiler() -> list[str]:
    if os.name != "posix":
        raise NativeError(f"C++ kernels aren't built on {platform.system()}")
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise NativeError(f"the compiler that CXX names, {chosen[0]!r}, isn't there")
        return chosen
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise NativeError(f"no C++ compiler found (looked for $CXX, {', '.join(_COMPILERS)})")


def _name(command: list[str]) -> str:
    """Return a name that changes with anything the machine code depends on."""
    version = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
    ).stdout
    parts = [*command, version, *_FLAGS, *_LINK_FLAGS, _describe_cpu()]
    for path in sorted(SOURCE.parent.glob("*.[ch]pp")):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _describe_cpu() -> str:
    """Return the model and the features of the CPU; a home can be shared between machines."""
    described = [platform.system(), platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return "\n".join([*described, platform.processor()])
    # "Features" on Arm.
    wanted = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join([*described, *(line for line in lines if line.startswith(wanted))])


def _cache_folder() -> Path | None:
    """Return the folder of built kernels, or None if others could put files into it.

    Raises:
        NativeError: there is none and none can be made.
    """
    try:
        folder = cache_folder() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        # RuntimeError: the user has no home.
        raise NativeError(f"there is no cache folder for them ({error})") from None
    if _is_private(folder):
        return folder
    logger.warning(
        "sparseformer builds its C++ kernels anew in every process: %s isn't yours alone. "
        "Take it from its owner, or run chmod go-w on it.",
        folder,
    )
    return None


def _is_private(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_intact(path: Path) -> bool:
    """Say whether a cached file is ours and whole: its name ends with the hash of its content.

    Loading a file that was cut off could end the process.
    """
    return _is_private(path) and path.stem.endswith(f"-{_digest(path.read_bytes())}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _compile(command: list[str], target: Path) -> None:
    started = time.perf_counter()
    for cpu in _TARGETS:
        flags = [*_FLAGS, *cpu, *_LINK_FLAGS]
        result = subprocess.run(
            [*command, *flags, str(SOURCE), "-o", str(target)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        if result.returncode == 0 and target.exists():
            seconds = time.perf_counter() - started
            logger.info("sparseformer built its C++ kernels for this CPU in %.1f s.", seconds)
            return
    said = " ".join(result.stderr.split())[:_ERROR_CHARACTERS] or "without a message"
    raise NativeError(f"{shlex.join(command)} failed with exit status {result.returncode}: {said}")
