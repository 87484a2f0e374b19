"""What all tests share."""

import gc
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvpool.telemetry import logs
from tests import preloaded

REPO_ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("vllm", "lmcache", "sglang")
"""Each with tests of its own, in tests/integration/NAME, that import it at their top and run in .venv-NAME."""
ABSENT = [name for name in ENGINES if importlib.util.find_spec(name) is None]

# What is printed into a pipe depends on it, and pytest-xdist sets it.
os.environ.pop("COLUMNS", None)

# Each of the thousands of processes that import numpy would have a thread for each core, which spin for 0.1 s.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Daemons make a secret for their peers on this machine there.
STATE_HOME = tempfile.TemporaryDirectory(prefix="kvpool-tests-")
os.environ["XDG_STATE_HOME"] = STATE_HOME.name

# How long an example takes, and its making, says how busy the machine is.
settings.register_profile("kvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvpool")

preloaded.install()

gc.disable()  # until the tests are there: see `pytest_collection_finish`


ENGINE_TESTS = {name: Path(__file__).parent / "integration" / name for name in ENGINES}

collect_ignore = [str(ENGINE_TESTS[name]) for name in ABSENT]


def pytest_report_header() -> list[str]:
    return [
        f"tests of {name} are left out: they run in .venv-{name} (make test)" for name in ABSENT
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, folder in ENGINE_TESTS.items():
            if folder in item.path.parents:
                item.add_marker(name)


def pytest_collection_finish() -> None:
    """What the tests are made of is no garbage: a million objects, which each later collection would look at."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test sets up for logging ends with it."""
    root, ours = logging.getLogger(), logging.getLogger(logs.OURS)
    levels = root.level, ours.level
    yield
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, logs.LineFormatter):
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return REPO_ROOT


@pytest.fixture(scope="session")
def trace_path() -> Path:
    """The conversation trace: one JSON object a request, named by KVPOOL_TRACE."""
    path = os.environ.get("KVPOOL_TRACE")
    if not path:
        pytest.skip("KVPOOL_TRACE does not name a trace")
    return Path(path)
