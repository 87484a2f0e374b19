"""Records requests that have ended as a trace for `kvpool sim`: lengths, times and which prompts begin alike.

A recording has no text, no tokens and no names but those of models. What stands for blocks, tenants, sessions and agents
are hashes with a secret that is made at the start and never written: ids of two recordings, or of a recording and the
pool, cannot be compared, and nobody can try out prompts on them.

A thread writes the lines. Requests never wait for it: what it does not manage, or the disk does not take, is counted
and dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

from kvpool.router.records.metrics import RECORD_OUTCOMES
from kvpool.simulator.recordings import TOKENS_MAX, RecordedRequest, line_of

log = logging.getLogger("kvpool.router")

SALT_BYTES = 32
ID_BYTES = 8
QUEUE_BYTES_MAX = 16 << 20
"""Of requests that wait to be written."""
LINE_BYTES = 1024
"""Of memory, for one that waits, beside its block keys."""
MODEL_CHARACTERS_MAX = 256
"""Of a model's name, which clients may choose if no engine has that model."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is recorded of a request, as the router knows it. Times are seconds by its clock, lengths tokens.

    keys: of the prompt's full blocks of `block_tokens`, less than 2**64. block_tokens: 0: it was not hashed.
    ttft_s: None: there was no first token, or its time is not known. cached: None: the engine did not say.
    session, agent, tenant: empty: it has none.
    """

    arrived_s: float
    ended_s: float
    outcome: str
    model: str
    tokens: int = 0
    output_tokens: int = 0
    keys: Sequence[int] = ()
    block_tokens: int = 0
    ttft_s: float | None = None
    cached: int | None = None
    priority: int = 0
    tenant: str = ""
    session: str = ""
    agent: str = ""


class LineFile(Protocol):
    """Where lines go: `RecordFile`. Its calls may wait for long."""

    def write(self, line: bytes) -> bool: ...
    def close(self) -> None: ...


class Ids:
    """Hashes with a secret, by blake2b."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._block = blake2b(key=salt, digest_size=ID_BYTES, person=b"block")
        self._tails = 0

    def block(self, key: bytes) -> int:
        """Of a full block."""
        hashed = self._block.copy()
        hashed.update(key)
        return int.from_bytes(hashed.digest()) >> 1

    def tail(self) -> int:
        """Of the end of a prompt that fills no block, which engines share with nobody: another one each time."""
        self._tails += 1
        hashed = blake2b(
            self._tails.to_bytes(8), key=self._salt, digest_size=ID_BYTES, person=b"tail"
        )
        return int.from_bytes(hashed.digest()) >> 1

    def name(self, kind: str, *names: str) -> str:
        """Of a tenant, a session or an agent; empty if its last name is."""
        if not names[-1]:
            return ""
        said = "\0".join(names).encode(errors="surrogatepass")
        return blake2b(said, key=self._salt, digest_size=ID_BYTES, person=kind.encode()).hexdigest()


class Recorder:
    """See the module. `add` and `counts` are for the event loop, `close` for any thread, once.

    block_tokens: that an id is to stand for, as near as the engines' blocks come to it from above. random: makes the
    secret, which is kept nowhere else. clock: as in `EndedRequest`; the recording begins now.
    """

    CLOSE_S = 2.0

    def __init__(
        self,
        file: LineFile,
        *,
        block_tokens: int,
        random: Callable[[int], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._file = file
        self._block_tokens = block_tokens
        self._began_s = clock()
        self._ids = Ids(random(SALT_BYTES))
        self._recording = random(ID_BYTES).hex()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        # Each is counted up by one side only, so that neither waits for the other.
        self._put_bytes = self._taken_bytes = 0
        self._late = 0
        self._written = self._failed = self._full = 0
        self._well = True
        self._thread = threading.Thread(target=self._run, name="kvpool-record", daemon=True)
        self._thread.start()

    def add(self, request: EndedRequest) -> None:
        """Have it written, unless too many wait for that. Never waits."""
        every = 1
        if request.block_tokens:
            every = -(-self._block_tokens // request.block_tokens)
        keys = array("Q", request.keys[every - 1 :: every])
        cost = LINE_BYTES + keys.itemsize * len(keys)
        if self._put_bytes - self._taken_bytes + cost > QUEUE_BYTES_MAX:
            self._late += 1
            return
        self._put_bytes += cost
        block_tokens = request.block_tokens * every
        request = replace(request, keys=(), model=_written(request.model))
        self._queue.put(_Waiting(request, keys, block_tokens, cost))

    def counts(self) -> dict[str, int]:
        """What became of the lines, since the start."""
        found = (self._written, self._late, self._failed, self._full)
        return dict(zip(RECORD_OUTCOMES, found, strict=True))

    def close(self) -> None:
        """Write what waits, for `CLOSE_S` at most."""
        self._queue.put(None)
        self._thread.join(self.CLOSE_S)
        if self._thread.is_alive():
            log.warning("the recording's last lines are not written: the disk is too slow")

    def _run(self) -> None:
        try:
            while (waiting := self._queue.get()) is not None:
                self._write(line_of(self._line(waiting)))
                self._taken_bytes += waiting.cost
        finally:
            self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            wrote = self._file.write(line)
        except OSError as error:
            self._failed += 1
            if self._well:
                log.warning("the recording cannot be written, its lines are dropped: %s", error)
            self._well = False
            return
        if wrote:
            self._written += 1
            if not self._well:
                log.warning("the recording is written again")
            self._well = True
            return
        if not self._full:
            log.warning("the recording is full, further lines are dropped")
        self._full += 1

    def _line(self, waiting: _Waiting) -> RecordedRequest:
        request, ids = waiting.request, self._ids
        hash_ids: list[int] = []
        if waiting.block_tokens:
            packed = waiting.keys.tobytes()
            width = waiting.keys.itemsize
            hash_ids = [ids.block(packed[at : at + width]) for at in range(0, len(packed), width)]
            if request.tokens > len(hash_ids) * waiting.block_tokens:
                hash_ids.append(ids.tail())
        tenant = ids.name("tenant", request.tenant)
        session = ids.name("session", request.tenant, request.session)
        return RecordedRequest(
            version=1,
            recording=self._recording,
            timestamp=_ms(request.arrived_s - self._began_s),
            input_length=_tokens(request.tokens),
            output_length=_tokens(request.output_tokens),
            hash_ids=tuple(hash_ids),
            block_tokens=waiting.block_tokens,
            model=request.model,
            outcome=request.outcome,
            duration_ms=_ms(request.ended_s - request.arrived_s),
            ttft_ms=None if request.ttft_s is None else _ms(request.ttft_s),
            cached_tokens=None if request.cached is None else _tokens(request.cached),
            priority=request.priority,
            tenant=tenant,
            session=session,
            agent=ids.name("agent", request.tenant, request.session, request.agent),
        )


@dataclass(frozen=True, slots=True)
class _Waiting:
    """keys: those that are recorded, each of `block_tokens`. cost: bytes that it takes in the queue."""

    request: EndedRequest
    keys: array[int]
    block_tokens: int
    cost: int


def _written(model: str) -> str:
    """As it can be written: JSON may name half of a character, and UTF-8 has none."""
    return model[:MODEL_CHARACTERS_MAX].encode(errors="replace").decode()


def _tokens(said: int) -> int:
    """Engines may say anything."""
    return min(max(said, 0), TOKENS_MAX)


def _ms(seconds: float) -> float:
    return max(0.0, round(seconds * 1e3, 3))
