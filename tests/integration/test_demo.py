"""`kvpool demo`: what it shows, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.waiting import until

DEMO = (sys.executable, "-m", "kvpool.cli", "demo")
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 3, 2048, 33
ALL = DOCUMENTS * (DOCUMENT_TOKENS + QUESTION_TOKENS)
FOUND = DOCUMENTS * DOCUMENT_TOKENS
COMMAND_S = 120


@pytest.fixture
def environ(folder: Path) -> dict[str, str]:
    """With a folder of its own for what the demo makes, and settings that are not the demo's."""
    return os.environ | {"TMPDIR": str(folder), "KVPOOL_SOCKET": "/nowhere", "COLUMNS": "80"}


def test_blocks_of_one_engine_are_read_by_the_other(environ, folder):
    done = subprocess.run(
        [*DEMO, "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    counts = [(row["computed"], row["from_own_cache"], row["from_pool"]) for row in rounds]
    assert counts[0] == (ALL, 0, 0)
    assert counts[1] == (ALL - FOUND, 0, FOUND)
    assert counts[2] == (ALL - FOUND, FOUND, 0)
    assert counts[3] == (ALL - FOUND, FOUND, 0), "the router sends no prompt elsewhere"
    assert all(len(row["first_token_s"]) == DOCUMENTS for row in rounds)
    assert list(folder.iterdir()) == []


def test_its_last_lines_say_what_was_gained_and_what_was_simulated(environ):
    done = subprocess.run(
        DEMO, check=False, capture_output=True, text=True, timeout=COMMAND_S, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "times faster than computing" in done.stdout
    assert "only simulate computing" in done.stdout
    assert "docs/quickstart.md" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(environ, folder, number):
    with subprocess.Popen(
        DEMO,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        # Whoever runs the tests in the background has them ignore it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (C code)
    ) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith("asking"):
                break
        demo.send_signal(number)
        rest = demo.stderr.read()
        status = demo.wait(COMMAND_S)
    assert status == 128 + number, rest
    assert "Traceback" not in rest
    assert list(folder.iterdir()) == []
    until(lambda: not processes_of(folder), "its workers end with it")


def processes_of(folder: Path) -> str:
    command = ["pgrep", "-f", str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout
