"""Membership without a server: for one machine, and for tests and simulations of many nodes.

A `StaticCluster` takes the place of etcd, in this process; each `StaticMembership` on it is one
node's. Nothing happens by itself: no clocks, no randomness. A simulation triggers faults itself:
leases end by `expire`, the backend is unreachable between `go_away` and `come_back`, and `deliver`
decides when, how often and whether a member is notified of a change.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from kvpool.decoding import decode_json
from kvpool.errors import ConfigError, InvalidRequest, ProtocolError, Unavailable
from kvpool.folders import sync_folder
from kvpool.placement.membership.admission import (
    after_deletion,
    begun,
    bumped,
    check_config,
    check_parts,
    config_of,
    configured,
    founding,
    incarnation_taken,
    name_taken,
    noted,
    renewed,
    same_address,
    stale,
)
from kvpool.placement.membership.base import Standing
from kvpool.placement.outage import Outage
from kvpool.placement.records import (
    FORMAT_VERSION,
    ClusterConfig,
    NamespaceClock,
    NamespaceEntry,
    NodeRecord,
    SettingsChange,
    View,
)

log = logging.getLogger("kvpool.placement")


class Stored(msgspec.Struct, frozen=True):
    """The contents of the file: namespaces with their epochs, which survive the process."""

    namespaces: tuple[NamespaceEntry, ...]
    format: int = FORMAT_VERSION
    clock: NamespaceClock = NamespaceClock()


Deliver = Callable[["StaticMembership", Callable[[], None]], None]
"""Notifies a member of a change by calling the function: at once, later, several times, or never."""


def at_once(_member: StaticMembership, tell: Callable[[], None]) -> None:
    """Every change is notified before the call that made it returns."""
    tell()


class StaticCluster:
    """State shared by the members. One event loop.

    path: file of namespaces and their epochs; absent: none. One process uses a file at a time.
    Raises `ConfigError` for a file that cannot be read.
    """

    def __init__(
        self, name: str = "local", *, path: Path | None = None, deliver: Deliver = at_once
    ) -> None:
        self.name = name
        self._path = path
        self._deliver = deliver
        self._members: list[StaticMembership] = []
        self._owners: dict[str, StaticMembership] = {}
        self._chores: dict[str, str] = {}  # the leader, by incarnation
        self._cut: set[str] = set()
        self._away = False
        self._saving = asyncio.Lock()
        stored = Stored(()) if path is None else _load(path)
        namespaces = {(entry.tenant, entry.digest): entry for entry in stored.namespaces}
        self.view = View(namespaces=MappingProxyType(namespaces), clock=stored.clock, revision=1)

    # ---- faults ---------------------------------------------------------------------------------------

    def expire(self, node: str) -> None:
        """End the lease of a node, as if it had been silent. No-op when there is no such node."""
        if node in self.view.nodes:
            self._drop(node)

    def go_away(self, node: str | None = None) -> None:
        """Make the backend unreachable: for one node, or for all."""
        if node is None:
            self._away = True
        else:
            self._cut.add(node)

    def come_back(self, node: str | None = None) -> None:
        """Make it reachable again: for one node, or for all. Members are notified of missed changes."""
        if node is None:
            self._away = False
            self._cut.clear()
        else:
            self._cut.discard(node)
        self._tell_all()

    def out_of_reach(self, node: str) -> bool:
        return self._away or node in self._cut

    # ---- for members ----------------------------------------------------------------------------------

    def admit(self, member: StaticMembership, secrets: tuple[bytes, ...], protocol: int) -> None:
        """Join the cluster, or be its first member. Raises `ConfigError`."""
        ours = config_of(self.name, secrets)
        config = self.view.config or founding(ours)
        check_config(config, ours, protocol)
        if self.view.config != (config := renewed(config, ours)):
            self._set(config=config)
        if member not in self._members:
            self._members.append(member)

    def dismiss(self, member: StaticMembership) -> None:
        if member in self._members:
            self._members.remove(member)

    def owns(self, member: StaticMembership, record: NodeRecord) -> bool:
        """Whether the member's lease lives."""
        held = self.view.nodes.get(record.node)
        return (
            held is not None
            and held.incarnation == record.incarnation
            and self._owners[record.node] is member
        )

    def enter(self, member: StaticMembership, record: NodeRecord, *, restart: bool) -> None:
        """Bind a record to a new lease. A record lasts here as long as its owner: there is no waiting."""
        old = self.view.nodes.get(record.node)
        if old is not None and not same_address(old, record):
            raise name_taken(old)
        for other in self.view.nodes.values():
            if other.incarnation == record.incarnation and other.node != record.node:
                raise incarnation_taken(record, other.node)
        self._owners[record.node] = member
        drains = self.view.drains - {record.node} if restart else self.view.drains
        self._set(nodes={**self.view.nodes, record.node: record}, drains=drains)

    def write(self, record: NodeRecord) -> None:
        self._set(nodes={**self.view.nodes, record.node: record})

    def leave(self, member: StaticMembership, record: NodeRecord) -> None:
        if self.owns(member, record):
            self._drop(record.node)

    def drain(self, node: str, *, wanted: bool) -> None:
        self._set(drains=self.view.drains | {node} if wanted else self.view.drains - {node})

    def leads(self, chore: str, incarnation: str) -> bool:
        """Whether it is this one; it becomes the leader if there was none."""
        living = {record.incarnation for record in self.view.nodes.values()}
        if self._chores.get(chore) not in living:
            self._chores[chore] = incarnation
        return self._chores[chore] == incarnation

    async def change(
        self,
        key: tuple[str, str],
        change: Callable[[NamespaceEntry | None], NamespaceEntry],
    ) -> NamespaceEntry:
        """Change a namespace, on disk first. `change` gets the present entry, and may raise."""
        async with self._saving:
            old = self.view.namespaces.get(key)
            entry = change(old)
            if entry != old:
                await self._keep({**self.view.namespaces, key: entry}, self.view.clock)
            return entry

    async def delete(self, key: tuple[str, str], used: int) -> bool:
        """Delete a namespace that was not used after that hour, on disk first."""
        async with self._saving:
            namespaces = dict(self.view.namespaces)
            entry = namespaces.pop(key, None)
            if entry is None or entry.used > used:
                return False
            await self._keep(namespaces, after_deletion(self.view.clock, entry))
            return True

    async def count_hour(self, hours: int) -> None:
        async with self._saving:
            clock = self.view.clock
            if clock.hours == hours:
                later = msgspec.structs.replace(clock, hours=hours + 1)
                await self._keep(self.view.namespaces, later)

    async def _keep(
        self, namespaces: Mapping[tuple[str, str], NamespaceEntry], clock: NamespaceClock
    ) -> None:
        if self._path is not None:
            stored = Stored(tuple(namespaces.values()), clock=clock)
            await asyncio.to_thread(_save, self._path, stored)
        self._set(namespaces=namespaces, clock=clock)

    def _drop(self, node: str) -> None:
        del self._owners[node]
        self._set(nodes={name: r for name, r in self.view.nodes.items() if name != node})

    def _set(
        self,
        *,
        nodes: dict[str, NodeRecord] | None = None,
        namespaces: Mapping[tuple[str, str], NamespaceEntry] | None = None,
        clock: NamespaceClock | None = None,
        drains: frozenset[str] | None = None,
        config: ClusterConfig | None = None,
    ) -> None:
        old = self.view
        self.view = View(
            nodes=old.nodes if nodes is None else MappingProxyType(nodes),
            namespaces=old.namespaces if namespaces is None else MappingProxyType(dict(namespaces)),
            clock=clock or old.clock,
            drains=old.drains if drains is None else drains,
            config=config or old.config,
            revision=old.revision,
        )
        if self.view != old:
            self.view = replace(self.view, revision=old.revision + 1)
            self._tell_all()

    def _tell_all(self) -> None:
        view = self.view
        for member in list(self._members):
            self._deliver(member, lambda member=member: member.hear(view))  # type: ignore[misc]


@dataclass(eq=False)
class StaticMembership:
    """See `kvpool.placement.membership.base.Membership`. `standing` needs no clock here."""

    cluster: StaticCluster
    _: KW_ONLY
    secrets: Callable[[], tuple[bytes, ...]] = tuple
    protocol: int = 0

    def __post_init__(self) -> None:
        self.view = View()
        self._record: NodeRecord | None = None
        self._absent = Standing.OUT
        self.node = ""  # the name of the last join
        self._watchers: list[Callable[[], None]] = []
        self._lost_watchers: list[Callable[[], None]] = []
        self.outage = Outage(f"cluster {self.cluster.name!r}", log, lambda: 0.0)

    @property
    def undecodable(self) -> int:
        return 0

    async def start(self) -> None:
        self._reach()
        self.cluster.admit(self, self.secrets(), self.protocol)
        self._see(self.cluster.view)

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def on_lost(self, lost: Callable[[], None]) -> None:
        self._lost_watchers.append(lost)

    # ---- hearing of changes ---------------------------------------------------------------------------

    def hear(self, view: View) -> None:
        """A notification arrives. A late or repeated one changes nothing."""
        if not self.cluster.out_of_reach(self.node):
            self._see(view)
            self.beat()

    def beat(self) -> None:
        """Ask whether the lease lives, as a keep-alive does."""
        if self.cluster.out_of_reach(self.node):
            return
        if self._record is not None and not self.cluster.owns(self, self._record):
            self._record, self._absent = None, Standing.LOST
            for lost in self._lost_watchers:
                lost()

    def _see(self, view: View) -> None:
        if view.revision > self.view.revision:
            self.view = view
            for watcher in self._watchers:
                watcher()

    def _reach(self) -> None:
        if self.cluster.out_of_reach(self.node):
            error = Unavailable(f"cluster {self.cluster.name!r} is unreachable")
            self.outage.failed("reach", error)
            raise error
        self.outage.succeeded("reach")

    # ---- this node ------------------------------------------------------------------------------------

    async def join(self, record: NodeRecord) -> None:
        assert self._record is None, "leave first"
        if self.cluster.out_of_reach(record.node):
            raise Unavailable(f"cluster {self.cluster.name!r} is unreachable")
        self.cluster.enter(self, record, restart=not self.node)
        self.node, self._record = record.node, record
        self._see(self.cluster.view)

    async def update(self, record: NodeRecord) -> None:
        self._reach()
        self.beat()
        old = self._record
        if old is None:
            raise Unavailable(f"node {record.node!r} is not a member: there is no record to update")
        assert (record.node, record.incarnation) == (old.node, old.incarnation), "join instead"
        self._record = record
        self.cluster.write(record)
        self._see(self.cluster.view)

    async def leave(self) -> None:
        record, self._record = self._record, None
        self._absent = Standing.OUT
        if record is not None and not self.cluster.out_of_reach(self.node):
            self.cluster.leave(self, record)
            self._see(self.cluster.view)

    def standing(self, now: float) -> Standing:
        """UNSURE: the lease has ended, and the member was not notified."""
        if self._record is None:
            return self._absent
        if self.cluster.out_of_reach(self.node):
            return Standing.AWAY
        return Standing.MEMBER if self.cluster.owns(self, self._record) else Standing.UNSURE

    async def lead(self, chore: str) -> bool:
        record = self._record
        if record is None or self.standing(0.0) is not Standing.MEMBER:
            return False
        return self.cluster.leads(chore, record.incarnation)

    # ---- what all share -------------------------------------------------------------------------------

    async def register(self, entry: NamespaceEntry) -> NamespaceEntry:
        key = (entry.tenant, entry.digest)
        known = self.view.namespaces.get(key)
        if known is None or not self.cluster.out_of_reach(self.node):
            self._reach()
            known = await self.cluster.change(key, self._registered(entry))
            self._see(self.cluster.view)
        check_parts(known, entry)
        return known

    def _registered(
        self, entry: NamespaceEntry
    ) -> Callable[[NamespaceEntry | None], NamespaceEntry]:
        def change(old: NamespaceEntry | None) -> NamespaceEntry:
            view = self.cluster.view
            if old is not None:
                return noted(old, view.clock) if stale(old, view.clock) else old
            return noted(begun(entry, view.clock), view.clock)

        return change

    async def use(self, tenant: str, digest: str) -> NamespaceEntry:
        return await self._change(
            tenant, digest, lambda entry: noted(entry, self.cluster.view.clock)
        )

    async def delete_unused(self, tenant: str, digest: str, used: int) -> bool:
        self._reach()
        deleted = await self.cluster.delete((tenant, digest), used)
        self._see(self.cluster.view)
        return deleted

    async def count_hour(self, hours: int) -> None:
        self._reach()
        await self.cluster.count_hour(hours)
        self._see(self.cluster.view)

    async def bump_epoch(
        self, tenant: str, digest: str, expected: int, *, fence: bool
    ) -> NamespaceEntry:
        def change(entry: NamespaceEntry) -> NamespaceEntry:
            return bumped(entry, expected, fence=fence)

        return await self._change(tenant, digest, change)

    async def configure(self, tenant: str, digest: str, change: SettingsChange) -> NamespaceEntry:
        return await self._change(tenant, digest, lambda entry: configured(entry, change))

    async def _change(
        self, tenant: str, digest: str, change: Callable[[NamespaceEntry], NamespaceEntry]
    ) -> NamespaceEntry:
        def change_known(entry: NamespaceEntry | None) -> NamespaceEntry:
            if entry is None:
                raise InvalidRequest(
                    f"the cluster knows no namespace {digest} of tenant {tenant!r}"
                )
            return change(entry)

        self._reach()
        entry = await self.cluster.change((tenant, digest), change_known)
        self._see(self.cluster.view)
        return entry

    async def set_drain(self, node: str, wanted: bool) -> None:
        self._reach()
        self.cluster.drain(node, wanted=wanted)
        self._see(self.cluster.view)

    async def close(self) -> None:
        await self.leave()
        self.cluster.dismiss(self)


# ---- the file -----------------------------------------------------------------------------------------


def _load(path: Path) -> Stored:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Stored(())
    except OSError as error:
        raise ConfigError(f"the namespaces' epochs in {path} cannot be read: {error}") from None
    try:
        stored = decode_json(data, Stored, "the namespaces' epochs")
    except ProtocolError as error:
        raise ConfigError(
            f"{path} is {error}. Restore it; or remove it together with all "
            "blocks on disk, because without epochs blocks from before a reset would be hits again"
        ) from None
    if stored.format != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format {stored.format}, this version of kvpool supports {FORMAT_VERSION}: install the version "
            "that wrote it"
        )
    return stored


def _save(path: Path, stored: Stored) -> None:
    """All or nothing, and on disk when it returns. Raises `Unavailable`."""
    temporary = path.with_name(f"{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(stored))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise Unavailable(f"the namespaces' epochs cannot be written to {path}: {error}") from None
