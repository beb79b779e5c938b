"""Checks of settings: each failure is one sentence with the key, its value and what is allowed."""

import math

from sparseformer.errors import ConfigError


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise a ConfigError that names the key, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"{key} is {value!r}, but it must be {allowed}.")


def require_at_least(section: str, config: object, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None:
            key = f"{section}.{name}"
            finite = math.isfinite(value)
            allowed = f"{minimum} or more{'' if finite else ' and finite'}"
            require(finite and value >= minimum, key, value, allowed)


def require_share(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0.0 <= value < 1.0, f"{section}.{name}", value, "in [0, 1)")
