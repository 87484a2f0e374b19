"""`kvpool router` as a process: how it begins, says what is wrong, and ends."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.waiting import PATIENCE_S

COMMAND = [sys.executable, "-m", "kvpool.cli", "router", "--no-daemon"]


@contextmanager
def started(*flags: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*COMMAND, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVPOOL_ROUTER_TOKEN": ""},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_serves_without_an_engine_and_ends_when_it_is_told() -> None:
    with started("--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(
            r"kvpool \S+ ready: router at (http://127\.0\.0\.1:\d+), 0 engines\n", line
        )
        assert ready
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{ready[1]}/health", timeout=PATIENCE_S)
        assert caught.value.code == 503 and b"no decode engine" in caught.value.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--listen", "0.0.0.0:0"), "KVPOOL_ROUTER_TOKEN"),
        (("--engine", "ftp://a"), "ftp://a"),
    ],
)
def test_what_is_wrong_is_one_line(flags: tuple[str, ...], word: str) -> None:
    with started(*flags) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.startswith("kvpool: ") and errors.count("\n") == 1 and word in errors


def test_a_port_that_is_taken_is_named() -> None:
    with started("--listen", "127.0.0.1:0") as first:
        assert first.stdout is not None
        port = first.stdout.readline().split("127.0.0.1:")[1].split(",")[0]
        with started("--listen", f"127.0.0.1:{port}") as second:
            _, errors = second.communicate(timeout=PATIENCE_S)
            assert second.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in errors
