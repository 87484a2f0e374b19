"""How often tests reach into private names of the product, and patch its code: no more often than now.

A test that asserts on what callers, users, peers or disks see stays right when the inside changes. What cannot be seen
from outside is reached at one place for all tests of a folder, and a limit that tests lower is an argument, or an
attribute of a class that tests derive their own from.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REACHES_MAX = 98
"""Reaches into private names of the product. The number may only fall."""
PATCHES_MAX = 57
"""Calls of `setattr` of pytest's monkeypatch on code of this repository. The number may only fall."""
OURS = ("kvpool", "bench")
"""Packages whose private names and patches count. The plugins and the tiers are imported as parts of `kvpool`."""
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of named tuples."""


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Source files of these folders, by their paths in the repository. Kept, they would slow down all collections."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_TUPLES


@cache
def private_names() -> frozenset[str]:
    """Private names that the product gives to modules, functions, classes, attributes and variables."""
    found: set[str] = set()
    for path, tree in trees("kvpool", "storage", "engine_plugins"):
        found.add(Path(path).stem)
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return frozenset(filter(is_private, found))


def imports(tree: ast.Module) -> dict[str, str]:
    """The module that each imported name comes from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                found[each.asname or each.name.partition(".")[0]] = each.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({each.asname or each.name: node.module for each in node.names})
    return found


def root_of(node: ast.expr) -> str:
    """The name that an expression begins with: `a` of `a.b().c[0]`; empty where it begins with none."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case _:
                return ""
    return node.id


def is_foreign(node: ast.expr, known: dict[str, str]) -> bool:
    """Whether an expression belongs to a module of somebody else, or of the tests. What a variable holds may be ours."""
    if isinstance(node, ast.Constant):
        return str(node.value).partition(".")[0] not in OURS
    module = known.get(root_of(node))
    return module is not None and module.partition(".")[0] not in OURS


def is_own(node: ast.expr) -> bool:
    """Whether an expression is the object whose method this is: a class of the tests may extend one of the product."""
    return isinstance(node, ast.Name | ast.Call) and root_of(node) in {"self", "cls", "super"}


def reaches(tree: ast.Module) -> Iterator[int]:
    """Lines with a private name of the product, of an object or from a module, once for each.

    A name that classes of the file have themselves does not count: it is theirs.
    """
    known = imports(tree)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    theirs = {node.attr for node in attributes if is_own(node.value)}
    for node in attributes:
        private = node.attr in private_names() and node.attr not in theirs
        if private and not is_own(node.value) and not is_foreign(node.value, known):
            yield node.lineno
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and (each.module or "").partition(".")[0] in OURS:
            yield from (each.lineno for one in each.names if is_private(one.name))


def patches(tree: ast.Module) -> Iterator[int]:
    """Lines with a call of `setattr` of monkeypatch on what is not foreign."""
    known = imports(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, *_]):
                if not is_foreign(target, known):
                    yield node.lineno


@cache
def counted() -> tuple[Counter[str], Counter[str]]:
    """How many reaches and patches there are, by file of the tests."""
    reached: Counter[str] = Counter()
    patched: Counter[str] = Counter()
    for path, tree in trees("tests"):
        reached[path] = len(list(reaches(tree)))
        patched[path] = len(list(patches(tree)))
    return reached, patched


def lines(find: Callable[[ast.Module], Iterator[int]], text: str) -> list[int]:
    return sorted(find(ast.parse(text)))


def test_reaches_into_private_names_do_not_grow() -> None:
    reached, _ = counted()
    assert reached.total() <= REACHES_MAX, (
        f"assert on what is seen from outside; now in: {reached.most_common(20)}"
    )


def test_patches_of_our_own_code_do_not_grow() -> None:
    _, patched = counted()
    assert patched.total() <= PATCHES_MAX, (
        f"pass an argument, or derive a class; now in: {patched.most_common(20)}"
    )


def test_what_a_reach_is() -> None:
    assert "_connections" in private_names()
    of_ours = "x._connections\nx.y()._connections.z\nf(x)[0]._connections = 1\n"
    assert lines(reaches, of_ours) == [1, 2, 3]
    assert lines(reaches, "from kvpool.client import _x, y, __version__") == [1]
    assert lines(reaches, "import os\nos._connections\nx._nobody_has_this\nx._replace(y=1)") == []
    own = "class A:\n    def f(self):\n        super()._connections()\n        other._connections\n"
    assert lines(reaches, own) == [], "it has that name itself"


def test_what_a_patch_is() -> None:
    text = (
        "import os\nfrom kvpool.wire import frame\n"
        "monkeypatch.setattr(os, 'open', f)\npatch.setattr(frame, 'LIMIT', 4)\n"
        "patch.setattr('kvpool.wire.frame.LIMIT', 4)\npatch.setattr('sys.stdin', f)\npatch.setattr(x.y, 'z', f)\n"
    )
    assert lines(patches, text) == [4, 5, 7]
