"""What peers are asked where there is no directory: which blocks each of them could provide. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.fetch.plan import Located, entries_of, merge
from kvpool.daemon.fetch.ports import ClusterView, PeerTransport
from kvpool.errors import KvpoolError, LimitExceeded, NamespaceMismatch
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peers import Peers
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

ASKED_MAX = 16  # peers that are asked if there is no directory


@dataclass(eq=False)
class PeerQuestions:
    """See the module."""

    _transport: PeerTransport
    _cluster: ClusterView
    _peers: Peers
    _clock: Callable[[], float]

    async def prefix(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wait_s: float,
    ) -> Located:
        """Each peer reports how many of these adjacent blocks it could provide, from the first on.

        One that takes longer than expected is not waited for when another one has all of it.
        """
        now = self._clock()
        question = peer_wire.Ask(
            namespace.tenant.name,
            namespace.digest,
            [table.part for table in tables],
            b"".join(keys),
        )
        asked = self._to_ask(now)
        answers = await self._answers(asked, question, len(keys), wait_s)
        mask = sum(1 << table.part for table in tables)
        located: Located = {}
        reach = sorted(zip(answers, [incarnation for incarnation, _ in asked], strict=True))
        first = 0
        for at, (end, _) in enumerate(reach):
            if end > first:  # all keys up to this one share the same entries object
                having = [Entry(incarnation, TIERS["dram"], mask) for _, incarnation in reach[at:]]
                located.update(dict.fromkeys(keys[first:end], having))
                first = end
        return located

    async def each(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wait_s: float,
    ) -> Located:
        """Each peer reports which of these blocks it could provide, part by part."""
        asked = self._to_ask(self._clock())
        tenant, packed = namespace.tenant.name, b"".join(keys)
        questions = [
            (incarnation, url, table.part) for incarnation, url in asked for table in tables
        ]
        answers = await asyncio.gather(
            *(
                self._ask(
                    incarnation,
                    url,
                    peer_wire.Holds(tenant, namespace.digest, part, packed),
                    wait_s,
                )
                for incarnation, url, part in questions
            )
        )
        located: Located = {}
        masks: dict[bytes, dict[bytes, int]] = {}
        for (incarnation, _, part), answer in zip(questions, answers, strict=True):
            if isinstance(answer, frame.Bytes) and len(answer.data) == len(keys):
                of_peer = masks.setdefault(incarnation, {})
                for key in compress(keys, answer.data):
                    of_peer[key] = of_peer.get(key, 0) | 1 << part
        for incarnation, of_peer in masks.items():
            merge(located, entries_of(of_peer, incarnation, TIERS["dram"]))
        return located

    def _to_ask(self, now: float) -> list[tuple[bytes, str]]:
        """Return the peers to ask where there is no directory: incarnations and URLs."""
        return [
            (incarnation, node.url)
            for incarnation, node in self._cluster.living.items()
            if (peer := self._peers.get(incarnation)) is None or not peer.suspended(now)
        ][:ASKED_MAX]

    async def _answers(
        self, asked: Sequence[tuple[bytes, str]], question: peer_wire.Ask, count: int, wait_s: float
    ) -> list[int]:
        """How many of so many blocks each of these has; 0 for those that nobody waited for."""
        tasks = {
            asyncio.ensure_future(self._ask_length(incarnation, url, question, wait_s)): incarnation
            for incarnation, url in asked
        }
        trusted = [
            task
            for task, incarnation in tasks.items()
            if (peer := self._peers.get(incarnation)) is None or not peer.on_probation
        ]
        try:
            if trusted:
                patience_s = max(self._peers.hedge_after_s(tasks[task], 0) for task in trusted)
                await asyncio.wait(trusted, timeout=min(patience_s, wait_s))
            if not any(task.done() and task.result() >= count for task in tasks):
                await asyncio.gather(*tasks)
            now = self._clock()
            for task in trusted:
                if not task.done():
                    self._peers.slow(tasks[task], now)
            return [task.result() if task.done() else 0 for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_length(
        self, incarnation: bytes, url: str, question: peer_wire.Ask, wait_s: float
    ) -> int:
        answer = await self._ask(incarnation, url, question, wait_s)
        return answer.value if isinstance(answer, frame.Done) else 0

    async def _ask(
        self,
        incarnation: bytes,
        url: str,
        question: peer_wire.Ask | peer_wire.Holds,
        wait_s: float,
    ) -> frame.Done | frame.Bytes | None:
        """A peer's answer; None if there is none. What it took counts for the peer."""
        started = self._clock()
        self._peers.started(incarnation, 0, started)
        try:
            answer = await self._transport.ask(worker_wire.AskPeer(url, question, wait_s))
        except (NamespaceMismatch, asyncio.CancelledError):
            self._peers.stopped(incarnation, 0)
            raise
        except LimitExceeded:  # it was not asked
            self._peers.stopped(incarnation, 0)
            return None
        except KvpoolError as error:
            self._peers.failed(incarnation, self._clock(), error=error, asked=0)
            return None
        now = self._clock()
        self._peers.finished(incarnation, 0, now - started, now)
        return answer
