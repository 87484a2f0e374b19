"""What `kvpool config` prints: the settings that a daemon would run with and where each comes from, or those that it has
now; and how they are changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.markup import escape

from kvpool.cli.render.jobs import Asks
from kvpool.cli.render.text import make_console, make_table
from kvpool.config import SECRETS, SETTINGS, config_of, gather
from kvpool.errors import ClusterUnavailable, InvalidRequest, Unavailable
from kvpool.wire import operator as operator_wire

if TYPE_CHECKING:
    from rich.console import Console

HIDDEN = "***"
DEFAULT = "default"
HIDDEN_FIELDS = frozenset(("token", "password", "secret"))
"""Of tables, such as a tenant's."""


class Setting(NamedTuple):
    """source: default, the file's path, or the variable's name. value: plain, secrets hidden."""

    name: str
    value: Any
    source: str


def effective(file: str | None, environ: Mapping[str, str]) -> list[Setting]:
    """All settings of a daemon. Raises `ConfigError`, which names what is wrong and what would be right."""
    given = gather(file, {}, environ)
    config = config_of(given, environ)
    found = []
    for name in SETTINGS:
        value = _without_secrets(msgspec.to_builtins(getattr(config, name)))
        if name in SECRETS and value:
            value = HIDDEN
        found.append(Setting(name, value, given[name].source if name in given else DEFAULT))
    return found


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): HIDDEN if key in HIDDEN_FIELDS and each else _without_secrets(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(each) for each in value]
    return value


def plain(found: Sequence[Setting]) -> dict[str, Any]:
    """For `--json`."""
    return {each.name: {"value": each.value, "source": each.source} for each in found}


def show(found: Sequence[Setting], console: Console | None = None) -> None:
    """Print a table: what somebody has set first."""
    console = console or make_console()
    table = make_table("", "setting", "value", "from")
    for each in sorted(found, key=lambda each: each.source == DEFAULT):
        style = "dim" if each.source == DEFAULT else ""
        table.add_row(each.name, escape(_text(each)), escape(each.source), style=style)
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def show_running(found: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print what a node answers to `kvpool.wire.operator.Settings`: what can be changed first."""
    console = console or make_console()
    table = make_table("", "setting", "value", "")
    for each in sorted(found, key=lambda each: not each["changeable"]):
        value = each["value"] if not each["secret"] else HIDDEN if each["value"] else None
        can = "can be changed" if each["changeable"] else ""
        text = _text(Setting(each["name"], value, ""))
        if isinstance(value, bool):
            text = str(value).lower()  # as it is typed
        table.add_row(each["name"], escape(text), can)
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = not column.header
    console.print(table)


def parse_changes(given: Sequence[str]) -> dict[str, str]:
    """Settings by name, of NAME=VALUE. Raises `InvalidRequest`; whether a value is right, the node tells."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not name:
            raise InvalidRequest(f"{text!r:.60} is no NAME=VALUE, such as replicas_max=3")
        if name in found:
            raise InvalidRequest(f"{name} is given twice")
        found[name] = value
    return found


def change(
    client: Asks, nodes: Sequence[str], changes: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Change settings of nodes, one after the other; which did, and why others did not. Raises what the first one said."""
    message = operator_wire.ChangeSettings(msgspec.json.encode(changes))
    first, *others = nodes
    client.ask_node(message, node=first)
    done, failed = [first], {}
    for node in others:
        try:
            client.ask_node(message, node=node)
        except (InvalidRequest, Unavailable, ClusterUnavailable) as error:
            failed[node] = str(error)
        else:
            done.append(node)
    return done, failed


def _text(setting: Setting) -> str:
    value = setting.value
    if setting.name == "socket_mode":
        return f"{value:o}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_words(each) for each in value)
    return _words(value) if value is not None else ""


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_words(each)}" for name, each in value.items())
    return str(value)
