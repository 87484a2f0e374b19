"""Transport within one process, with the same contract as the others: for tests and simulations.

Bytes are copied in memory. Addresses are `inproc://NAME`, known to the whole process.
"""

from __future__ import annotations

import os
import select
import threading

from xxhash import xxh3_128_digest

from kvpool.errors import ConfigError, KvpoolError, LimitExceeded, NotAuthenticated, Unavailable
from kvpool.transfer.base import (
    Deadline,
    Identity,
    Outcome,
    Owed,
    Run,
    Source,
    Stop,
    TransferLimits,
    check_loan,
    check_order,
    check_secrets,
    cut,
)
from kvpool.transfer.memory import Memory
from kvpool.types import BlockStatus, split_keys
from kvpool.wire.frame import Bytes, Done
from kvpool.wire.peer import Corrupt, LongQuestion, PartKeys
from kvpool.wire.worker import AskPeer, OpenLoan, PullBlocks, Pulled

_served: dict[str, InprocTransport] = {}
_lock = threading.Lock()


class InprocTransport:
    """See `Transport`. Pulls run in the calling thread."""

    def __init__(
        self, memory: Memory, source: Source, identity: Identity, limits: TransferLimits
    ) -> None:
        self.memory = memory
        self.source = source
        self.identity = identity
        self.limits = limits
        self._urls: list[str] = []

    def listen(self, url: str) -> str:
        check_secrets(self.identity, url)
        with _lock:
            if url in _served:
                raise ConfigError(f"cannot listen on {url}: another transport already does")
            _served[url] = self
            self._urls.append(url)
        return url

    def pull(self, order: PullBlocks, stop: Stop) -> Pulled:
        outcome = Outcome(check_order(order, self.memory))
        deadline = Deadline(order.deadline_s)
        try:
            peer = self._peer(order.url)
            for runs in cut(order, self.limits.fetch_bytes_max):
                self._copy(peer, order, runs, outcome, deadline, stop)
        except KvpoolError as error:
            return outcome.finish(error)
        return outcome.finish()

    def ask(self, order: AskPeer, stop: Stop) -> Done | Bytes:
        source = self._peer(order.url).source
        if isinstance(order.question, LongQuestion):
            return _wait_for(source.answer_later(order.question), Deadline(order.deadline_s), stop)
        return source.asked(order.question)

    def close(self) -> None:
        with _lock:
            for url in self._urls:
                del _served[url]
            self._urls.clear()

    def _peer(self, url: str) -> InprocTransport:
        with _lock:
            peer = _served.get(url)
        if peer is None:
            raise Unavailable(f"{url} is unreachable: nothing listens there")
        ours, theirs = self.identity, peer.identity
        shared = set(ours.secrets.current()).intersection(theirs.secrets.current())
        if ours.cluster != theirs.cluster or not shared:
            raise NotAuthenticated(f"{url} belongs to another cluster, or has another secret")
        return peer

    def _copy(
        self,
        peer: InprocTransport,
        order: PullBlocks,
        runs: list[Run],
        outcome: Outcome,
        deadline: Deadline,
        stop: Stop,
    ) -> None:
        count = sum(run.end - run.first for run in runs)
        nbytes = sum((run.end - run.first) * run.part.nbytes for run in runs)
        if count > 1 and nbytes > peer.limits.fetch_bytes_max:
            raise LimitExceeded("the request is larger than the peer loans at a time")
        wanted = OpenLoan(
            order.tenant,
            order.digest,
            [PartKeys(run.part.part, run.part.nbytes, run.keys) for run in runs],
            deadline.left(),
            order.trace,
        )
        lent = peer.source.open_loan(wanted)
        try:
            present, lent_parts = check_loan(lent, wanted, peer.memory)
            first = runs[0].at
            outcome.begin(first, present)
            checksums = iter(split_keys(lent.checksums))
            for run, (nbytes, stride, rows) in zip(runs, lent_parts, strict=True):
                sources = iter(peer.memory.blocks(lent.segment, stride, nbytes, rows))
                targets = self.memory.blocks(order.segment, run.part.stride, nbytes, run.rows)
                for at, (key, target) in enumerate(
                    zip(split_keys(run.keys), targets, strict=True), run.at
                ):
                    if not present[at - first]:
                        continue
                    if stop.is_set:
                        raise Unavailable("the transfer was cancelled")
                    deadline.left()
                    target[:] = next(sources)
                    expected = next(checksums)
                    if xxh3_128_digest(target) == expected:
                        outcome.arrived(at, expected)
                        continue
                    outcome.status[at] = BlockStatus.MISMATCH
                    peer.source.corrupt(Corrupt(order.tenant, order.digest, run.part.part, key))
        finally:
            if lent.token:
                peer.source.give_back(lent.token)


def _wait_for(owed: Owed, deadline: Deadline, stop: Stop) -> Bytes:
    """A pending answer of a peer."""
    bell = os.eventfd(0)

    def ring() -> None:
        os.eventfd_write(bell, 1)

    try:
        stop.register(ring)
        try:
            both = select.poll()
            both.register(bell, select.POLLIN)
            both.register(owed.fileno(), select.POLLIN)
            ready = dict(both.poll(deadline.left() * 1000))
        finally:
            stop.unregister(ring)
        if owed.fileno() in ready:
            return owed.result()
        raise Unavailable(
            "the question was cancelled" if ready else "the peer did not answer in time"
        )
    finally:
        owed.close()
        os.close(bell)
