"""How the C++ kernels are built, cached and loaded, and what happens where they can't be."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparseformer.functional import entmax
from sparseformer.kernels.common import backends, native
from sparseformer.kernels.entmax import native as entmax_native
from sparseformer.kernels.entmax import reference

ROOT = Path(__file__).parents[1]
X = torch.linspace(-2, 2, 300).reshape(3, 100)


def _forget() -> None:
    for cached in (native._load, entmax_native._function, backends._automatic):
        cached.cache_clear()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and a process that has loaded nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    _forget()
    yield tmp_path / "sparseformer" / "native"
    _forget()


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the compiler makes of the source, so that not every test has to wait for it."""
    path = tmp_path_factory.mktemp("built") / "kernels.so"
    native._compile(native._find_compiler(), path)
    return path.read_bytes()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, machine_code: bytes) -> list[Path]:
    """What was compiled, in order; the compiler's part is played by a copy."""
    targets: list[Path] = []

    def copy(_command: list[str], target: Path) -> None:
        targets.append(target)
        target.write_bytes(machine_code)

    monkeypatch.setattr(native, "_compile", copy)
    return targets


def _assert_works() -> None:
    assert native.why_no_compiler() is None
    actual = entmax(X, 1.3, backend="cpp")
    torch.testing.assert_close(actual, reference.entmax_rows(X, 1.3), atol=3e-7, rtol=0)


def _assert_unavailable(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Hold that "auto" falls back with one warning that says why, and "cpp" repeats it."""
    with caplog.at_level(logging.WARNING, "sparseformer"):
        for _ in range(3):
            assert entmax(X, 1.3).equal(reference.entmax_rows(X, 1.3))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert reason in caplog.text
    with pytest.raises(ValueError, match="can't serve this call") as caught:
        entmax(X, 1.3, backend="cpp")
    assert reason in str(caught.value)
    with pytest.raises(ValueError, match="can't be used"):
        native.library()


def test_the_first_use_builds_once_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sparseformer"):
        for _ in range(3):
            _assert_works()
    assert len(list(folder.iterdir())) == 1
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "built its C++ kernels" in caplog.text


def test_a_later_process_loads_what_was_built(folder: Path, compilations: list[Path]) -> None:
    _assert_works()
    _forget()
    _assert_works()
    assert len(compilations) == 1
    assert len(list(folder.iterdir())) == 1


def test_two_processes_that_build_at_once_both_succeed(folder: Path) -> None:
    code = "from sparseformer.kernels.common import native; print(native.why_no_compiler())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["None", "None"]
    assert {path.suffix for path in folder.iterdir()} == {".so"}
    _assert_works()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[: len(content) // 2], id="cut off"),
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda content: content[:-1] + b"x", id="one byte changed"),
    ],
)
def test_a_damaged_file_is_built_again(  # type: ignore[no-untyped-def]
    folder: Path, compilations: list[Path], damage
) -> None:
    _assert_works()
    (path,) = folder.iterdir()
    # A new file, since the old one is mapped into this process.
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(content))
    path.chmod(0o700)
    _forget()
    _assert_works()
    assert len(compilations) == 2
    (again,) = folder.iterdir()
    assert native._is_intact(again)


def test_a_whole_file_that_cannot_be_loaded_is_passed_over(
    folder: Path, compilations: list[Path]
) -> None:
    """As one built against a newer C library, in a home that machines share."""
    folder.mkdir(mode=0o700, parents=True)
    content = b"not for this machine"
    path = folder / f"{native._name(['c++'])}-{native._digest(content)}.so"
    path.write_bytes(content)
    path.chmod(0o700)
    _assert_works()
    assert len(compilations) == 1
    assert path.exists()


def test_a_file_that_others_could_have_written_is_built_again(
    folder: Path, compilations: list[Path]
) -> None:
    _assert_works()
    (path,) = folder.iterdir()
    path.chmod(0o722)
    _forget()
    _assert_works()
    assert len(compilations) == 2


def test_a_folder_that_others_can_write_to_is_not_used(
    folder: Path, compilations: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    _assert_works()
    (path,) = folder.iterdir()
    folder.chmod(0o777)
    _forget()
    with caplog.at_level(logging.WARNING, "sparseformer"):
        _assert_works()
    assert "isn't yours alone" in caplog.text
    assert len(compilations) == 2
    assert folder not in compilations[1].parents
    assert list(folder.iterdir()) == [path]
    assert not compilations[1].exists()


def test_a_new_source_or_other_flags_are_built_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {native._name(["c++"])}
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-DX"))
    names.add(native._name(["c++"]))
    monkeypatch.setattr(native, "_describe_cpu", lambda: "another CPU")
    names.add(native._name(["c++"]))
    copy = folder.parent / "cpp"
    copy.mkdir(parents=True)
    for path in native.SOURCE.parent.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(native, "SOURCE", copy / native.SOURCE.name)
    assert native._name(["c++"]) in names
    with (copy / "vectors.hpp").open("a") as file:
        file.write("// changed\n")
    names.add(native._name(["c++"]))
    assert len(names) == 4


@pytest.mark.usefixtures("folder")
def test_a_compiler_that_knows_no_native_cpu_builds_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "old"
    compiler.write_text(
        "#!/bin/sh\n"
        'for flag; do case "$flag" in -march=*|-mcpu=*) exit 1;; esac; done\n'
        'exec c++ "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", f"env {compiler}")
    _assert_works()
    for alpha in (1.0, 1.3, 1.5, 2.0):
        solved = entmax_native.solve_rows(X, alpha)
        torch.testing.assert_close(
            solved.probs, reference.entmax_rows(X, alpha), atol=3e-7, rtol=1e-5
        )


def test_a_failing_compiler_leaves_pytorch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "false")
    _assert_unavailable("false failed with exit status 1", caplog)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("folder")
def test_a_compilers_message_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "c++ -DLN2=broken;")
    _assert_unavailable("error", caplog)


@pytest.mark.usefixtures("folder")
def test_a_compiler_that_is_not_there_leaves_pytorch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    _assert_unavailable("'no-such-compiler', isn't there", caplog)


@pytest.mark.usefixtures("folder")
def test_without_any_compiler_pytorch_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _assert_unavailable("no C++ compiler found (looked for $CXX, c++, g++, clang++)", caplog)


@pytest.mark.usefixtures("folder")
def test_a_cache_that_cannot_be_made_leaves_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _assert_unavailable("there is no cache folder for them", caplog)


def test_a_read_only_cache_leaves_pytorch(
    folder: Path,
    compilations: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_source: object, target: object) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(os, "replace", refuse)
    _assert_unavailable("they can't be kept in", caplog)
    assert len(compilations) == 1
    assert list(folder.iterdir()) == []
