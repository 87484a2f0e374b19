"""Write what the docstrings of the public modules say into `docs/python.md`.

    .venv/bin/python scripts/document_api.py

Text outside of the marked part is kept.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEHIND = {"kvpool.client": "kvpool.client.client"}
"""Modules whose texts say more of those that others import."""
MODULES = ("kvpool.client", "kvpool.types", "kvpool.errors", "kvpool.engine_plugins.mooncake")
PARAMETERS = re.compile(r"((?:[a-z_][a-z0-9_]*(?:, )?)+): (.*)")
WIDTH = 100


def document(text: str) -> str:
    """The document with its part made anew."""
    part = re.compile(r"(<!-- api -->\n).*?(\n<!-- end -->)", re.DOTALL)
    made = "\n\n".join(chunk for name in MODULES for chunk in module(importlib.import_module(name)))
    text, count = part.subn(lambda found: found[1] + made + found[2], text)
    assert count == 1, "docs/python.md has no place for the reference"
    return text


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


if __name__ == "__main__":
    path = DOCS / "python.md"
    path.write_text(document(path.read_text()))
