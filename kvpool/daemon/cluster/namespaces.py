"""Settings and epochs of namespaces, agreed with the other nodes. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.local_node import LocalNode
from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import parse_parts
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, NamespaceMismatch, Unavailable
from kvpool.placement.membership.admission import check_room, stale
from kvpool.placement.membership.base import Membership
from kvpool.placement.records import (
    DEFAULT_SETTINGS,
    NamespaceEntry,
    NamespaceSettings,
    SettingsChange,
    View,
)
from kvpool.types import PartSpec, plain_parts
from kvpool.wire import client as client_wire

log = logging.getLogger("kvpool.daemon")

REGISTER_S = 1.0  # how long a client that opens a namespace waits for the cluster
UNREGISTERED_MAX = 1024
RESET_TRIES = 10
GENERATIONS_AHEAD_MAX = 1 << 10  # of a node that is alone and has lost its state


class Namespaces:
    """Agrees with the cluster on the namespaces that are open here; reports changes to the rest of the node."""

    def __init__(self, config: DaemonConfig, node: Node, membership: Membership) -> None:
        self._config = config
        self._node = node
        self._membership = membership
        self._entries: Mapping[tuple[str, str], NamespaceEntry] = {}
        self._first_epoch = 0  # by the clock that was last seen
        self._unregistered: dict[NamespaceState, None] = {}
        self._local: LocalNode  # from `start` on

    def start(self, local: LocalNode) -> None:
        """Report changes to `local` from now on."""
        self._local = local

    def follow(self, config: DaemonConfig) -> None:
        """Apply a configuration in which some settings have changed."""
        self._config = config

    def look(self, view: View) -> None:
        """The cluster's current records of namespaces."""
        deleted = False
        if view.namespaces is not self._entries:
            before, self._entries = self._entries, view.namespaces
            known = before.get
            for key in [key for key, entry in self._entries.items() if known(key) is not entry]:
                self._follow(key, self._entries[key])
            deleted = not before.keys() <= self._entries.keys()
        epoch, self._first_epoch = self._first_epoch, view.clock.first_epoch
        if deleted or epoch < self._first_epoch:
            self._end_deleted()

    def _end_deleted(self) -> None:
        """Namespaces that are open here, that the cluster does not know, and whose epoch is before the first one now.

        They were deleted, perhaps after a registration that no look has seen. If this node did not know that one was
        unused, it was away, and so are its clients' weights.
        """
        for tenant in self._node.tenants.values():
            for epochs in list(tenant.epochs.values()):
                living = epochs[-1]
                if living.epoch < self._first_epoch and self._entry(tenant, living.base) is None:
                    self._begin(living)

    def _follow(self, key: tuple[str, str], entry: NamespaceEntry) -> None:
        tenant = self._node.tenants.get(key[0])
        epochs = tenant.epochs.get(bytes.fromhex(key[1])) if tenant is not None else None
        if epochs:
            self._apply(epochs[-1], entry)

    async def register_late(self) -> None:
        """Register namespaces that were opened while the membership did not answer, as far as it answers now.

        It may refuse a single one for ever, so the one that failed is asked for last the next time.
        """
        for namespace in list(self._unregistered):
            try:
                entry = await self._register(namespace, namespace.settings)
            except NamespaceMismatch as error:
                log.warning(
                    "namespace %s is not shared with the cluster: %s",
                    namespace.base.hex(),
                    error,
                    extra={"namespace": namespace.base.hex()},
                )
            except KvpoolError as error:
                log.debug("namespace %s is still to be registered: %s", namespace.base.hex(), error)
                self._unregistered[namespace] = self._unregistered.pop(namespace)
                return
            else:
                self._apply(namespace, entry)
            del self._unregistered[namespace]

    def pending(self, namespace: NamespaceState) -> bool:
        """Whether the cluster is still to be told of it: until then, only this node knows its epoch."""
        return not self._unregistered.keys().isdisjoint(namespace.tenant.epochs[namespace.base])

    async def register(
        self, namespace: NamespaceState, wanted: NamespaceSettings
    ) -> NamespaceState:
        """Agree with the cluster about a namespace opened here; returns its state now.

        wanted: the settings, if it is new to the cluster. If the membership does not answer, or refuses, that is
        done later. Raises `NamespaceMismatch`, and `LimitExceeded` for one more than the tenant may have in the cluster.
        """
        entry = known = self._entry(namespace.tenant, namespace.base)
        # One of whose use nobody has heard for long may be deleted at any moment: its record says that it is used now.
        if known is None or stale(known, self._membership.view.clock):
            if known is None:
                check_room(self._entries, namespace.tenant.name)
                self._begin(namespace)
            wanted = wanted.known_here(self._config.replicas_max)
            try:
                async with asyncio.timeout(REGISTER_S):
                    entry = await self._register(namespace, wanted)
            except NamespaceMismatch:
                raise
            except (KvpoolError, TimeoutError):
                if known is not None:
                    return self._apply(namespace, known)
                living = self._node.namespaces.living(namespace)
                if len(self._unregistered) < UNREGISTERED_MAX and not living.retired:
                    self._settle_on(namespace, wanted)
                    self._unregistered[namespace] = None
                return living
        assert entry is not None, "it was known or is registered"
        return self._apply(namespace, entry)

    def _begin(self, namespace: NamespaceState) -> None:
        """The cluster does not know it, so it may have been deleted: whatever is here of a former life is over.

        Not only once it is registered, which may be late.
        """
        clock = self._membership.view.clock
        self._enter(namespace, clock.first_epoch, clock.first_epoch, clock.first_generation)

    def _enter(
        self, namespace: NamespaceState, epoch: int, fence: int, generation: int
    ) -> NamespaceState:
        was = self._node.namespaces.living(namespace)
        living = self._node.namespaces.set_epoch(namespace, epoch, fence, generation)
        if living is not was:
            self._local.namespace_entered(living)
        return living

    async def fill_in(self, namespace: NamespaceState, wanted: NamespaceSettings) -> NamespaceState:
        """On a node that is alone, a client's settings apply if none were set before.

        Returns the namespace's state now.
        """
        living = self.known_epoch(namespace) or self._node.namespaces.living(namespace)
        filled = living.settings.filled(wanted).known_here(self._config.replicas_max)
        if filled == living.settings:
            return living
        self._settle_on(living, filled)
        if self._entry(living.tenant, living.base) is not None:
            change = SettingsChange(*msgspec.structs.astuple(filled))
            try:
                entry = await self._membership.configure(
                    living.tenant.name, living.base.hex(), change
                )
            except KvpoolError as error:
                log.warning(
                    "settings of namespace %s last only until this process ends: %s",
                    living.base.hex(),
                    error,
                    extra={"namespace": living.base.hex()},
                )
            else:
                living = self._apply(living, entry)
        return living

    def known_epoch(self, namespace: NamespaceState) -> NamespaceState | None:
        """The state of a namespace by the known cluster record; None if the cluster must be asked."""
        entry = self._entry(namespace.tenant, namespace.base)
        return None if entry is None else self._apply(namespace, entry)

    def open_known(self, tenant: Tenant, base: bytes) -> NamespaceState | None:
        """A namespace of the cluster, whether or not an engine here has it open; None: unknown there."""
        entry = self._entry(tenant, base)
        if entry is None:
            return None
        fields = entry.fields.encode()
        specs = parse_parts(base, fields, list(entry.parts))
        return self._apply(self._node.namespaces.open(tenant, base, fields, specs), entry)

    def _entry(self, tenant: Tenant, base: bytes) -> NamespaceEntry | None:
        return self._entries.get((tenant.name, base.hex()))

    async def _register(
        self, namespace: NamespaceState, wanted: NamespaceSettings
    ) -> NamespaceEntry:
        return await self._membership.register(
            NamespaceEntry(
                namespace.tenant.name,
                namespace.base.hex(),
                namespace.fields.decode(),
                tuple(plain_parts(namespace.parts)),
                epoch=namespace.epoch,
                fence=namespace.tenant.fences.get(namespace.base, 0),
                generation=namespace.generation,
                settings=wanted,
            )
        )

    def _apply(self, namespace: NamespaceState, entry: NamespaceEntry) -> NamespaceState:
        was = self._node.namespaces.living(namespace)
        if was.retired:  # freed while the cluster was asked
            return was
        living = self._enter(namespace, entry.epoch, entry.fence, entry.generation)
        before = living.settings.replicas
        self._settle_on(living, entry.settings.known_here(self._config.replicas_max))
        if living.settings.replicas > before and any(table.blocks for table in living.tables):
            self._local.replicas_lacking()
        return living

    def _settle_on(self, living: NamespaceState, settings: NamespaceSettings) -> None:
        if living.settings != settings:
            living.settings = settings
            self._local.namespace_configured(living)

    async def adopt(
        self,
        tenant: Tenant,
        base: bytes,
        fields: bytes,
        specs: Sequence[PartSpec],
        epoch: int,
        generation: int,
        settings: NamespaceSettings = DEFAULT_SETTINGS,
    ) -> NamespaceState:
        """A namespace that this node knew before its restart, in its present epoch.

        settings: of that time; the cluster's take precedence.
        """
        namespace = self._node.namespaces.open(tenant, base, fields, specs)
        known = self.known_epoch(namespace)
        if known is None:
            known = self._enter(namespace, epoch, 0, generation)
            known = await self.register(known, settings)
        return known

    async def opened(self, namespace: NamespaceState, generation: int) -> client_wire.Opened:
        """For a client that opens a namespace, with weights of this generation (-1: the present one)."""
        living = self._node.namespaces.living(namespace)
        if generation > living.generation and self._config.join:
            raise Unavailable(
                "this node has not yet received the namespace's last reset: try again"
            )
        if generation > living.generation + GENERATIONS_AHEAD_MAX:
            raise InvalidRequest(
                f"the request is for generation {generation}, but {living.generation} is current"
            )
        while generation > living.generation:
            # Alone and restarted without saved state: the pool is empty, and the client's generation is right.
            living = await self._new_epoch(living, fence=True)
        if generation < 0:
            generation = living.generation
        state = self._node.namespaces.as_opened(living, generation)
        return client_wire.Opened(state.number, generation, state is living)

    async def reset(self, namespace: NamespaceState, generation: int) -> client_wire.Opened:
        """An engine's weights were of this generation, and are of the next one now.

        Starts the epoch of those weights, or enters it, if another engine's reset has started it: each
        engine resets once for each change of weights. An engine that is further behind stays out.
        """
        for _ in range(RESET_TRIES):
            living = self._node.namespaces.living(namespace)
            if living.generation > generation:
                state = self._node.namespaces.as_opened(living, generation + 1)
                return client_wire.Opened(state.number, generation + 1, state is living)
            # Repeated if an operator's clear comes in between, or this node had not heard of the last epoch.
            await self._new_epoch(living, fence=True)
        raise Unavailable(
            "other nodes keep changing the namespace's epoch at the same time: try again"
        )

    async def clear(self, tenant: Tenant, base: bytes, *, fence: bool) -> int:
        """An operator clears a namespace; returns its new epoch.

        Raises `InvalidRequest` for a namespace that neither this node nor the cluster knows.
        """
        epochs = tenant.epochs.get(base)
        if epochs:
            return (await self._new_epoch(epochs[-1], fence=fence)).epoch
        known = self._entry(tenant, base)
        if known is None:
            raise InvalidRequest(
                f"tenant {tenant.name!r} has no namespace {base.hex()}; `kvpool namespaces` lists its namespaces"
            )
        entry = await self._membership.bump_epoch(tenant.name, base.hex(), known.epoch, fence=fence)
        return entry.epoch

    async def _new_epoch(self, living: NamespaceState, *, fence: bool) -> NamespaceState:
        await self.register(living, living.settings)
        expected = self._node.namespaces.living(living).epoch
        try:
            entry = await self._membership.bump_epoch(
                living.tenant.name, living.base.hex(), expected, fence=fence
            )
        except InvalidRequest:
            entry = await self._register_again(living)
        entered = self._apply(living, entry)
        if not self._config.join:
            await self._local.keep_epoch(entered)
        return entered

    async def _register_again(self, namespace: NamespaceState) -> NamespaceEntry:
        """It was deleted, and this node has not heard of that: it begins anew, beyond all its former epochs."""
        living = self._node.namespaces.living(namespace)
        return await self._register(living, living.settings)

    async def configure(self, tenant: Tenant, base: bytes, change: SettingsChange) -> None:
        """Change settings of a namespace, for the whole cluster.

        Raises `LimitExceeded` for too many replicas, and `InvalidRequest` for an unknown namespace.
        """
        if change.replicas is not None and change.replicas > self._config.replicas_max:
            raise LimitExceeded(
                f"{change.replicas} replicas: at most {self._config.replicas_max} (replicas_max) of a block are "
                "allowed"
            )
        epochs = tenant.epochs.get(base)
        if not epochs:
            await self._membership.configure(tenant.name, base.hex(), change)
            return
        living = await self.register(epochs[-1], epochs[-1].settings)
        try:
            entry = await self._membership.configure(tenant.name, base.hex(), change)
        except InvalidRequest:
            living = self._apply(living, await self._register_again(living))
            entry = await self._membership.configure(tenant.name, base.hex(), change)
        living = self._apply(living, entry)
        if not self._config.join:
            await self._local.keep_epoch(living)
