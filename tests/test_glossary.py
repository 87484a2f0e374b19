"""Names in the code against those that `docs/glossary.md` lists as gone: they do not come back.

Names are found in the source: modules, public classes and functions, wire messages, metrics, commands and REST paths.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from kvpool.cli import verbs
from kvpool.router.records.metrics import Metrics
from kvpool.telemetry.metrics import families
from kvpool.telemetry.node_stats import NodeStats

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
PACKAGE = ROOT / "kvpool"
GENERATED = {"rpc_pb2"}  # as protoc names it
# A gone name that still means something else. The glossary says which meaning is gone, in parentheses.
OTHER_MEANINGS = {
    "known": "what somebody knows",
    "remote": "an address at the other end of a connection",
    "life": "the time for which a token or a certificate is valid",
    "ahead": "work that comes before something in a queue, or time before it is due",
}

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
PATH = re.compile(r"(/(\{[^}/]*\}|[a-z][a-z0-9._:-]*))+/?|/v1/.*")


def words_of(name: str) -> list[str]:
    return [word.lower() for word in WORD.findall(name) if not word.isdigit()]


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", GLOSSARY, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/glossary.md has no section {title!r}"
    return found[1]


def rows(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            left, right = line.strip("|").split("|", 1)
            yield left.strip(), right.strip()


@cache
def gone() -> dict[str, str]:
    """Words that may name nothing any more, each with the name that took its place."""
    found = {}
    for old, new in rows(section("Names that are gone")):
        for name in re.sub(r"\([^)]*\)", "", old).split(","):
            if (name := name.strip()) != "old":
                found["_".join(words_of(name))] = new
    return {name: new for name, new in found.items() if name not in OTHER_MEANINGS}


def has_gone(name: str) -> str | None:
    """The gone name in this one. Only the singular and plural as the glossary writes them."""
    text = f"_{'_'.join(words_of(name))}_"
    return next((old for old in gone() if f"_{old}_" in text), None)


# ---- the names in the code ---------------------------------------------------------------------------------


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.stem not in GENERATED)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> set[str]:
    names = {part for path in sources() for part in path.relative_to(PACKAGE).with_suffix("").parts}
    return {name for name in names if not name.startswith("__")}


def public_names() -> Iterator[tuple[str, str]]:
    """Public classes, and public functions and methods, with where they are."""
    for path in sources():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_"):
                yield node.name, f"{path.relative_to(ROOT)}:{node.lineno}"


def wire_messages() -> set[str]:
    found = {
        node.name
        for path in (PACKAGE / "wire").rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    assert len(found) > 50, "this looks in the wrong place for wire messages"
    return found


def metric_names() -> set[str]:
    names = set(families(NodeStats))
    of_router = [one for one in vars(Metrics()).values() if hasattr(one, "_labelnames")]
    return names | {family.name for one in of_router for family in one.describe()}


def commands() -> set[str]:
    found: set[str] = set()
    groups = [typer.main.get_command(verbs.app)]
    while groups:
        for name, command in getattr(groups.pop(), "commands", {}).items():
            found.add(name)
            groups.append(command)
    assert len(found) > 20, "this looks in the wrong place for commands"
    return found


def rest_nouns() -> set[str]:
    """Words of the paths that gateway and router serve."""
    texts = {
        node.value
        for package in ("admin", "router")
        for path in (PACKAGE / package).rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    paths = (re.sub(r"\{[^}]*\}", "", text) for text in texts if PATH.fullmatch(text))
    found = {part for path in paths for part in path.split("/")} - {"", "v1", "v2"}
    assert {"nodes", "namespaces", "engines", "metrics"} <= found
    return found


KINDS = {
    "module": modules,
    "wire message": wire_messages,
    "metric": metric_names,
    "command": commands,
    "REST path": rest_nouns,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_is_gone(kind: str) -> None:
    back = {name: has_gone(name) for name in KINDS[kind]()}
    back = {name: old for name, old in back.items() if old}
    assert not back, f"name of a {kind} that is gone: {back}; docs/glossary.md has what it is now"


def test_no_public_class_or_function_has_a_name_that_is_gone() -> None:
    back = [f"{where} {name}: {old}" for name, where in public_names() if (old := has_gone(name))]
    assert not back, "\n".join(back)


def test_a_gone_name_with_another_meaning_is_in_the_glossary() -> None:
    assert all(old in GLOSSARY for old in OTHER_MEANINGS)
