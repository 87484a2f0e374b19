"""Which module `import mooncake.store` gives, in processes of their own: it is for a process's whole life."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = "from mooncake import store; import mooncake.store; print(store.__name__, mooncake.store is store)"
FACADE = "kvpool.engine_plugins.mooncake.facade True"


def said(code: str, folder: Path, **variables: str) -> str:
    """By a process that finds modules in the folder too. The last line, if it fails."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]).strip()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package as the wheel's, whose own first lines import its store."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("import mooncake.store\n")
    (tmp_path / "mooncake" / "store.py").write_text("")
    (tmp_path / "mooncake" / "engine.py").write_text("NAME = 'the real engine'\n")
    return tmp_path


def test_without_the_wheel_the_store_is_all_there_is(tmp_path):
    install = "from kvpool.engine_plugins.mooncake import install; install(); install(); "
    assert said(install + SHOW, tmp_path) == FACADE
    assert "ModuleNotFoundError" in said(install + "import mooncake.engine", tmp_path)


def test_the_rest_of_the_wheel_goes_on_working(wheel):
    install = "from kvpool.engine_plugins.mooncake import install; install(); "
    assert said(install + SHOW, wheel) == FACADE
    engine = "from mooncake import engine; print(engine.NAME)"
    assert said(install + engine, wheel) == "the real engine"


def test_a_store_that_is_in_use_is_not_replaced(wheel):
    code = "import mooncake.store; from kvpool.engine_plugins.mooncake import install; install()"
    assert said(code, wheel).startswith("RuntimeError: mooncake.store was imported before")


def test_plugins_install_it_only_where_that_was_asked_for(wheel):
    code = (
        "from kvpool.engine_plugins.mooncake import install_if_asked; install_if_asked(); " + SHOW
    )
    assert said(code, wheel) == "mooncake.store True"
    assert said(code, wheel, KVPOOL_MOONCAKE="0") == "mooncake.store True"
    assert said(code, wheel, KVPOOL_MOONCAKE="1") == FACADE
