"""Typed access to the JSON settings that come with a published checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparseformer.errors import CheckpointError

_MAX_BYTES = 16 << 20


class SettingsFile(NamedTuple):
    """The values of one JSON file; the getters refuse a value of the wrong kind by name.

    A key that is missing or null takes the getter's `default`, which is what the format itself
    says; without a default it is refused.
    """

    path: Path
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """Return a whole number of at least `minimum`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(key, f"a whole number of {minimum} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "a string")
        return value

    def token(self, key: str) -> int | None:
        """Return a token id, or None where the file has none."""
        value = self.values.get(key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(key, "one token id")
        return value

    def refusal(self, key: str, allowed: str) -> CheckpointError:
        """Return the error that says what a key has to be."""
        shown = repr(self.values.get(key))
        return CheckpointError(f"{self.path}: {key} is {shown[:80]}, but it must be {allowed}.")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.path} has no {key}, so the model's shape is unknown.")
        return default


def read_settings_file(path: Path) -> SettingsFile:
    """Read a JSON object.

    Raises:
        CheckpointError: it is missing, too large, or no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} has more than {_MAX_BYTES} bytes; it is no settings.")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} isn't JSON; copy it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} doesn't hold a JSON object; copy it again.")
    return SettingsFile(path, values)
