"""How long nodes that nothing is pulled from take to answer: asked now and then, in the background.

A probe is a question about no blocks (`kvpool.wire.peer.Ask`), which goes the way of all questions. What it tells is the time
to a first byte. No blocks are pulled to learn a bandwidth: that would take bytes from those who need
them and slots from what is cached, for a number that is only needed where the node has something that is
wanted. Then it is measured by the first pull, which the priors of its distance and what was measured of nodes
as far away are good enough to choose; and where computing seems sooner, by `Peers.begin_trial`.

A probe that fails changes nothing but a counter, and while this node's transfer workers have something to do there is
none: it would tell how long it waits for them. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvpool.daemon.fetch.ports import LivingNode, PeerTransport
from kvpool.errors import KvpoolError
from kvpool.placement.peers import Peers
from kvpool.types import DEFAULT_TENANT
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

PROBES_MAX = 8
"""At a time: so many questions every period from each node, and about as many to it."""
PROBE_S = 2.0
NO_NAMESPACE = bytes(16)


class Asking(PeerTransport, Protocol):
    """`TransferWorkers`."""

    @property
    def idle(self) -> bool: ...


class Others(Protocol):
    """Who else there is: `Cluster`."""

    @property
    def living(self) -> Mapping[bytes, LivingNode]: ...


@dataclass(eq=False)
class Prober:
    """See the module. clock: seconds, as the event loop's."""

    _carrier: Asking
    _others: Others
    _peers: Peers
    _clock: Callable[[], float]

    async def run(self, every_s: float) -> None:
        """Until cancelled. every_s: between rounds, on average, and since a node was heard of; 0: not at all.

        Nodes that were started together do not ask together.
        """
        while every_s:
            await asyncio.sleep(every_s * (0.5 + self._peers.rng.random()))
            await self.round(every_s)

    async def round(self, unheard_s: float) -> None:
        """Ask a few of those that were not heard of for so long. Ends by its deadline."""
        if not self._carrier.idle:
            return
        living = self._others.living
        chosen = self._peers.to_probe(living, self._clock(), unheard_s, PROBES_MAX)
        await asyncio.gather(*(self._probe(one, living[one].url) for one in chosen))

    async def _probe(self, incarnation: bytes, url: str) -> None:
        question = peer_wire.Ask(DEFAULT_TENANT, NO_NAMESPACE, [], b"")
        started = self._clock()
        try:
            await self._carrier.ask(worker_wire.AskPeer(url, question, PROBE_S, background=True))
        except KvpoolError as error:
            self._peers.probe_failed(incarnation, error)
            return
        now = self._clock()
        self._peers.probed(incarnation, now - started, now)
