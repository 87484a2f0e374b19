"""Where settings come from: a TOML file, the environment, the command line; later ones win."""

from __future__ import annotations

import difflib
import os
import re
import socket
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.config.checks import check
from kvpool.config.declare import convert_setting, settings_of
from kvpool.config.settings import DaemonConfig, parse_setting
from kvpool.errors import ConfigError
from kvpool.net import operator_socket_of
from kvpool.secret_files import check_private, read_small

if TYPE_CHECKING:
    import msgspec

_SETTINGS = settings_of(DaemonConfig)
NEAR = 0.83  # so alike are two names of which one is the other, mistyped
_OTHERS = frozenset({"KVPOOL_TENANT", "KVPOOL_TOKEN", "KVPOOL_TOKEN_FILE", "KVPOOL_ROUTER"})
"""Variables of clients and routers, which may be set where a daemon starts."""


class Given(NamedTuple):
    """A setting's value, checked, and its source: a file, a variable or an option."""

    value: Any
    source: str


def default_socket_path(environ: Mapping[str, str] = os.environ) -> str:
    """The default socket, where daemon and clients of one user meet."""
    if path := environ.get("KVPOOL_SOCKET"):
        return path
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return f"{runtime}/kvpool/kvpool.sock"
    if os.getuid() == 0:
        return "/run/kvpool/kvpool.sock"
    folder = f"/tmp/kvpool-{os.getuid()}"  # noqa: S108  (the daemon makes it with mode 0700)
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        pass
    else:
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise ConfigError(
                f"{folder} is not owned by this user, so another user may listen there. Set KVPOOL_SOCKET or "
                "XDG_RUNTIME_DIR"
            )
    return f"{folder}/kvpool.sock"


def default_operator_socket(socket: str, environ: Mapping[str, str] = os.environ) -> str:
    """Where the operators of the daemon at this socket connect."""
    return environ.get("KVPOOL_OPERATOR_SOCKET") or operator_socket_of(socket)


def secret_of(variable: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The content of `variable`, or of the file that `variable`_FILE names, less one newline at its end.

    None: neither is set. Raises `ConfigError` when both are, or the file cannot be read.
    """
    path = environ.get(f"{variable}_FILE")
    if path is None:
        return environ.get(variable)
    if variable in environ:
        raise ConfigError(f"{variable} and {variable}_FILE are both set: unset one of them")
    return read_small(path, f"{variable}_FILE", private=False).removesuffix("\n")


def read_toml(path: str) -> dict[str, Any]:
    """A file's tables. Raises `ConfigError`."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def gather(
    file: str | None, flags: Mapping[str, object], environ: Mapping[str, str]
) -> dict[str, Given]:
    """The settings that are set, by name. Raises `ConfigError`, which names the source."""
    path = file or environ.get("KVPOOL_CONFIG")
    given = from_file(DaemonConfig, path) if path else {}
    for name, each in _SETTINGS.items():
        if each.file_only:
            continue
        variable = f"KVPOOL_{name.upper()}"
        # A setting of its own may name the file of a secret, which then is read again when it changes.
        with_file = each.secret and f"{name}_file" not in _SETTINGS
        text = secret_of(variable, environ) if with_file else environ.get(variable)
        if text is not None:
            source = variable if variable in environ else f"{variable}_FILE"
            given[name] = Given(parse_setting(name, text, variable), source)
    for variable in environ:
        _check_variable(variable)
    return given | from_flags(DaemonConfig, flags)


def _check_variable(variable: str) -> None:
    """Raises `ConfigError` for what looks like a mistyped setting. Others may be of another program."""
    if not variable.startswith("KVPOOL_") or variable in _OTHERS:
        return
    name = variable.removeprefix("KVPOOL_").lower()
    if name in _SETTINGS or name.removesuffix("_file") in _SETTINGS:
        return
    if near := difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=NEAR):
        raise ConfigError(
            f"{variable}: no such setting. Did you mean KVPOOL_{near[0].upper()}? Unset the variable if it is "
            "something else"
        )


def from_file(struct: type[msgspec.Struct], path: str) -> dict[str, Given]:
    """The values of this struct's settings in a TOML file.

    Raises `ConfigError`, also if there are secrets in it and others than its owner can reach it.
    """
    known = settings_of(struct)
    values = read_toml(path)
    for name, value in values.items():
        secret = name in known and known[name].secret and _is_secret(value)
        if secret or (name == "tenants" and _has_token(value)):
            check_private(path, f"{path}: {name}")
    return {
        name: Given(convert_setting(struct, name, value, f"{path}: {name}"), path)
        for name, value in values.items()
    }


def _is_secret(value: object) -> bool:
    """An address is one only with a password in it."""
    return isinstance(value, str) and value != "" and ("://" not in value or "@" in value)


def _has_token(tenants: object) -> bool:
    tables = tenants.values() if isinstance(tenants, dict) else ()
    return any(isinstance(table, dict) and "token" in table for table in tables)


def from_flags(struct: type[msgspec.Struct], flags: Mapping[str, object]) -> dict[str, Given]:
    """The same for options, by the names of settings. None: not given."""
    known = settings_of(struct)
    given = {}
    for name, value in flags.items():
        if value is not None:
            option = (known[name].option if name in known else "") or f"--{name}"
            given[name] = Given(convert_setting(struct, name, value, option), option)
    return given


def load(
    *,
    file: str | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> DaemonConfig:
    """The configuration. `flags` that are None were not given.

    Raises `ConfigError` for a file that cannot be read, an unknown name or an invalid value;
    the message names the source.
    """
    return config_of(gather(file, flags or {}, environ), environ)


def config_of(given: Mapping[str, Given], environ: Mapping[str, str]) -> DaemonConfig:
    """All settings, with defaults for the missing ones. Raises `ConfigError` for invalid combinations."""
    defaults = {"node": _node_name(socket.gethostname())}
    if "socket" not in given:
        defaults["socket"] = default_socket_path(environ)
    config = DaemonConfig(**defaults | {name: each.value for name, each in given.items()})
    check(config)
    return config


def _node_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", host)[:63].lstrip("._-") or "node"
