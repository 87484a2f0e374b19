"""Links with a bandwidth that transfers share.

A transfer uses several links at once (out of one node, into another, up to the GPU) and gets the smallest of
its equal shares. What it leaves of the others' capacity is not given to anybody: simpler than max-min
fairness, and never too fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.simulator.events import Timeline


class Link:
    """capacity: bytes a second, in one direction."""

    __slots__ = ("capacity", "transfers")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.transfers: dict[
            Transfer, None
        ] = {}  # a dict, so that their order is the same in every run

    def bytes_ahead(self, now: float) -> float:
        """What is still to pass of the transfers under way."""
        return sum(t.left - t.rate * (now - t.since) for t in self.transfers)


class Transfer:
    """Bytes under way. left: as of `since`, going at `rate` from then on."""

    __slots__ = ("done", "left", "links", "rate", "since", "version")

    def __init__(
        self, left: float, links: Sequence[Link], done: Callable[[], None], now: float
    ) -> None:
        self.left = left
        self.links = links
        self.done = done
        self.rate = 0.0
        self.since = now
        self.version = 0


class Network:
    """All transfers of one timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def start(self, nbytes: float, links: Sequence[Link], done: Callable[[], None]) -> None:
        """Begin to move so many bytes over these links; `done` is called when they are there."""
        transfer = Transfer(nbytes, links, done, self._timeline.now)
        for link in links:
            link.transfers[transfer] = None
        self._share(links)

    def _share(self, links: Sequence[Link]) -> None:
        """Who shares these links goes faster or slower from now on."""
        now = self._timeline.now
        affected = {transfer: None for link in links for transfer in link.transfers}
        for transfer in affected:
            rate = min(link.capacity / len(link.transfers) for link in transfer.links)
            if rate == transfer.rate:
                continue
            transfer.left -= transfer.rate * (now - transfer.since)
            transfer.since = now
            transfer.rate = rate
            transfer.version += 1
            self._timeline.at(now + transfer.left / rate, self._arrived, transfer, transfer.version)

    def _arrived(self, transfer: Transfer, version: int) -> None:
        if version != transfer.version:
            return
        for link in transfer.links:
            del link.transfers[transfer]
        self._share(transfer.links)
        transfer.done()
