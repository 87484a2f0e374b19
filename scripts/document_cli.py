"""Write what the code declares into documents: the help of the command line into `docs/cli.md` and the man page
`docs/man/kvpool.1`, the settings into `docs/config.md` and
`docs/router.md`.

    .venv/bin/python scripts/document_cli.py

Text outside of the marked parts of these documents is kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from kvpool.cli.base import EXIT_STATUSES
from kvpool.cli.verbs import app
from kvpool.config import DaemonConfig, settings_of
from kvpool.router.config import RouterConfig

if TYPE_CHECKING:
    import msgspec

DOCS = Path(__file__).resolve().parent.parent / "docs"
EXAMPLE = "Example: "
DECLARED: dict[str, type[msgspec.Struct]] = {"config.md": DaemonConfig, "router.md": RouterConfig}
COMMON = ("--socket", "--tenant", "--json")
"""Said once; of these in the words of most commands."""


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


# ---- docs/cli.md -----------------------------------------------------------------------------------


def reference(found: list[Verb]) -> str:
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
    rows = [f"| {status} | {meaning} |" for status, meaning in EXIT_STATUSES.items()]
    return "\n".join(["| exit status | |", "|---|---|", *rows])


def options(found: list[Verb]) -> str:
    return "\n".join(["| | |", "|---|---|", *map(_row, common(found).values())])


def _spaced(paragraphs: list[str]) -> list[str]:
    return [line for text in paragraphs for line in (text, "")]


def _row(option: Option) -> str:
    text = f"{option.help} Default: `{option.default}`" if option.default else option.help
    names, text = (each.replace("\n", " ").replace("|", r"\|") for each in (option.names, text))
    return f"| `{names}` | {text} |"


def document(text: str) -> str:
    """`docs/cli.md` as it is to be."""
    found = list(verbs())
    made = {"statuses": statuses(), "options": options(found), "verbs": reference(found)}
    return _filled(text, made)


def _filled(text: str, made: Mapping[str, str]) -> str:
    """A document with these parts between their marks."""
    for mark, part in made.items():
        place = re.compile(rf"(<!-- {mark} -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)
        escaped = part.replace("\\", "\\\\")
        text, count = place.subn(rf"\g<1>{escaped}\n\g<2>", text)
        assert count == 1, f"there is no place for {mark}"
    return text


# ---- docs/config.md --------------------------------------------------------------------------------


def configuration(text: str, struct: type[msgspec.Struct] = DaemonConfig) -> str:
    """`docs/config.md` as it is to be, or `docs/router.md`."""
    rows = [
        f"| `{each.name}` | {_plain_or_code(each.shown)} | {_cell(each.description)} |"
        for each in settings_of(struct).values()
    ]
    table = ["| setting | default | what |", "|---|---|---|", *rows]
    return _filled(text, {"settings": "\n".join(table)})


def _plain_or_code(default: str) -> str:
    """A value is code; words are not."""
    return default if default == "none" or re.search("[ `]", default) else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


# ---- the man page ----------------------------------------------------------------------------------


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


if __name__ == "__main__":
    path = DOCS / "cli.md"
    path.write_text(document(path.read_text()))
    (DOCS / "man" / "kvpool.1").write_text(man_page())
    for name, struct in DECLARED.items():
        path = DOCS / name
        path.write_text(configuration(path.read_text(), struct))
