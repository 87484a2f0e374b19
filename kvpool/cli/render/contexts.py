"""Contexts: the clusters that this user's `kvpool` speaks to over HTTP, by name.

    current = "prod"

    [context.prod]
    url = "https://kvpool.example.org:7071"
    token_file = "/home/ana/.config/kvpool/prod.token"

In `$XDG_CONFIG_HOME/kvpool/contexts.toml`, mode 0600: who can change it decides where tokens are sent.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from kvpool.cli.render.gateway_http import TOKEN, GatewayClient, GatewayUrl
from kvpool.config import secret_of
from kvpool.errors import ConfigError, InvalidRequest
from kvpool.secret_files import (
    check_own,
    check_private,
    is_printable,
    read_secret_file,
    write_whole,
)

LOCAL = "local"
"""The context that is always there: this machine's daemon."""
FILE_BYTES_MAX = 1 << 20
CONTEXTS_MAX = 1000
VARIABLE = "KVPOOL_CONTEXT"

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Text = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    url: Text
    token_file: Text = ""
    ca: Text = ""
    tenant: Text = ""
    insecure_http: bool = False


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. current: the one that is used without --context and KVPOOL_CONTEXT; empty: this machine's daemon."""

    current: str = ""
    context: Annotated[dict[Name, _Entry], msgspec.Meta(max_length=CONTEXTS_MAX)] = {}


class Context(msgspec.Struct, frozen=True):
    """One context. token_file: empty: the token is in KVPOOL_GATEWAY_TOKEN. tenant: for commands that name none."""

    name: str
    url: str
    token_file: str = ""
    ca: str = ""
    tenant: str = ""
    insecure_http: bool = False

    @property
    def where(self) -> str:
        return f"context {self.name} ({self.url})"


def path_of(environ: Mapping[str, str]) -> Path:
    """Of the file. Raises `ConfigError`."""
    folder = environ.get("XDG_CONFIG_HOME") or ""
    if not folder:
        home = environ.get("HOME") or ""
        if not home:
            raise ConfigError(
                "neither XDG_CONFIG_HOME nor HOME is set: there is no place for contexts"
            )
        folder = f"{home}/.config"
    return Path(folder, "kvpool", "contexts.toml")


def read(path: Path) -> Contexts:
    """Raises `ConfigError` for what is no file of contexts, or what others may change."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    check_private(str(path), "contexts")
    for each in (path, path.parent):
        check_own(str(each), "contexts")
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        return msgspec.convert(tomllib.loads(raw.decode()), Contexts)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not a valid file of contexts: {error}") from None


def write(path: Path, contexts: Contexts) -> None:
    """Replace the file atomically, mode 0600. Raises `ConfigError`."""
    lines = [f"current = {_quoted(contexts.current)}"] if contexts.current else []
    for name, entry in sorted(contexts.context.items()):
        lines += ["", f"[context.{_quoted(name)}]"]
        for field, value in msgspec.to_builtins(entry).items():
            lines.append(f"{field} = {'true' if value is True else _quoted(value)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path.parent}: {error.strerror}") from None
    write_whole(path, ("\n".join(lines).lstrip("\n") + "\n").encode())


def _quoted(text: str) -> str:
    # Control characters are refused, so a JSON string is a TOML string.
    return json.dumps(text, ensure_ascii=False)


def choose(given: str, socket: str | None, environ: Mapping[str, str]) -> Context | None:
    """The context of a command: its option, KVPOOL_CONTEXT, or the current one. None: this machine's daemon.

    An explicit socket is this machine's. KVPOOL_SOCKET only tells where that is. Raises `ConfigError`, and
    `InvalidRequest` for two answers to one question.
    """
    if socket:
        if given not in {"", LOCAL}:
            raise InvalidRequest(f"--context {given} and --socket exclude each other")
        return None
    name, said = given or environ.get(VARIABLE, ""), "--context" if given else VARIABLE
    if name == LOCAL:
        return None
    if not (name or environ.get("XDG_CONFIG_HOME") or environ.get("HOME")):
        return None
    found = read(path_of(environ))
    if not name:
        name, said = found.current, "the current context"
    return one(found, name, said) if name else None


def one(found: Contexts, name: str, said: str) -> Context:
    """Raises `ConfigError` for one that is not there."""
    entry = found.context.get(name)
    if entry is None:
        raise ConfigError(
            f"{said}: there is no context {name!r:.80}; `kvpool context list` shows them"
        )
    return Context(name, **msgspec.structs.asdict(entry))


def changed(found: Contexts, context: Context) -> Contexts:
    """With this context, new or in place of the one of its name. Raises `ConfigError`."""
    if context.name == LOCAL:
        raise ConfigError(f"{LOCAL} is this machine's daemon: choose another name")
    GatewayUrl(context.url, insecure_http=context.insecure_http)
    fields = msgspec.structs.asdict(context)
    name = fields.pop("name")
    raw = {
        "current": found.current,
        "context": {**msgspec.to_builtins(found.context), name: fields},
    }
    try:
        msgspec.json.encode(
            fields
        )  # a path may have bytes that are not UTF-8, which the file cannot name
        return msgspec.convert(raw, Contexts)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ConfigError(f"not a valid context: {error}") from None


def without(found: Contexts, name: str) -> Contexts:
    """The current one cannot be removed: commands would go elsewhere without a word. Raises `ConfigError`."""
    one(found, name, "rm")
    if name == found.current:
        raise ConfigError(
            f"{name} is the current context: first `kvpool context use {LOCAL}`, or another one"
        )
    rest = {each: entry for each, entry in found.context.items() if each != name}
    return Contexts(found.current, rest)


def used(found: Contexts, name: str) -> Contexts:
    """Raises `ConfigError`."""
    if name != LOCAL:
        one(found, name, "use")
    return Contexts("" if name == LOCAL else name, found.context)


def open_gateway(context: Context, tenant: str, environ: Mapping[str, str]) -> GatewayClient:
    """Raises `ConfigError`. A token of the environment is not sent to a cluster that has its own."""
    if context.token_file:
        where = f"context {context.name}: token_file"
        check_own(context.token_file, where)
        token = read_secret_file(context.token_file, where)
    else:
        token = secret_of(TOKEN, environ) or ""
        if not is_printable(token):
            raise ConfigError(
                f"context {context.name} has no token: `kvpool context set {context.name} --token-file FILE`, or set {TOKEN}"
            )
    url = GatewayUrl(context.url, insecure_http=context.insecure_http)
    return GatewayClient(url, token, tenant=tenant, ca=context.ca, where=context.where)


def absolute(file: Path | None) -> str:
    """As commands find it in any folder; empty: none."""
    return "" if file is None else os.path.abspath(file.expanduser())
