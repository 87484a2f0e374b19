"""What all tests share."""

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
VLLM_TESTS = Path(__file__).parent / "integration" / "vllm"
HAS_VLLM = importlib.util.find_spec("vllm") is not None

# What is printed into a pipe depends on it, and pytest-xdist sets it.
os.environ.pop("COLUMNS", None)

# Daemons make a secret for their peers on this machine there.
STATE_HOME = tempfile.TemporaryDirectory(prefix="kvpool-tests-")
os.environ["XDG_STATE_HOME"] = STATE_HOME.name

# How long an example takes, and its making, says how busy the machine is.
settings.register_profile("kvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvpool")

preloaded.install()

# They import vLLM at their top; `make test` runs them where it is.
collect_ignore = [] if HAS_VLLM else [str(VLLM_TESTS)]


def pytest_report_header() -> str | None:
    return None if HAS_VLLM else "vLLM's tests are left out: they run in .venv-vllm (make test)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(VLLM_TESTS):
            item.add_marker("vllm")


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
