"""The settings that users give a plugin, checked against the fields of a dataclass; and those that plugins share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvpool.errors import ConfigError
from kvpool.types import DEFAULT_TENANT

if TYPE_CHECKING:
    from kvpool.client import Client


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a plugin for the pool.

    socket: the daemon's unix socket, in which `{rank}` stands for the rank's number, where ranks of one machine have
        daemons of their own; None means `KVPOOL_SOCKET`, else the default path.
    tenant, token: who the engine is to the pool.
    epoch: part of the namespace. Give engines a new one when weights change under the same name.
    """

    WHERE: ClassVar[str]
    """The option or file that the settings are given in."""

    socket: str | None = None
    tenant: str = DEFAULT_TENANT
    token: str | None = None
    epoch: str = "0"

    @classmethod
    def from_given(cls, given: Mapping[str, Any] | None) -> Self:
        """Return the settings with given values, in the types of the defaults; None only where None is the default.

        Raises `ConfigError` naming what is wrong.
        """
        given = given or {}
        defaults = {each.name: each.default for each in fields(cls)}
        unknown = sorted(set(given) - set(defaults))
        if unknown:
            raise ConfigError(
                f"{cls.WHERE} has no setting {', '.join(map(repr, unknown))}; known settings are "
                f"{', '.join(sorted(defaults))}"
            )
        typed: dict[str, Any] = {
            name: _typed(f"{cls.WHERE}[{name!r}]", value, defaults[name])
            for name, value in given.items()
        }
        return cls(**typed)

    def client(self, timeout_s: float, *, rank: int = 0, **more: Any) -> Client:
        """Return a client of the daemon of this rank. more: as `Client` takes it."""
        from kvpool.client import Client

        socket = self.socket and self.socket.replace("{rank}", str(rank))
        return Client(socket, tenant=self.tenant, token=self.token, timeout_s=timeout_s, **more)

    def require(self, name: str, good: bool, wanted: str) -> None:
        """Raises `ConfigError` for a setting that is not as wanted."""
        if not good:
            raise ConfigError(f"{self.WHERE}[{name!r}] must be {wanted}")


@dataclass(frozen=True)
class ModelSettings(PoolSettings):
    """Settings of a plugin of an engine that holds a model, in addition.

    model: name of the model in the namespace, for engines that hold the same weights under
        different paths; None means what the engine was given.
    any_version: share KV with engines of all versions, else with those of the same release.
    """

    model: str | None = None
    any_version: bool = False


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
