"""Package descriptions from hand-written lists, and apt by way of a stand-in."""

from pathlib import Path

import pytest

from sparseformer.config import DataConfig
from sparseformer.data import Pair, PairDataset, load_dataset
from sparseformer.data.pairs import shared_sources
from sparseformer.data.sources import apt
from sparseformer.data.sources.debian import Description, build_debian, parse_description
from sparseformer.errors import ConfigError, DataError

ENGLISH = """\
Package: 2ping
Description-md5: 01
Description-en: ping utility to determine directional packet loss
 2ping is a bi-directional ping utility. It uses 3-way pings
 (akin to TCP) and after-the-fact state comparison between peers.
 .
 It has two paragraphs.

Package: 2ping-doc
Description-md5: 02
Description-en: documentation of the ping utility
 2ping is a bi-directional ping utility. It uses 3-way pings
 (akin to TCP) and after-the-fact state comparison between peers.
 .
 This is the manual.

Package: tiny
Description-md5: 03
Description-en: a tiny thing with little text
 Too short.

Package: same
Description-md5: 04
Description-en: another ping utility in another package
 2ping is a bi-directional ping utility. It uses 3-way pings
 (akin to TCP) and after-the-fact state comparison between peers.
 .
 It has two paragraphs.
"""

GERMAN = """\
Package: 2ping
Description-md5: 01
Description-de: Ping-Werkzeug f\u00fcr gerichteten Paketverlust
 2ping ist ein bidirektionales Ping-Werkzeug.
 .
 Es hat zwei Abs\u00e4tze.

Package: 2ping-doc
Description-md5: 02
Description-de: documentation of the ping utility
 Nur ein Absatz.

Package: tiny
Description-md5: changed
Description-de: veraltet
 Veraltet.
"""

PACKAGES = """\
Package: 2ping-doc
Source: 2ping (4.5-1)
Description: x

Package: tiny
Description: y
"""


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    (tmp_path / "mirror_i18n_Translation-en").write_text(ENGLISH, encoding="utf-8")
    (tmp_path / "mirror_i18n_Translation-de").write_text(GERMAN, encoding="utf-8")
    (tmp_path / "mirror_i18n_Translation-de_CH").write_text("", encoding="utf-8")
    (tmp_path / "mirror_binary-amd64_Packages").write_text(PACKAGES, encoding="utf-8")
    return tmp_path


def _build(lists: Path, translate: str | None) -> PairDataset:
    return build_debian(lists, translate, lambda path: path.read_text(encoding="utf-8"))


def _rows(dataset: PairDataset) -> set[Pair]:
    return {*dataset.train, *dataset.validation, *dataset.test}


def test_summaries_are_description_and_synopsis(lists: Path) -> None:
    dataset = _build(lists, None)
    body = (
        "2ping is a bi-directional ping utility. It uses 3-way pings (akin to TCP) and "
        "after-the-fact state comparison between peers."
    )
    assert _rows(dataset) == {
        Pair(f"{body} It has two paragraphs.", "ping utility to determine directional packet loss"),
        Pair(f"{body} This is the manual.", "documentation of the ping utility"),
    }
    assert dataset.baseline == "lead_1"
    assert not any(shared_sources(dataset).values())


def test_packages_of_one_source_stand_on_one_side(lists: Path) -> None:
    dataset = _build(lists, None)
    sizes = sorted(map(len, (dataset.train, dataset.validation, dataset.test)))
    assert sizes == [0, 0, 2]


def test_translations_pair_synopses_and_aligned_paragraphs(lists: Path) -> None:
    dataset = _build(lists, "de")
    assert _rows(dataset) == {
        Pair(
            "ping utility to determine directional packet loss",
            "Ping-Werkzeug f\u00fcr gerichteten Paketverlust",
        ),
        Pair(
            "2ping is a bi-directional ping utility. It uses 3-way pings (akin to TCP) and "
            "after-the-fact state comparison between peers.",
            "2ping ist ein bidirektionales Ping-Werkzeug.",
        ),
        Pair("It has two paragraphs.", "Es hat zwei Abs\u00e4tze."),
    }
    assert dataset.baseline is None


def test_a_language_without_lists_is_named(lists: Path) -> None:
    with pytest.raises(DataError, match="hold no descriptions in 'xx'"):
        _build(lists, "xx")


def test_a_description_has_a_synopsis_and_paragraphs() -> None:
    text = "a  synopsis\nfirst line\n  * item\n.\n.\nlast"
    assert parse_description(text) == Description("a synopsis", ("first line * item", "last"))


@pytest.mark.parametrize("translate", ["en", "German", "d"])
def test_a_language_must_be_a_code(translate: str) -> None:
    with pytest.raises(ConfigError, match=f"data.translate is '{translate}'"):
        load_dataset(DataConfig(source="debian", translate=translate), seed=1)


def test_a_machine_without_apt_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs apt-get, .* another data\.source\.$"):
        load_dataset(DataConfig(source="debian", cache_dir=str(tmp_path)), seed=1)


FAKE_APT = """\
#!/bin/sh
echo called >> "{folder}/calls"
lists=$(sed -n 's/^Dir::State::lists "\\(.*\\)";/\\1/p' "$2")
{action}
"""


def _fake_apt(folder: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    for name, script in (
        ("apt-get", FAKE_APT.format(folder=folder, action=action)),
        ("apt-helper", '#!/bin/sh\nexec cat "$2"\n'),
    ):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(apt, "_HELPER", str(folder / "apt-helper"))


def test_lists_are_fetched_once_into_a_private_folder(
    lists: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_apt(tmp_path, monkeypatch, f'cp "{lists}"/mirror_* "$lists"/')
    config = DataConfig(source="debian", translate="de", cache_dir=str(tmp_path / "cache"))
    first = load_dataset(config, seed=1)
    assert len(_rows(first)) == 3
    assert load_dataset(config, seed=1).content_hash == first.content_hash
    assert (tmp_path / "calls").read_text() == "called\n"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        pytest.param("echo E: no space >&2; exit 100", "failed: E: no space", id="apt-fails"),
        pytest.param("echo W: no network", r"no descriptions \(W: no network\)", id="no-lists"),
    ],
)
def test_a_failed_fetch_gives_apts_reason_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, message: str
) -> None:
    _fake_apt(tmp_path, monkeypatch, action)
    config = DataConfig(source="debian", cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            load_dataset(config, seed=1)
    assert (tmp_path / "calls").read_text() == "called\ncalled\n"


def test_the_private_configuration_undoes_what_images_set(tmp_path: Path) -> None:
    """Container images turn translations off and delete the package cache after an update."""
    lines = apt.apt_settings(tmp_path, "de").splitlines()
    assert "#clear Acquire::Languages;" in lines
    assert lines.index("#clear Acquire::Languages;") < lines.index(
        'Acquire::Languages { "en"; "de"; };'
    )
    assert "#clear APT::Update::Post-Invoke;" in lines
