"""Fetch and read apt's package lists in a private folder, without touching the machine's own."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sparseformer.data.cache import make_folder
from sparseformer.errors import ConfigError, DataError

_HELPER = "/usr/lib/apt/apt-helper"
_FETCH_SECONDS = 1800
# Written last, so that an interrupted download is begun again.
_COMPLETE = "complete"


def fetch_lists(folder: Path, language: str) -> Path:
    """Download the package lists and the descriptions in English and one other language, once.

    Args:
        folder: Where the lists are kept; delete it to fetch them anew.
        language: apt's language code, such as de or pt_BR.

    Returns:
        The folder of the lists.

    Raises:
        ConfigError: If the machine has no apt.
        DataError: If the lists can't be fetched.
    """
    lists = folder / "lists"
    if (folder / _COMPLETE).exists():
        return lists
    apt_get = shutil.which("apt-get")
    if apt_get is None or not Path(_HELPER).exists():
        raise ConfigError(
            "The source debian needs apt-get, which this machine lacks: use a Debian or Ubuntu "
            "machine or container, or another data.source."
        )
    make_folder(lists / "partial")
    make_folder(folder / "cache" / "archives" / "partial")
    settings = folder / "apt.conf"
    settings.write_text(apt_settings(folder, language))
    messages = _run([apt_get, "-c", str(settings), "update"])
    if not translation_files(lists, "en"):
        last = messages.strip().rpartition("\n")[2]
        raise DataError(
            f"apt fetched no descriptions ({last}): check the network and the package sources "
            "in /etc/apt."
        )
    (folder / _COMPLETE).touch()
    return lists


def apt_settings(folder: Path, language: str) -> str:
    """Write the configuration that apt reads after the machine's own.

    Container images turn translations off and run hooks after an update; both are cleared.
    """
    return "\n".join(
        (
            "#clear Acquire::Languages;",
            f'Acquire::Languages {{ "en"; "{language}"; }};',
            f'Dir::State::lists "{folder.resolve()}/lists";',
            f'Dir::Cache "{folder.resolve()}/cache";',
            'Dir::Cache::pkgcache "";',
            'Dir::Cache::srcpkgcache "";',
            "#clear APT::Update::Pre-Invoke;",
            "#clear APT::Update::Post-Invoke;",
            "#clear APT::Update::Post-Invoke-Success;",
            "",
        )
    )


def translation_files(lists: Path, language: str) -> list[Path]:
    """Return the lists that hold descriptions in one language."""
    return sorted(
        path
        for path in lists.glob("*_Translation-*")
        if re.search(rf"-{language}(\.|$)", path.name)
    )


def package_files(lists: Path) -> list[Path]:
    """Return the lists that say which source package a package comes from."""
    return sorted(lists.glob("*_Packages*"))


def cat(path: Path) -> str:
    """Return the text of a list, however apt compressed it."""
    return _run([_HELPER, "cat-file", str(path)])


def paragraphs(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each paragraph of a Debian control file.

    A line that begins with a space goes on with the field above, without that space.
    """
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.split("\n"):
            if line.startswith(" "):
                fields[name] = f"{fields.get(name, '')}\n{line[1:]}"
            elif line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        if fields:
            yield fields


def _run(command: list[str]) -> str:
    """Run apt and return what it printed, messages included."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_FETCH_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{command[0]} took longer than {_FETCH_SECONDS} s: try again.") from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(f"{' '.join(command)} failed: {last}.") from error
    return done.stdout.decode(errors="replace")
