"""What `kvpool config` prints: the settings that a daemon would run with and where each comes from, or those that it has
now; and how they are changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvpool.cli.asking import ask_each
from kvpool.cli.render.text import Column, Parts, rows_table
from kvpool.config import SECRETS, SETTINGS, config_of, gather
from kvpool.errors import InvalidRequest
from kvpool.plain_text import plain as plain_text
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Setting as RunningSetting

if TYPE_CHECKING:
    from kvpool.client.gateway import Operator

LINE_MAX = 78
TABLES = ("tenants", "publish_events")
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


def toml_text(found: Sequence[Setting]) -> str:
    """TOML that sets the same when it is saved to a file: what somebody has set, and defaults in comments."""
    lines = []
    chosen = [each for each in found if each.source != DEFAULT]
    # A table takes all lines after it, so tables come last.
    chosen.sort(key=lambda each: (each.name in TABLES, each.source))
    for each in found:
        if each.source == DEFAULT and each.name not in TABLES:
            text = _toml(each) if each.value is not None else f"{each.name}: not set"
            lines += [f"# {line}" for line in text.splitlines()]
    source = ""
    for each in chosen:
        if each.source != source:
            source = each.source
            lines.append(f"\n# from {source}")
        text = _toml(each)
        lines.append(f"# {text}  # a secret, not shown" if each.name in SECRETS else text)
    return plain_text("\n".join(lines))


def running_view(found: Sequence[RunningSetting]) -> Parts:
    """The settings of a running node: what can be changed first."""
    columns: dict[str, Column] = {
        "setting": "name",
        "value": _running_value,
        "": lambda each: ", ".join(
            [*["default"] * each.default, *["can be changed"] * each.changeable]
        ),
    }
    ordered = sorted(found, key=lambda each: not each.changeable)
    yield rows_table("", ordered, columns, wraps={"setting", "value"})


def _running_value(each: RunningSetting) -> str:
    if each.secret:
        return HIDDEN if each.value else ""
    if isinstance(each.value, bool):
        return str(each.value).lower()  # as it is typed
    return _text(Setting(each.name, each.value, ""))


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
    client: Operator, nodes: Sequence[str], changes: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Change settings of nodes, one after the other; which did, and why others did not. Raises what the first one said."""
    message = operator_wire.ChangeSettings(msgspec.json.encode(changes))
    first, *others = nodes
    client.ask_node(message, node=first)
    done, failed = ask_each(client, others, message)
    return [first, *done], failed


def _text(setting: Setting) -> str:
    value = setting.value
    if setting.name == "socket_mode":
        return f"{value:o}"
    if isinstance(value, list):
        return ", ".join(_words(each) for each in value)
    return _words(value) if value is not None else ""


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_words(each)}" for name, each in value.items())
    return str(value)


def _toml(setting: Setting) -> str:
    """As it would be written in a file."""
    name, value = setting.name, setting.value
    match name:
        case "socket_mode":
            return f"{name} = 0o{value:o}"
        case "ssd":
            value = [f"{disk['path']}={_size(disk['size'])}" for disk in value]
        case "device" if value:
            value = f"{value['device']}={_size(value['size'])}"
        case "rails":
            value = [each or "-" for each in value]
        case "memory":
            value = _share(value)
        case _ if name in TABLES:
            return "\n".join(_table(name, each) for each in value)
    line = f"{name} = {_value(value)}"
    if isinstance(value, list) and len(line) > LINE_MAX:
        rows = "".join(f"    {_value(each)},\n" for each in value)
        return f"{name} = [\n{rows}]"
    return line


def _table(name: str, fields: Mapping[str, Any]) -> str:
    lines = [f"[{name}.{_value(fields['name'])}]"]
    for key, value in fields.items():
        if key == "name" or value is None:
            continue
        shown = _share(value) if key in {"memory", "ssd"} else value
        line = f"{key} = {_value(shown)}"
        lines.append(f"# {line}  # a secret, not shown" if value == HIDDEN else line)
    return "\n".join(lines)


def _share(value: float) -> str:
    """Of memory or disks: bytes are whole numbers."""
    return _size(value) if isinstance(value, int) else f"{100 * value:.15g}%"


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_value(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # What JSON quotes, TOML does, too; but DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
