"""Transport over NIXL: peers read each other's segments directly, by RDMA if there is a device for it.

`nixl://HOST:PORT` is a TCP address, for control: peers authenticate there as over `tcp://`, send
requests, and get loans; only the bytes take another path.

    reader                              owner
    Fetch(keys)              ->
                             <-        Readable(present, checksums, addresses)
    Describe()               ->                                    (if its memory is not known yet)
                             <-        Bytes(metadata)
    reads, verifies
    Taken(), or the end of the connection

The key to a node's memory, the agent's metadata, is thus sent only to authenticated peers, and is never
in a record that others can read. A reader that reads too late gets another block's bytes, or half a block's,
which the checksums detect.

The owner's loan ends with the connection or its deadline. The reader's rows are the harder half: NIXL can
cancel a read, but bytes still arrive afterwards (seen with a peer that was stopped and continued). So a read that
was begun and did not end well ends the process (`leave`): the only proof that nothing writes to the
rows any more. It is a process for this transport alone, and control repeats its unfinished pulls over TCP.
"""

from __future__ import annotations

import os
import queue
import sys
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
from xxhash import xxh3_128_digest

from kvpool.errors import KvpoolError, ProtocolError, Unavailable
from kvpool.net import host_and_port
from kvpool.transfer.addresses import is_loopback, resolve
from kvpool.transfer.base import (
    REFUSALS,
    Deadline,
    Identity,
    Outcome,
    Run,
    Source,
    Stop,
    TransferLimits,
    check_loan,
    check_order,
    cut,
)
from kvpool.transfer.memory import Memory
from kvpool.transfer.nixl_agent import Agent, Pieces, Read
from kvpool.transfer.priority import Priority
from kvpool.transfer.requester import exchange, fetch_message
from kvpool.transfer.responder import Conversation
from kvpool.transfer.stream import Stream
from kvpool.transfer.tcp import TcpTransport
from kvpool.types import CHECKSUM_BYTES, KEY_BYTES, BlockStatus, split_keys
from kvpool.wire.frame import HELLO_BYTES_MAX, Bytes, Done
from kvpool.wire.peer import Corrupt, Describe, Fetch, Readable, Taken, decode_peer
from kvpool.wire.worker import AskPeer, OpenLoan, PullBlocks, Pulled

GROUP_BYTES = 2 << 20  # read at once, then verified while the next ones are read
GROUP_PIECES = 1024
GROUPS_MAX = 8  # of one pull under way
PARTS_AT_ONCE = 4  # of one pull
DRAIN_S = 1.0  # for reads under way when a pull must end
STRIDE_MAX = 1 << 40
EXIT_STATUS = 70


def leave(reason: str) -> None:
    """End this process, because memory that is about to be reused may still be written to."""
    sys.stderr.write(f"kvpool: this process ends: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


class NixlTransport:
    """See `Transport`, and the module. A pull runs in the calling thread.

    leave: called with the reason when a read was begun and is not known to have ended. It does not return,
    except in tests.
    """

    def __init__(
        self,
        memory: Memory,
        source: Source,
        identity: Identity,
        limits: TransferLimits,
        leave: Callable[[str], None] = leave,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._leave = leave
        self._agent = Agent(f"{identity.node}/{identity.incarnation}", memory)
        converse = partial(_Conversation, agent=self._agent)
        self._control = TcpTransport(memory, source, identity, limits, converse)

    def listen(self, url: str) -> str:
        self._start(url)
        return "nixl" + self._control.listen(url).removeprefix("tcp")

    def _start(self, url: str) -> None:
        host, port = host_and_port(url)
        addresses = resolve(host, port, Deadline(self._limits.connect_s))
        self._agent.start(loopback=all(map(is_loopback, addresses)))

    def pull(self, order: PullBlocks, stop: Stop) -> Pulled:
        outcome = Outcome(check_order(order, self._memory))
        deadline = Deadline(order.deadline_s)
        try:
            if outcome.status:
                self._start(order.url)
            error = self._fetch_all(order, outcome, deadline, stop)
        except KvpoolError as failure:
            error = failure
        # A refusal may be for lack of NIXL at the other end: TCP shows.
        return outcome.finish(error, REFUSALS)

    def _fetch_all(
        self, order: PullBlocks, outcome: Outcome, deadline: Deadline, stop: Stop
    ) -> KvpoolError | None:
        """Parts side by side, since an owner is asked for one at a time. Returns when all threads have finished with
        the rows: what went wrong first.
        """
        left = deque(run for runs in cut(order, self._limits.fetch_bytes_max) for run in runs)
        errors: list[KvpoolError] = []

        def work() -> None:
            while left and not errors:
                try:
                    run = left.popleft()
                except IndexError:
                    return  # another thread has taken the last one
                try:
                    self._fetch(order, run, outcome, deadline, stop)
                except KvpoolError as error:
                    errors.append(error)

        wanted = 0 if order.background else min(len(left), PARTS_AT_ONCE) - 1
        with self._control.helpers.helping(work, wanted):
            work()
        return errors[0] if errors else None

    def _fetch(
        self,
        order: PullBlocks,
        run: Run,
        outcome: Outcome,
        deadline: Deadline,
        stop: Stop,
    ) -> None:
        def talk(stream: Stream) -> None:
            _Fetch(self._agent, self._memory, self._control.precedence, self._leave).run(
                stream, order, run, outcome, stop
            )

        if order.background:
            self._control.talk(order.url, deadline, stop, talk)
            return
        with self._control.precedence.urgent():
            self._control.talk(order.url, deadline, stop, talk)

    def ask(self, order: AskPeer, stop: Stop) -> Done | Bytes:
        return self._control.ask(order, stop)

    def close(self) -> None:
        self._control.close()
        self._agent.close()


@dataclass(eq=False)
class _Conversation(Conversation):
    """The owner's half: blocks are on loan, and stay in place until they have been read."""

    agent: Agent

    def _lend_and_send(self, request: int, fetch: Fetch) -> None:
        if len(fetch.parts) != 1:
            raise ProtocolError("blocks of several parts are not read over NIXL at a time")
        stream, agent = self._stream, self.agent
        deadline = stream.deadline
        token = ""
        try:
            try:
                wanted = OpenLoan(
                    fetch.tenant,
                    fetch.digest,
                    fetch.parts,
                    deadline.left(),
                    fetch.trace,
                )
                lent = self._source.open_loan(wanted)
                token = lent.token
                present, (found,) = check_loan(lent, wanted, self._memory)
                base = agent.place(lent.segment, deadline) if found.rows else 0
                where = Readable(
                    present,
                    lent.checksums,
                    found.rows,
                    base,
                    found.stride,
                    agent.name,
                    agent.version,
                )
            except KvpoolError as error:
                self._decline(request, error)
                return
            with agent.serving():
                stream.send(where, request)
                self._wait_until_taken()
        finally:
            if token:
                self._source.give_back(token)

    def _wait_until_taken(self) -> None:
        while True:
            request, payload = self._stream.receive(HELLO_BYTES_MAX)
            message = decode_peer(payload)
            if isinstance(message, Taken):
                return
            if not isinstance(message, Describe):
                raise ProtocolError(
                    f"a {type(message).__name__} arrived while blocks are being read"
                )
            metadata = self.agent.describe(self._stream.deadline)
            self._stream.send(Bytes(metadata), request)


class _Fetch:
    """The reader's half, for the blocks of one `Fetch`."""

    def __init__(
        self, agent: Agent, memory: Memory, precedence: Priority, leave: Callable[[str], None]
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._precedence = precedence
        self._leave = leave
        self._ended: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._under_way = 0

    def run(
        self,
        stream: Stream,
        order: PullBlocks,
        run: Run,
        outcome: Outcome,
        stop: Stop,
    ) -> None:
        """As `requester.fetch`. When it ends, however it does, no read of it is under way."""
        part, keys, first = run.part, run.keys, run.at
        answer = exchange(stream, fetch_message(order, [run], stream.deadline), first + 1, Readable)
        indices = check_readable(answer, run.end - run.first, part.nbytes)
        outcome.begin(first, answer.present)
        wrong: list[bytes] = []
        if indices:
            where = answer.base + array("I", answer.rows)[0] * answer.stride
            self._meet(stream, answer, where)
            base = self._agent.place(order.segment, stream.deadline)
            expected = split_keys(answer.checksums)
            rows = array("I", run.rows)
            into = array("I", [rows[index] for index in indices])
            local = _pieces(base, part.stride, into, part.nbytes)
            remote = _pieces(answer.base, answer.stride, array("I", answer.rows), part.nbytes)
            reads = self._read(
                stream, answer.agent, local, remote, part.nbytes, stop, background=order.background
            )
            # Closed at once, whatever happens: after that no read is under way.
            with closing(reads) as groups:
                for low, high in groups:
                    blocks = self._memory.blocks(
                        order.segment, part.stride, part.nbytes, into[low:high].tobytes()
                    )
                    for at, digest in enumerate(map(xxh3_128_digest, blocks), low):
                        index = indices[at]
                        if digest == expected[at]:
                            outcome.arrived(first + index, digest)
                        else:
                            outcome.status[first + index] = BlockStatus.MISMATCH
                            wrong.append(keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])
        stream.send(Taken(), 0)
        if wrong:
            stream.send(Corrupt(order.tenant, order.digest, part.part, b"".join(wrong)), 0)

    def _meet(self, stream: Stream, answer: Readable, address: int) -> None:
        """Get the peer's current memory description."""
        peer, version = answer.agent, answer.version
        if self._agent.knows(peer, version):
            return
        metadata = exchange(stream, Describe(), 1, Bytes).data
        self._agent.meet(peer, version, metadata, address, stream.deadline)

    def _read(
        self,
        stream: Stream,
        peer: str,
        local: Pieces,
        remote: Pieces,
        nbytes: int,
        stop: Stop,
        *,
        background: bool,
    ) -> Generator[tuple[int, int], None, None]:
        """Read all, a few groups at a time; yields each group (first, end) that has arrived."""
        groups = deque(_groups(len(local), nbytes))
        bounds = list(groups)
        left = len(groups)

        def interrupt() -> None:
            self._ended.put(None)

        stop.register(interrupt)
        try:
            while left:
                while groups and self._under_way < GROUPS_MAX:
                    if background:
                        self._precedence.give_way(stream.deadline.left())
                    low, high = groups.popleft()
                    number = len(bounds) - len(groups) - 1
                    read = Read(number, peer, local[low:high], remote[low:high], self._ended.put)
                    self._agent.read(read)
                    self._under_way += 1
                done = self._next(stream.deadline)
                left -= 1
                yield bounds[done.number]
        finally:
            stop.unregister(interrupt)
            self._drain()

    def _next(self, deadline: Deadline) -> Read:
        """Returns one that has ended successfully."""
        try:
            read = self._ended.get(timeout=deadline.left())
        except queue.Empty:
            raise Unavailable(f"the peer did not read within {deadline.seconds:g} s") from None
        if read is None:
            raise Unavailable("the transfer was cancelled")
        self._under_way -= 1
        self._check(read)
        return read

    def _check(self, read: Read) -> None:
        if read.error:
            if read.started:
                self._leave(read.error)
            raise Unavailable(read.error)

    def _drain(self) -> None:
        """Wait for reads under way; they are not wanted any more, but still write to the rows."""
        patience = Deadline(DRAIN_S)
        while self._under_way:
            try:
                read = self._ended.get(timeout=patience.left())
            except (queue.Empty, Unavailable):
                self._leave(f"{self._under_way} reads from a peer do not end")
                return
            if read is not None:
                self._under_way -= 1
                if read.error and read.started:
                    self._leave(read.error)


def check_readable(answer: Readable, count: int, nbytes: int) -> list[int]:
    """Indices of the blocks that can be read. Raises `ProtocolError` for an answer that does not match."""
    indices = [index for index, there in enumerate(answer.present) if there]
    if len(answer.present) != count or answer.present.count(1) != len(indices):
        raise ProtocolError("a Readable must match its Fetch: one byte per key, 0 or 1")
    if len(answer.checksums) != CHECKSUM_BYTES * len(indices) or len(answer.rows) != 4 * len(
        indices
    ):
        raise ProtocolError("a Readable must have a checksum and a row for each block")
    last = max(array("I", answer.rows), default=0)
    if indices and not (
        0 < answer.base < 1 << 62
        and nbytes <= answer.stride <= STRIDE_MAX
        and (last + 1) * answer.stride < 1 << 62
    ):
        raise ProtocolError(
            f"a Readable has blocks at {answer.base:#x}, {answer.stride} bytes apart"
        )
    return indices


def _pieces(base: int, stride: int, rows: array[int], nbytes: int) -> Pieces:
    """Addresses of the blocks, in NIXL's form."""
    pieces = np.zeros((len(rows), 3), dtype=np.uint64)
    numbers = np.frombuffer(rows, dtype=np.uint32).astype(np.uint64)
    pieces[:, 0] = numbers * np.uint64(stride) + np.uint64(base)
    pieces[:, 1] = nbytes
    return pieces


def _groups(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, min(GROUP_PIECES, GROUP_BYTES // nbytes))
    for low in range(0, count, step):
        yield low, min(low + step, count)
