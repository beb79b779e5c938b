"""The kernels are importable however the package was installed, and shadow nobody's."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _python(code: str, cwd: Path, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_kernels_once_and_nothing_else_at_the_top(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "sparseformer",
        next(name.split("/")[0] for name in names if ".dist-info" in name),
    }
    assert "sparseformer/kernels/entmax/interface.py" in names
    assert "sparseformer/kernels/entmax/cpp/rows.cpp" in names
    assert "sparseformer/py.typed" in names
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_wheel_installed_elsewhere_imports_its_own_kernels(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import sparseformer.kernels.entmax as e, sparseformer.functional; print(e.__file__)"
    )
    assert _python(code, tmp_path).startswith(str(site))


def test_editable_install_and_repository_root_import_the_kernels(tmp_path: Path) -> None:
    code = "import sparseformer.kernels.entmax as e; print(e.__name__)"
    assert _python(code, tmp_path) == _python(code, ROOT) == "sparseformer.kernels.entmax"


def test_train_script_starts_from_the_root() -> None:
    command = [sys.executable, "train.py", "--print-config"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 'source = "inflection"' in printed


# what is left of Hugging Face's package when it is not installed: only our folder, a namespace
_WITHOUT = f"""
import importlib.machinery, importlib.metadata, sys
class OnlyOurFolder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "kernels":
            return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}])
sys.meta_path.insert(0, OnlyOurFolder)
version = importlib.metadata.version
def version_without(name):
    if name == "kernels":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = version_without
"""


@pytest.mark.parametrize(
    ("setup", "installed"), [("", True), (_WITHOUT, False)], ids=["with", "without"]
)
def test_transformers_imports_from_the_root_beside_hugging_faces_kernels(
    setup: str, installed: bool
) -> None:
    """A folder `kernels` with an __init__.py at the root would be imported in place of theirs."""
    code = setup + (
        "import transformers.integrations.hub_kernels, transformers.modeling_utils\n"
        "import kernels, sparseformer.kernels.entmax\n"
        "print(hasattr(kernels, 'get_kernel'))"
    )
    assert _python(code, ROOT) == str(installed)
