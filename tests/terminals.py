"""Somebody who types what a document says, on hosts that are folders of this machine.

Loaded by path: tests are collected so that they cannot import one another.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.waiting import PATIENCE_S

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


# Its own session, whose terminal is its standard input: so Ctrl-C reaches it, and only it.
ON_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program on a terminal of its own. `said` is all that it has written there so far, control sequences included.

    environ: its environment, COLUMNS and LINES included. The owner calls `end`, which waits for its end.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], folder: Path | None = None
    ) -> None:
        self.said = ""
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={"TERM": "xterm", "COLUMNS": "120", "LINES": "40", **environ},
            start_new_session=True,
        )
        os.close(theirs)

    def until(self, words: str) -> None:
        """Read until the words occur."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.said:
            assert self._read(deadline), f"it has not said {words!r}, but {self.said!r}"

    def _read(self, deadline: float) -> bool:
        readable, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._ours, 1 << 16) if readable else b""
        except OSError:
            data = b""  # nobody holds the other end any more
        self.said += data.decode(errors="replace")
        return bool(data)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Its exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._ours)


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

    def interrupt(self) -> None:
        """Ctrl-C, and wait for its end."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(STOP_S)

    def end(self) -> None:
        """SIGTERM to all of it, and SIGKILL for what is left."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)


@dataclass(frozen=True)
class Done:
    """A command that has ended. out: what it printed; all: with its errors, or as a terminal had it."""

    status: int
    out: str
    all: str


class Host:
    """A working directory with an empty home and an empty runtime folder in it, and the commands that are typed there.

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
        self.services: list[Service] = []
        self.home, self.runtime = folder / "home", folder / "run"
        for each in (self.home, self.runtime):
            each.mkdir(mode=0o700)
        ours = ("KVPOOL_", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._environ = {
            **kept,
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "PATH": f"{programs}:{os.environ['PATH']}",
            **environ,
        }

    @property
    def socket(self) -> str:
        """Of its daemon, at the default path."""
        return str(self.runtime / "kvpool" / "kvpool.sock")

    def here(self, text: str) -> str:
        """A text of the document as it has to be here: in one go, so that nothing is replaced twice."""

        def swap(match: re.Match[str]) -> str:
            self.swapped.add(match[0])
            return self.swaps[match[0]]

        names = sorted(self.swaps, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, names)), swap, text) if names else text

    def run(self, text: str, *, seconds: float = COMMAND_S) -> str:
        """Type a command and wait for its end; what it printed. Raises `AssertionError` when it fails."""
        done = self.type(text, seconds=seconds)
        assert done.status == 0, f"{self.here(text)}: ended with {done.status}: {done.all}"
        return done.out

    def type(self, text: str, *, seconds: float = COMMAND_S) -> Done:
        """Type a command and wait for its end, whatever that is. There is no terminal that it could ask."""
        done = subprocess.run(
            self._shell(text),
            cwd=self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Done(done.returncode, done.stdout, f"{done.stdout}{done.stderr}")

    def converse(self, text: str, *turns: tuple[str, str]) -> Done:
        """Type a command on a terminal and what it waits for: after these words, these keys."""
        terminal = Terminal(self._shell(text), self._environ, self.folder)
        try:
            for words, keys in turns:
                terminal.until(words)
                terminal.type(keys)
        finally:
            status = terminal.end()
        return Done(status, terminal.said, terminal.said)

    def _shell(self, text: str) -> list[str]:
        command = self.here(text)
        before = self._exports
        if command.startswith("export "):
            self._exports += command + "\n"
        return ["bash", "-c", f"set -o pipefail\n{before}{command}"]

    def start(self, text: str) -> Service:
        """Type a command that does not end, in a terminal of its own. Ends with `closing`."""
        log = self.folder / f"terminal-{len(self.services)}.log"
        command = self._exports + self.here(text).removesuffix("&")
        service = Service(command, self.folder, self._environ, log)
        self.services.append(service)
        return service

    def end(self) -> None:
        """End what was started last first."""
        for service in reversed(self.services):
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
