"""From command-line arguments and TOML files to dataclasses: defaults, then files, then flags."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sparseformer.config import Config
from sparseformer.errors import ConfigError

T = TypeVar("T")


def parse_config(argv: Sequence[str], prog: str) -> tuple[Config, bool]:
    """Return the run's configuration, and whether --print-config was given.

    Raises:
        ConfigError: an unknown key or flag, a value of the wrong type or out of range, or a file
            that can't be read.
        SystemExit: --help was given.
    """
    outer = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    outer.add_argument("--config", nargs="+", action="extend", default=[])
    outer.add_argument("--print-config", action="store_true")
    try:
        known, flags = outer.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}.") from error
    from_files = [flag for path in known.config for flag in _file_flags(Path(path))]
    return parse_dataclass(Config, [*from_files, *flags], prog), known.print_config


def parse_dataclass(cls: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """Parse argv into a dataclass with tyro; what tyro prints of a mistake becomes one sentence."""
    import tyro

    names = _flag_names(cls)
    for flag in argv:
        if re.match(r"--[a-z]", flag):
            _check_flag(flag.split("=")[0], names, prog)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            description = _DESCRIPTION if cls is Config else None
            options: dict[str, Any] = {} if default is None else {"default": default}
            parsed: T = tyro.cli(
                cls, args=list(argv), prog=prog, description=description, **options
            )
            return parsed
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_sentence(printed.getvalue())) from None


def dump_toml(config: object) -> str:
    """Write a configuration dataclass as TOML; a setting that is None is left out."""
    lines, sections = [], []
    for name, value in _items(config):
        if dataclasses.is_dataclass(value):
            sections.append(f"\n[{name}]\n{dump_toml(value)}")
        elif value is not None:
            lines.append(f"{name} = {_toml_value(value)}\n")
    return "".join([*lines, *sections])


def load_run_config(path: Path) -> Config:
    """Read the config.toml that a run left in its folder.

    Raises:
        ConfigError: there is none, or it can't be used.
    """
    if not path.is_file():
        raise ConfigError(f"{path.parent} is not a run folder: it has no {path.name}.")
    return parse_dataclass(Config, _file_flags(path), prog=str(path))


_DESCRIPTION = (
    "One run: train, evaluate, report. Also: --config FILE.toml [FILE.toml ...] reads settings "
    "from files (later files and flags win), --print-config shows the resolved settings."
)


def _items(config: object) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        yield field.name, getattr(config, field.name)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)


def _keys(cls: type, prefix: str = "") -> list[tuple[str, type]]:
    """List the dotted TOML keys of a configuration dataclass, each with the type of its values."""
    keys = []
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        factory = field.default_factory
        nested = isinstance(factory, type) and dataclasses.is_dataclass(factory)
        if nested:
            keys += _keys(factory, key + ".")  # type: ignore[arg-type]
        else:
            keys.append((key, _kind(hints[field.name])))
    return keys


def _kind(hint: Any) -> type:
    """Return bool, int, float, str or tuple for a setting's type; a Literal holds texts."""
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if get_origin(hint) in (Union, UnionType):
        return _kind(choices[0])
    kind = get_origin(hint) or hint
    return str if kind is Literal else kind


def _flag_names(cls: type) -> set[str]:
    names = {"--help"}
    for key, _ in _keys(cls):
        section, _, leaf = key.replace("_", "-").rpartition(".")
        prefix = f"--{section}." if section else "--"
        names |= {prefix + leaf, f"{prefix}no-{leaf}"}
    return names


def _check_flag(flag: str, names: set[str], prog: str) -> None:
    if flag.replace("_", "-") in names:
        return
    raise ConfigError(
        f"{prog} has no flag {flag}{_nearest(flag, names)}; `{prog} --help` lists all of them."
    )


def _nearest(name: str, known: set[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not matches:
        leaf = name.removeprefix("--").rpartition(".")[2]
        matches = [
            key for key in sorted(known) if key.removeprefix("--").rpartition(".")[2] == leaf
        ]
    return f" (did you mean {matches[0]}?)" if matches else ""


def _file_flags(path: Path) -> list[str]:
    """Read a TOML file as flags, so that files and flags share one validator."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"Can't read the configuration {path}: {reason}.") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    flags = []
    kinds = dict(_keys(Config))
    for key, value in _flatten(table):
        if key not in kinds:
            raise ConfigError(f"{path} has an unknown key {key}{_nearest(key, set(kinds))}.")
        if not _fits(value, kinds[key]):
            raise ConfigError(f"{path}: {key} is {value!r}, but it must be {_NAMES[kinds[key]]}.")
        flags += _as_flag(key, value)
    return flags


_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    tuple: "a list of texts",
}


def _fits(value: object, kind: type) -> bool:
    if kind is tuple:
        return isinstance(value, list) and all(_fits(item, str) for item in value)
    if kind is str:
        return isinstance(value, str) and "\0" not in value
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _as_flag(key: str, value: object) -> list[str]:
    section, _, leaf = key.replace("_", "-").rpartition(".")
    prefix = f"--{section}." if section else "--"
    if isinstance(value, bool):
        return [prefix + (leaf if value else f"no-{leaf}")]
    if isinstance(value, list):
        return [prefix + leaf, *(str(item) for item in value)]
    return [f"{prefix}{leaf}={value}"]  # one argument, so that a value may begin with a dash


def _sentence(printed: str) -> str:
    """Take the message out of the box that tyro draws around it, and say types in words."""
    message: list[str] = []
    for line in printed.splitlines()[1:]:  # the first line is the box's title
        text = line.strip("│|╭╮╰╯+ ")
        if re.search("[─-]{3}", text) or not text:  # a border, a separator or a gap
            if message:
                break
            continue
        message.append(text)
    sentence = " ".join(message)
    for pattern, replacement in _IN_WORDS:
        sentence = re.sub(pattern, replacement, sentence)
    return sentence.rstrip(".") + _nearest_choice(sentence) + "."


_IN_WORDS = (
    (r"^Error parsing [\w.]+: (?=[\w.]+ is )", ""),
    (r"^Error parsing (--\S+): invalid literal for int.*: ('.*')", r"\1 is \2, not a whole number"),
    (
        r"^Error parsing (--\S+): could not convert string to float: ('.*')",
        r"\1 is \2, not a number",
    ),
    (
        r"^Error parsing (--\S+): no type matching .*\|(\w+) could .* from \[('.*')\]",
        r"\1 is \3, not of type \2",
    ),
    (r"^Unrecognized options: (\S+)$", r"There is no place for the argument \1"),
    (r"^invalid", "Invalid"),
)


def _nearest_choice(message: str) -> str:
    found = re.search(r"nvalid choice '(.*?)' .*Expected one of \((.*)\)", message)
    if not found:
        return ""
    return _nearest(found[1], set(re.findall(r"'([^']+)'", found[2])))
