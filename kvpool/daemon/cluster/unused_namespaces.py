"""Notes in the cluster which namespaces are used here, and deletes those that nobody has used for long.

Event loop only.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.local_node import LocalNode
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.placement.membership.admission import NOTE_HOURS, stale
from kvpool.placement.membership.base import Membership
from kvpool.placement.records import NamespaceEntry, View

log = logging.getLogger("kvpool.daemon")

CHORE = "namespaces"
HOUR_S = 3600.0
SPREAD_S = 600.0  # so that the first of many nodes notes a use before the others look
CHECKED_MAX = 64  # namespaces in a step
WRITTEN_MAX = 16  # of them are noted or deleted
# Of watching before anything is deleted: who came last has noted its uses by then.
SURE_S = 2 * HOUR_S


@dataclass(eq=False)
class UnusedNamespaces:
    """Keeps the cluster's records of namespaces from growing for ever.

    A namespace is used where a client has it open, or where there are blocks of it in memory or on a disk. Each node
    notes that once a day. The hours are counted by one member, and it deletes what was not noted for so many
    (`namespace_unused_days`), in the second half of an hour: in the first one the others look. deleted: by this node.

    A node that is alone deletes none: only namespaces that were reset or configured have a record there, and one without
    a record begins in the first epoch.
    """

    config: DaemonConfig
    node: Node
    membership: Membership
    clock: Callable[[], float]
    rng: random.Random

    def __post_init__(self) -> None:
        self.deleted = 0
        self._hours = -1  # of the cluster, as seen last
        self._seen_at = -math.inf  # when they were first seen
        self._look_at = math.inf
        self._delete_at = math.inf
        self._began = self.clock()
        self._to_look_at: deque[NamespaceState] = deque()
        self._to_delete: deque[NamespaceEntry] = deque()

    async def step(self, local: LocalNode) -> None:
        """Call it about every second. What a membership that is away does not take is repeated in the next hour."""
        if not self.config.join:
            return
        self._pass_time()
        try:
            await self._note(local)
            if await self.membership.lead(CHORE):
                await self._delete(local)
                if self.clock() - self._seen_at >= HOUR_S and self.membership.view.namespaces:
                    await self.membership.count_hour(self._hours)
        except KvpoolError as error:
            log.debug("the use of namespaces was not noted: %s", error)

    def _pass_time(self) -> None:
        view, now = self.membership.view, self.clock()
        if view.clock.hours != self._hours:
            self._hours, self._seen_at = view.clock.hours, now
            self._look_at = now + self.rng.uniform(0, SPREAD_S)
            self._delete_at = now + HOUR_S / 2
            self._to_delete.clear()
        if now >= self._look_at:
            self._look_at = math.inf
            every = self.node.tenants.values()
            self._to_look_at = deque(
                epochs[-1] for tenant in every for epochs in tenant.epochs.values()
            )

    async def _note(self, local: LocalNode) -> None:
        written = 0
        for _ in range(min(CHECKED_MAX, len(self._to_look_at))):
            if written >= WRITTEN_MAX:
                return
            namespace = self._to_look_at.popleft()
            tenant, base = namespace.tenant, namespace.base
            view = self.membership.view
            entry = view.namespaces.get((tenant.name, base.hex()))
            if entry is None or not stale(entry, view.clock):
                continue
            if self.node.namespaces.in_use(tenant, base) or local.below(namespace):
                written += 1
                try:
                    await self.membership.use(tenant.name, base.hex())
                except InvalidRequest:
                    pass  # it was deleted at this moment, and is registered anew when it is opened

    async def _delete(self, local: LocalNode) -> None:
        """Some of those that are unused, by the one that leads. Not before all have had the time to note their own."""
        now = self.clock()
        if not self.config.namespace_unused_days or now - self._began < SURE_S:
            return
        if now >= self._delete_at:
            self._delete_at = math.inf
            self._to_delete = deque(unused(self.membership.view, self.config.namespace_unused_days))
        for _ in range(min(WRITTEN_MAX, len(self._to_delete))):
            entry = self._to_delete.popleft()
            if self._used_here(entry, local):
                continue
            if await self.membership.delete_unused(entry.tenant, entry.digest, entry.used):
                self.deleted += 1
                log.info(
                    "namespace %s of tenant %s was not used for %d hours: deleted from the cluster",
                    entry.digest,
                    entry.tenant,
                    self._hours - entry.used,
                    extra={"namespace": entry.digest},
                )

    def _used_here(self, entry: NamespaceEntry, local: LocalNode) -> bool:
        tenant, base = self.node.tenants.get(entry.tenant), bytes.fromhex(entry.digest)
        if tenant is None or base not in tenant.epochs:
            return False
        return self.node.namespaces.in_use(tenant, base) or local.below(tenant.epochs[base][-1])


def unused(view: View, days: int) -> list[NamespaceEntry]:
    """Those that nobody has used for so many days, the oldest use first. Pure.

    Quotas are an operator's word: a namespace that has one stays.
    """
    hours = view.clock.hours - (24 * days + NOTE_HOURS)
    found = [
        entry
        for entry in view.namespaces.values()
        if entry.used < hours and not (entry.settings.dram_quota or entry.settings.ssd_quota)
    ]
    return sorted(found, key=lambda entry: entry.used)
