"""Make the reference parts of the documents from what the code declares: `make docs` calls this.

A document has a line "Made by `make docs`: NAME." where a part belongs; `PARTS` names the functions that make them.
What is made is not committed. The man page becomes `kvpool.1` of the site.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from prometheus_client.metrics import MetricWrapperBase

from kvpool.cli.base import EXIT_STATUSES
from kvpool.cli.verbs import app
from kvpool.config import DaemonConfig, settings_of
from kvpool.router.config import RouterConfig
from kvpool.router.records.metrics import Metrics
from kvpool.telemetry.metrics import families
from kvpool.telemetry.node_stats import NodeStats

if TYPE_CHECKING:
    import msgspec

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^\*Made by `make docs`: (.+)\.\*$", re.MULTILINE)
EXAMPLE = "Example: "
COMMON = ("--socket", "--tenant", "--json")
"""Options of most commands, described once."""
BEHIND = {"kvpool.client": "kvpool.client.client"}
"""Modules whose texts say more of those that others import."""
MODULES = ("kvpool.client", "kvpool.types", "kvpool.errors", "kvpool.engine_plugins.mooncake")
PARAMETERS = re.compile(r"((?:[a-z_][a-z0-9_]*(?:, )?)+): (.*)")
WIDTH = 100


# ---- commands -------------------------------------------------------------------------------------


class Option(NamedTuple):
    """names: as typed, with what follows them. default: empty for none."""

    names: str
    help: str
    default: str


class Verb(NamedTuple):
    """path: `kvpool job list`. usage: what may follow it."""

    path: str
    usage: str
    text: list[str]
    examples: list[str]
    arguments: list[Option]
    options: list[Option]


def verbs(command: Any = None, path: str = "kvpool") -> Iterator[Verb]:
    """All commands, those of groups too."""
    command = command or typer.main.get_command(app)
    if commands := getattr(command, "commands", None):
        for name, one in commands.items():
            yield from verbs(one, f"{path} {name}")
        return
    paragraphs = [re.sub(r"\s+", " ", text) for text in (command.help or "").split("\n\n")]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    yield Verb(
        path,
        " ".join(["[OPTIONS]", *map(_typed, arguments)]),
        [text for text in paragraphs if not text.startswith(EXAMPLE)],
        [text.removeprefix(EXAMPLE) for text in paragraphs if text.startswith(EXAMPLE)],
        [Option(_typed(each), each.help or "", _default(each)) for each in arguments],
        [Option(_names(each), each.help or "", _default(each)) for each in options],
    )


def _typed(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    if argument.nargs == -1 and not name.endswith("..."):
        name += "..."
    return name if argument.required else f"[{name}]"


def _names(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} {option.metavar or 'VALUE'}"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value in (None, "", False, True) or callable(value):
        return ""
    return str(getattr(value, "value", value))


def common(found: list[Verb]) -> dict[str, Option]:
    """Those options of which most commands have one, as most have it."""
    every = Counter(option for verb in found for option in verb.options)
    return {
        name: next(each for each, _ in every.most_common() if each.names.split()[0] == name)
        for name in COMMON
    }


def own(verb: Verb, shared: dict[str, Option]) -> list[Option]:
    """Its options, less those that are said of all."""
    return [option for option in verb.options if option not in shared.values()]


def commands() -> str:
    """Return a section for each command."""
    found = list(verbs())
    shared = common(found)
    parts = []
    for verb in found:
        lines = [f"### {verb.path}", "", f"`{verb.path} {verb.usage}`", "", *_spaced(verb.text)]
        if verb.examples:
            lines += ["```console", *(f"$ {each}" for each in verb.examples), "```", ""]
        if rows := [*verb.arguments, *own(verb, shared)]:
            lines += ["| | |", "|---|---|", *map(_row, rows), ""]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)


def statuses() -> str:
    """Return the table of exit statuses."""
    rows = [f"| {status} | {meaning} |" for status, meaning in EXIT_STATUSES.items()]
    return "\n".join(["| exit status | |", "|---|---|", *rows])


def options() -> str:
    """Return the table of the options of most commands."""
    found = list(verbs())
    return "\n".join(["| | |", "|---|---|", *map(_row, common(found).values())])


def _spaced(paragraphs: list[str]) -> list[str]:
    return [line for text in paragraphs for line in (text, "")]


def _row(option: Option) -> str:
    text = f"{option.help} Default: `{option.default}`" if option.default else option.help
    names, text = (each.replace("\n", " ").replace("|", r"\|") for each in (option.names, text))
    return f"| `{names}` | {text} |"


# ---- settings -------------------------------------------------------------------------------------


def settings(struct: type[msgspec.Struct]) -> str:
    """Return the table of settings that a configuration declares."""
    rows = [
        f"| `{each.name}` | {_plain_or_code(each.shown)} | {_cell(each.description)} |"
        for each in settings_of(struct).values()
    ]
    return "\n".join(["| setting | default | what |", "|---|---|---|", *rows])


def _plain_or_code(default: str) -> str:
    """A value is code; words are not."""
    return default if default == "none" or re.search("[ `]", default) else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


# ---- the man page ---------------------------------------------------------------------------------


def man_page() -> str:
    found = list(verbs())
    shared = common(found)
    lines = [
        '.TH KVPOOL 1 "" "kvpool" "User Commands"',
        ".SH NAME",
        r"kvpool \- a cluster\-wide KV cache pool for LLM serving",
        ".SH SYNOPSIS",
        r".B kvpool",
        r"\fICOMMAND\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]",
        ".SH COMMANDS",
    ]
    for verb in found:
        lines += [f".SS {_roff(verb.path)}", rf".B {_roff(verb.path)}", _roff(verb.usage)]
        lines += [line for text in verb.text for line in (".PP", _roff(text))]
        for option in (*verb.arguments, *own(verb, shared)):
            lines += _man_option(option)
        for example in verb.examples:
            lines += [".PP", ".nf", r".RS", _roff(f"$ {example}"), ".RE", ".fi"]
    lines.append(".SH OPTIONS OF MOST COMMANDS")
    for option in shared.values():
        lines += _man_option(option)
    lines.append(".SH EXIT STATUS")
    for status, meaning in EXIT_STATUSES.items():
        lines += [".TP", rf"\fB{status}\fR", _roff(meaning)]
    lines += [
        ".SH ENVIRONMENT",
        _roff(
            "Each setting of the daemon can be set by a variable, KVPOOL_ and its name in capitals. KVPOOL_TOKEN: a "
            "tenant's token. KVPOOL_OPERATOR_TOKEN: the daemon's operator token, if one is set. "
            "KVPOOL_ROUTER_TOKEN: the router's. KVPOOL_GATEWAY: the URL of a gateway that operators' commands ask instead of "
            "this machine's daemon, with the token in KVPOOL_GATEWAY_TOKEN. A token's variable may end in _FILE and name a "
            "file."
        ),
    ]
    return "\n".join(lines) + "\n"


def _man_option(option: Option) -> list[str]:
    text = f"{option.help} Default: {option.default}" if option.default else option.help
    return [".TP", rf"\fB{_roff(option.names)}\fR", _roff(text)]


def _roff(text: str) -> str:
    r"""Text for roff. A line that begins with . or ' would be a request; a bare - may become a hyphen."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("\n", " ")
    return rf"\&{escaped}" if escaped[:1] in {".", "'"} else escaped


# ---- the Python API -------------------------------------------------------------------------------


def python_api() -> str:
    """Return what the docstrings of the public modules say."""
    return "\n\n".join(chunk for name in MODULES for chunk in module(importlib.import_module(name)))


def module(found: ModuleType) -> Iterator[str]:
    """What a module gives, in the order of its `__all__`: classes, functions, then values."""
    yield f"## {found.__name__}"
    yield from prose(found.__doc__)
    if found.__name__ in BEHIND:
        yield from prose(importlib.import_module(BEHIND[found.__name__]).__doc__)
    values = []
    for name in getattr(found, "__all__", ("install",)):
        thing = getattr(found, name)
        if inspect.isclass(thing) and issubclass(thing, Exception):
            yield f"### {name}"
            yield from prose(thing.__doc__)
        elif inspect.isclass(thing):
            # A name of another public module is described there.
            if thing.__module__ in MODULES and thing.__module__ != found.__name__:
                continue
            yield from described(thing)
        elif inspect.isfunction(thing):
            yield f"### {name}"
            yield call(name, thing)
            yield from prose(thing.__doc__)
        else:
            values.append(f"`{name}`")
    if values:
        yield f"Values and types: {', '.join(values)}."


def described(found: type) -> Iterator[str]:
    """A class with its own public methods and properties, or members."""
    yield f"### {found.__name__}"
    if issubclass(found, enum.Enum):
        yield from prose(found.__doc__)
        yield ", ".join(f"`{member.name}` ({member.value!r})" for member in found)
        return
    if "__init__" in vars(found) and constructed(found):
        yield call(found.__name__, found)
    yield from prose(found.__doc__)
    for base in found.__bases__:
        if base.__module__.startswith("kvpool."):
            yield f"It has the methods of `{base.__name__}` too."
    for name, one in vars(found).items():
        if name.startswith("_"):
            continue
        if isinstance(one, property):
            yield f"#### {found.__name__}.{name}"
            assert one.fget is not None
            kind = annotation_text(inspect.signature(one.fget).return_annotation)
            yield f"A property: `{kind}`."
            yield from prose(one.__doc__)
        elif inspect.isfunction(one) or isinstance(one, classmethod | staticmethod):
            yield f"#### {found.__name__}.{name}"
            yield call(f"{found.__name__}.{name}", getattr(found, name))
            yield from prose(one.__doc__)


def constructed(found: type) -> bool:
    """Whether users make it themselves: all of its parameters are of public or plain types."""
    return found.__name__ not in {"Lease", "Reservation", "Slots"}


def annotation_text(annotation: Any) -> str:
    """As it is written; empty for none."""
    if annotation is inspect.Signature.empty:
        return ""
    return getattr(annotation, "__name__", str(annotation))


def call(name: str, thing: Any) -> str:
    """How it is called, a parameter a line where it would be too long."""
    signature = inspect.signature(thing)
    given = []
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in given:
            given.append("*")
        default = "" if each.default is each.empty else f" = {each.default!r}"
        given.append(f"{each.name}: {annotation_text(each.annotation)}{default}")
    gives = annotation_text(signature.return_annotation)
    gives = f" -> {gives}" if gives not in {"", "None"} else ""
    line = f"{name}({', '.join(given)}){gives}"
    if len(line) > WIDTH:
        inner = "".join(f"    {text},\n" for text in given)
        line = f"{name}(\n{inner}){gives}"
    return f"```text\n{line}\n```"


def prose(docstring: str | None) -> Iterator[str]:
    """The paragraphs of a docstring; parameters as a list, and what is indented as it is."""
    if docstring is None:
        return
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines):
            yield "\n".join(["```text", *(line[4:] for line in lines), "```"])
            continue
        texts: list[str] = []
        for line in lines:
            bare = line.strip()
            if not line.startswith(" ") and (parameter := PARAMETERS.fullmatch(bare)):
                names = ", ".join(f"`{name}`" for name in parameter[1].split(", "))
                texts.append(f"- {names}: {parameter[2]}")
            elif texts and not (bare.startswith("Raises ") and texts[-1].startswith("- ")):
                texts[-1] += f" {bare}"
            else:
                texts.append(bare)
        previous = ""
        kept: list[str] = []
        for text in texts:
            if kept and text.startswith("- ") != previous.startswith("- "):
                kept.append("")
            kept.append(text)
            previous = text
        yield "\n".join(kept)


# ---- metrics --------------------------------------------------------------------------------------


Row = tuple[str, str, tuple[str, ...], str]


def daemon_rows() -> Iterable[Row]:
    for metric in families(NodeStats).values():
        yield metric.name, metric.kind.value, metric.labels, metric.help


def router_rows() -> Iterable[Row]:
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield name, family.type, tuple(metric._labelnames), family.documentation


def metrics_table(found: Iterable[Row]) -> str:
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, text in found:
        shown = ", ".join(f"`{label}`" for label in labels)
        escaped = text.replace("|", r"\|")
        lines.append(f"| `{name}` | {kind} | {shown} | {escaped} |")
    return "\n".join(lines)


# ---- engines and their answers --------------------------------------------------------------------


def engines() -> str:
    """Return the table of engines and features, then a section for each engine, then other programs."""
    table = tomllib.loads((ROOT / "docs" / "compatibility.toml").read_text())
    engines = table["engine"]
    heads = [f"[{one['name']}]({one['page']})" for one in engines]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(engines)) + "|"]
    for name, shown in table["features"]:
        lines.append(f"| {shown} | " + " | ".join(one[name]["state"] for one in engines) + " |")
    for one in engines:
        lines += ["", f"## {one['name']}", "", f"Tested with {one['versions']}.", ""]
        for name, shown in table["features"]:
            cell = one[name]
            said = f" ({cell['note']})" if "note" in cell else ""
            by = f": `{path_of(one, cell)}`" if "by" in cell else ""
            if cell["state"] != "none" or said:
                state = "there is none" if cell["state"] == "none" else cell["state"]
                lines.append(f"- {shown}: {state}{said}{by}")
    lines += ["", "## Programs written for Mooncake Store", ""]
    lines += ["Run unchanged over [`kvpool.engine_plugins.mooncake`](mooncake.md).", ""]
    for one in table["program"]:
        lines.append(
            f"- {one['name']} {one['versions']}: {one['state']} ({one['note']}): `{one['by']}`"
        )
    return "\n".join(lines)


def path_of(engine: dict[str, Any], cell: dict[str, Any]) -> str:
    """The test of a cell, from the repository's root."""
    by = str(cell["by"])
    return by if by.startswith("tests/") else f"{engine['folder']}/{by}"


def answers() -> str:
    """Return a table for each path: the requests that are compared, and how the router's answers differ."""
    sys.path.insert(0, str(ROOT))  # mkdocs does not look for modules here
    from tests.support.answer_cases import all_cases

    lines: list[str] = []
    path = ""
    for case in all_cases():
        here = f"{case.method} {case.path}"
        if here != path:
            path = here
            lines += ["", f"### `{path}`", "", "| request | the router's answer |", "|---|---|"]
        why = "; ".join(filter(None, dict.fromkeys(case.differs.values())))
        lines.append(f"| {case.name} | {f'differs: {why}' if why else 'the same'} |")
    return "\n".join(lines)


# ---- what mkdocs calls -------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "options": options,
    "statuses": statuses,
    "settings of the daemon": lambda: settings(DaemonConfig),
    "settings of the router": lambda: settings(RouterConfig),
    "metrics of the daemon": lambda: metrics_table(daemon_rows()),
    "metrics of the router": lambda: metrics_table(router_rows()),
    "python": python_api,
    "engines": engines,
    "answers": answers,
}


def filled(text: str) -> str:
    """Return a document with its made parts in place of their marks. A mark without a maker is a `KeyError`."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)


def on_post_build(config: Any) -> None:
    (Path(config.site_dir) / "kvpool.1").write_text(man_page())
