"""The secrets of the encryption at rest: from a file, or from a command that asks a key service.

Both give lines as `cluster_secrets` describes them: the newest secret first, an older one with its end behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shlex
import signal
import time
from collections.abc import Awaitable, Callable

from kvpool.complaint import Complaint
from kvpool.errors import ConfigError
from kvpool.plain_text import plain
from kvpool.secret_files import SECRET_FILE_BYTES_MAX
from kvpool.security.cluster_secrets import ClusterSecret, parse_secrets, read_secrets
from kvpool.security.file_watch import Reloaded

FILE, COMMAND = "encryption_secret_file", "encryption_secret_command"
ASK_S = 300.0  # between two runs of it
LOOK_S = 1.0
SETTLE_S = 3600.0
"""A new secret does not encrypt before it is so old: other nodes that read the same objects get it meanwhile."""
ERROR_CHARACTERS_MAX = 200

log = logging.getLogger("kvpool.daemon")


class EncryptionSecrets:
    """The secrets of one daemon; of none if neither a file nor a command is given. Event loop only.

    clock: monotonic. now: the machine's.
    """

    COMMAND_S = 30.0
    """For the command to end."""

    def __init__(
        self,
        file: str = "",
        command: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._file = file
        self._command = command
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._known: tuple[ClusterSecret, ...] = ()
        self._since = -math.inf  # how long it has known the first one, by the machine's clock
        self._files: Reloaded[tuple[ClusterSecret, ...]] | None = None
        self._asked_at = -math.inf
        self._complaint = Complaint(log, "the previous encryption secrets stay in use")

    async def open(self) -> None:
        """Read them for the first time. Raises `ConfigError`, which shows none of them."""
        if self._file:
            self._files = Reloaded(
                [self._file],
                lambda: read_secrets(self._file, FILE),
                "encryption secrets",
                log,
                self._clock,
            )
            self._take(self._files.current())
        elif self._command:
            self._take(await self._ask())

    def current(self) -> list[bytes]:
        """Those in use, the one that encrypts first. Empty: nothing is encrypted."""
        now = self._now()
        found = [each.secret for each in self._known if now < each.until]
        if len(found) > 1 and now - self._since < SETTLE_S:
            found[:2] = found[1], found[0]
        return found

    def _take(self, secrets: tuple[ClusterSecret, ...]) -> None:
        if secrets == self._known:
            return
        self._known = secrets
        self._since = self._now()
        if self._file:
            with contextlib.suppress(OSError):  # it was read a moment ago
                self._since = os.stat(self._file).st_mtime

    async def follow(self, changed: Callable[[], object]) -> None:
        """Keep them as the file or the command has them. changed: called when `current` gives others."""
        before = self.current()
        while before:
            await self._sleep(LOOK_S)
            if self._files is not None:
                self._take(self._files.current())
            elif self._clock() - self._asked_at >= ASK_S:
                await self._ask_again()
            if (now := self.current()) != before:
                before = now
                changed()

    async def _ask_again(self) -> None:
        try:
            self._take(await self._ask())
            self._complaint.worked()
        except ConfigError as error:
            self._complaint.failed(str(error), error)

    async def _ask(self) -> tuple[ClusterSecret, ...]:
        self._asked_at = self._clock()  # a failure is not repeated sooner
        output = await _run(self._command, self.COMMAND_S)
        return parse_secrets(output, "its output", COMMAND)


async def _run(command: str, within_s: float) -> str:
    """What a command prints. Raises `ConfigError`; it is killed if it does not end, or prints too much."""
    try:
        words = shlex.split(command)
        if not words:
            raise ValueError("it is empty")
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{COMMAND}: cannot be run: {error}") from None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(within_s):
            output, complaint = await asyncio.gather(
                _read(process.stdout), _read_end(process.stderr)
            )
            status = await process.wait()
    except TimeoutError:
        raise ConfigError(f"{COMMAND}: did not end within {within_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            await process.wait()
    if status:
        said = plain(complaint.decode(errors="replace").strip())[-ERROR_CHARACTERS_MAX:]
        raise ConfigError(f"{COMMAND}: exit status {status}: {said}")
    try:
        return output.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{COMMAND}: its output is not UTF-8 text") from None


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    """The last of it."""
    data = b""
    while some := await stream.read(SECRET_FILE_BYTES_MAX):
        data = (data + some)[-SECRET_FILE_BYTES_MAX:]
    return data


async def _read(stream: asyncio.StreamReader) -> bytes:
    data = b""
    while some := await stream.read(SECRET_FILE_BYTES_MAX + 1 - len(data)):
        data += some
        if len(data) > SECRET_FILE_BYTES_MAX:
            raise ConfigError(f"{COMMAND}: printed more than {SECRET_FILE_BYTES_MAX} bytes")
    return data
