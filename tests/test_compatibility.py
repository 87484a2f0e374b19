"""The page of engines and features is made of its table, whose tests exist."""

import ast
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE: dict[str, Any] = tomllib.loads((ROOT / "docs" / "compatibility.toml").read_text())
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "reference.py"))
FEATURES = [name for name, _ in TABLE["features"]]
CELLS = [
    pytest.param(engine, engine.get(name, {}), id=f"{engine['name']}-{name}")
    for engine in TABLE["engine"]
    for name in FEATURES
]
CELLS += [pytest.param(program, program, id=program["name"]) for program in TABLE["program"]]


@pytest.mark.parametrize(("engine", "cell"), CELLS)
def test_what_is_said_to_be_tested_has_a_test(engine: dict[str, Any], cell: dict[str, Any]) -> None:
    assert cell.get("state") in {"tested", "parts", "refused", "unknown", "none"}
    if cell["state"] in {"unknown", "none"}:
        assert "by" not in cell
        return
    path, _, name = SCRIPT["path_of"](engine, cell).partition("::")
    assert (ROOT / path).is_file(), f"there is no {path}"
    found = {
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not name or name in found, f"{path} has no {name}"
    if cell["state"] == "tested":
        assert "/integration/" in path, "a real engine runs there"


def test_each_engine_says_something_of_each_feature_and_of_no_other():
    about = {"name", "versions", "page", "folder"}
    for engine in TABLE["engine"]:
        assert engine.keys() - about == set(FEATURES), engine["name"]
