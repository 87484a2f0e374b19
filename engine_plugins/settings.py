"""The settings that users give a plugin, checked against the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from kvpool.errors import ConfigError


def typed_settings(
    cls: Any, given: Mapping[str, Any], what: str, *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return given values in the types of the defaults of `cls`, a dataclass; None only where None is the default.

    what: they are given in. without: fields that are no settings. Raises `ConfigError` naming what is wrong.
    """
    defaults = {each.name: each.default for each in fields(cls) if each.name not in without}
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ConfigError(
            f"{what} has no setting {', '.join(map(repr, unknown))}; known settings are {', '.join(sorted(defaults))}"
        )
    return {
        name: _typed(f"{what}[{name!r}]", value, defaults[name]) for name, value in given.items()
    }


def _typed(where: str, value: object, default: object) -> object:
    if default is None:
        if value is None or isinstance(value, str):
            return value
        raise ConfigError(f"{where} must be a string, not {value!r}")
    if isinstance(default, StrEnum):
        try:
            return type(default)(str(value))
        except ValueError:
            known = ", ".join(type(default))
            raise ConfigError(f"{where} is {value!r}; it must be one of {known}") from None
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where} must be true or false, not {value!r}")
    if isinstance(default, str):
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return str(value)
        raise ConfigError(f"{where} must be a string, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where} must be a number, not {value!r}")
    if isinstance(default, int):
        if value != int(value):
            raise ConfigError(f"{where} must be a whole number, not {value!r}")
        return int(value)
    return float(value)
