"""What this node announces to the directory: the blocks of each of its tiers, while it is a member.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.daemon.cluster.local_node import Holdings
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.errors import Unavailable
from kvpool.placement.directory.announcer import Announcer
from kvpool.placement.directory.base import TIERS, Directory, Entry
from kvpool.placement.directory_memory import DeadIncarnations
from kvpool.tasks import Tasks
from kvpool.telemetry.cluster_stats import AnnouncerStats


@dataclass(eq=False)
class Announcing:
    """See the module. Without a directory nothing is announced.

    may_serve: whether this node is known to be a member. own: its incarnation.
    """

    _directory: Directory | None
    _may_serve: Callable[[], bool]
    _own: Callable[[], bytes]
    _dead: DeadIncarnations
    _clock: Callable[[], float]
    _tasks: Tasks

    def __post_init__(self) -> None:
        self.holdings: dict[int, Holdings] = {}
        self.announcers: dict[int, Announcer] = {}
        self._told: Directory | None = None  # by the announcers, if there are any
        self._announced_as: bytes | None = self._own()

    def start(self, holdings: Mapping[int, Holdings]) -> None:
        """Announce these tiers, and those that were to be announced before, from now on."""
        self.holdings.update(holdings)
        if self._directory is not None:
            self._told = _OnlyMembersPublish(self._directory, self._may_serve)
            for tier, held in self.holdings.items():
                self._begin(self._told, tier, held)

    def announce(self, tier: int, held: Holdings) -> None:
        """There is one more tier to announce."""
        self.holdings[tier] = held
        if self._told is not None:
            self._begin(self._told, tier, held)

    def _begin(self, told: Directory, tier: int, held: Holdings) -> None:
        loop = asyncio.get_running_loop()
        held.follow_changes(lambda: loop.call_soon(self._announce))
        announcer = Announcer(told, held, clock=self._clock, tier=tier)
        announcer.act_as(self._announced_as)
        self.announcers[tier] = announcer
        self._tasks.begin(announcer.run())

    def met(self, namespace: NamespaceState, keys: Sequence[bytes], entry: Entry) -> None:
        """A lookup found an entry, the same for all these keys, of an incarnation that does not live, or not yet,
        or is this node.
        """
        announcer = self.announcers.get(entry.tier)
        if entry.incarnation == self._own():
            if announcer is not None:
                _, here = self.holdings[entry.tier].masks(namespace.directory_digest, keys)
                here = here or [0] * len(keys)  # the namespace is no longer known
                doubtful = [key for key, mask in zip(keys, here, strict=True) if mask != entry.mask]
                if doubtful:
                    announcer.changed(namespace.directory_digest, doubtful)
            return
        self._dead.met([entry.incarnation])
        announcer = announcer or self.announcers.get(TIERS["dram"])
        if announcer is not None and entry.incarnation in self._dead:
            announcer.retract(
                namespace.directory_digest,
                len(namespace.tables),
                entry.incarnation,
                entry.tier,
                keys,
            )

    def _announce(self) -> None:
        """Announce the changes of this node since the last call."""
        for tier, announcer in self.announcers.items():
            for namespace, keys in self.holdings[tier].take_changes():
                announcer.changed(namespace.directory_digest, keys)

    def stale(self, namespace: NamespaceState, keys: list[bytes]) -> None:
        """A peer expected these blocks here. The directory is corrected."""
        for announcer in self.announcers.values():
            announcer.changed(namespace.directory_digest, keys)

    def act_as(self, incarnation: bytes | None) -> None:
        """Announce under this incarnation; None: be silent."""
        self._announced_as = incarnation
        for announcer in self.announcers.values():
            announcer.act_as(incarnation)

    def stats(self) -> AnnouncerStats | None:
        """The announcer's statistics, once it knows all blocks."""
        self._announce()
        every = [announcer.stats() for announcer in self.announcers.values()]
        if not every:
            return None
        worst = {"connected": min, "settled": min, "lag_s": max}
        return AnnouncerStats(
            **{
                name: worst.get(name, sum)(getattr(stats, name) for stats in every)
                for name in AnnouncerStats.__struct_fields__
            }
        )


class _OnlyMembersPublish:
    """A directory wrapper that refuses publications of a node which may have been declared dead meanwhile.

    Entries under its old incarnation would not be wrong, but nobody reads them.
    """

    def __init__(self, directory: Directory, may_publish: Callable[[], bool]) -> None:
        self._directory = directory
        self._may_publish = may_publish
        self.locate = directory.locate
        self.marks = directory.marks
        self.sweep = directory.sweep
        self.close = directory.close

    async def publish(
        self,
        digest: bytes,
        parts: int,
        incarnation: bytes,
        tier: int,
        keys: Sequence[bytes],
        masks: Sequence[int],
    ) -> None:
        """See `Directory.publish`."""
        if not self._may_publish():
            raise Unavailable("this node does not know whether it is still a member of its cluster")
        await self._directory.publish(digest, parts, incarnation, tier, keys, masks)
