"""Somebody who types what a document says, on hosts that are folders of this machine.

Loaded by path: tests are collected so that they cannot import one another.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

COMMAND_S = 60.0
STOP_S = 60.0
PAUSE_S = 0.02

SSH = """
import pathlib, subprocess, sys
host, *words = sys.argv[1:]
raise SystemExit(subprocess.run(words, cwd=pathlib.Path.cwd().parent / host).returncode)
"""
SCP = """
import pathlib, shutil, sys
*files, target = sys.argv[1:]
host, _, path = target.partition(":")
for file in files:
    shutil.copy2(file, pathlib.Path.cwd().parent / host / path)
"""


def make_programs(folder: Path, programs: Mapping[str, str]) -> Path:
    """A folder for PATH with `kvpool` and `python3` of this environment, and what else is given: Python code, or the
    path of a program."""
    folder.mkdir()
    programs = {"kvpool": "from kvpool.cli import main\n\nmain()\n", **programs}
    for name, what in programs.items():
        if "\n" not in what:
            (folder / name).symlink_to(what)
            continue
        (folder / name).write_text(f"#!{sys.executable}\n{what}")
        (folder / name).chmod(0o755)
    # Not a link: an environment is found by the path of its interpreter.
    (folder / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (folder / "python3").chmod(0o755)
    return folder


class Service:
    """What does not end by itself, in a session of its own. Its output is in `log`."""

    def __init__(self, command: str, folder: Path, environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._what = command.splitlines()[-1]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, ready: Callable[[], Any], seconds: float) -> Self:
        """Until it is ready. Raises `AssertionError` with what it said when it ends first, or takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            ended = self.process.poll()
            assert ended is None, f"{self._what}: ended with {ended}: {self.said[-2000:]}"
            late = time.monotonic() > deadline
            assert not late, f"{self._what}: not ready in {seconds} s: {self.said[-2000:]}"
            time.sleep(PAUSE_S)
        return self

    def wait_said(self, what: str, seconds: float) -> Self:
        """Until it has said that."""
        return self.wait_until(lambda: what in self.said, seconds)

    def end(self) -> None:
        """SIGTERM to all of it, and SIGKILL for what is left."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)


class Host:
    """A folder that is home, runtime folder and working directory, and the commands that are typed there.

    swaps: what stands for what in the document's commands, such as a port that is free for its well-known one.
    What is exported holds for later commands too, as in one terminal.
    """

    def __init__(
        self, folder: Path, programs: Path, swaps: Mapping[str, str], environ: Mapping[str, str]
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.swaps = dict(swaps)
        self.swapped: set[str] = set()
        self._exports = ""
        self._services: list[Service] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
        self._environ = {
            **kept,
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "PATH": f"{programs}:{os.environ['PATH']}",
            **environ,
        }

    @property
    def socket(self) -> str:
        """Of its daemon, at the default path."""
        return str(self.folder / "kvpool" / "kvpool.sock")

    def here(self, text: str) -> str:
        """A text of the document as it has to be here: in one go, so that nothing is replaced twice."""

        def swap(match: re.Match[str]) -> str:
            self.swapped.add(match[0])
            return self.swaps[match[0]]

        names = sorted(self.swaps, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, names)), swap, text) if names else text

    def run(self, text: str, *, seconds: float = COMMAND_S) -> str:
        """Type a command and wait for its end; what it printed. Raises `AssertionError` when it fails."""
        command = self.here(text)
        if command.startswith("export "):
            self._exports += command + "\n"
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail\n{self._exports}{command}"],
            cwd=self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        said = f"{done.stdout}{done.stderr}"
        assert done.returncode == 0, f"{command}: ended with {done.returncode}: {said}"
        return done.stdout

    def start(self, text: str) -> Service:
        """Type a command that does not end, in a terminal of its own. Ends with `closing`."""
        log = self.folder / f"terminal-{len(self._services)}.log"
        command = self._exports + self.here(text).removesuffix("&")
        service = Service(command, self.folder, self._environ, log)
        self._services.append(service)
        return service

    def end(self) -> None:
        """End what was started last first."""
        for service in reversed(self._services):
            service.end()


@contextlib.contextmanager
def closing(*hosts: Host) -> Iterator[None]:
    try:
        yield
    finally:
        for host in reversed(hosts):
            host.end()


def listens(port: int) -> Callable[[], bool]:
    """Whether somebody takes connections at a port of loopback."""

    def look() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return look


def answers(url: str) -> Callable[[], bool]:
    """Whether a server answers a GET well."""

    def look() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=STOP_S):
                return True
        except OSError:  # an answer that is not well is one of these, too
            return False

    return look
