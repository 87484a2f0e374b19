"""Namespaces and their epochs, as this node knows them.

A tenant may have so many; one more takes the place of one that holds nothing and that no client has open. To a freed
namespace this is what a restart of the daemon is to all: its epoch, fence and settings are the cluster's, and are asked
for when it is opened again. Its numbers are never given again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.daemon.core.block_index import BlockIndex
from kvpool.daemon.core.blocks import Block, Holder, NamespaceState, PartTable, Tenant
from kvpool.daemon.core.change_feed import ChangeFeed
from kvpool.daemon.core.ended_epochs import EndedEpochs
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.quotas import Quotas
from kvpool.errors import LimitExceeded, NamespaceMismatch, UnknownNamespace
from kvpool.types import PartSpec

EPOCHS_KEPT = 64  # ended epochs of a namespace that are remembered by name


class Former(NamedTuple):
    """What is left of an epoch that is forgotten by name, for the clients that opened it."""

    tenant: Tenant
    base: bytes
    epoch: int


@dataclass(eq=False, repr=False, slots=True)
class Namespaces:
    """The namespaces of all tenants, each with its present epoch last. Not thread-safe."""

    _tenants: Mapping[str, Tenant]
    _limits: Limits
    _ledger: Ledger
    _ended: EndedEpochs
    _quotas: Quotas
    _changes: ChangeFeed
    _new_index: Callable[[], BlockIndex[Block]]
    """Makes an index for the blocks of a table."""
    _by_directory: dict[bytes, NamespaceState] = field(default_factory=dict, init=False)
    _outdated: dict[tuple[str, bytes], NamespaceState] = field(default_factory=dict, init=False)
    """States for clients with old weights."""
    _numbered: list[NamespaceState | Former | None] = field(default_factory=list, init=False)
    """Namespaces by number, None where one was freed."""
    _tables: int = field(default=0, init=False)
    _users: dict[tuple[str, bytes], set[Holder]] = field(default_factory=dict, init=False)
    """Clients that opened a namespace; some are dead."""

    def open(
        self,
        tenant: Tenant,
        digest: bytes,
        fields: bytes,
        parts: Sequence[PartSpec],
        *,
        may_free: Callable[[NamespaceState], bool] | None = None,
    ) -> NamespaceState:
        """The namespace with these fields in its present epoch, created if new. digest: of the fields.

        Its number is valid for this incarnation, unless it is freed: see `opened`. Raises `NamespaceMismatch` if
        it is known with other parts, and `LimitExceeded` if there are too many of which none can be freed.

        may_free: whether one that holds nothing here, and that no client has open, may make room; None: none may.
        """
        epochs = tenant.epochs.get(digest)
        if epochs:
            known = epochs[-1]
            if known.parts != tuple(parts):
                raise NamespaceMismatch(mismatch(known.parts, tuple(parts), digest))
            tenant.epochs[digest] = tenant.epochs.pop(digest)  # those opened last are freed last
            return known
        for spec in parts:
            tenant.allocator.stride_of(spec.nbytes)  # rejects invalid parts before anything changes
        full = len(tenant.epochs) >= self._limits.namespaces_per_tenant
        if full and not (may_free and self._free_one(tenant, may_free)):
            raise LimitExceeded(
                f"tenant {tenant.name!r} has {len(tenant.epochs)} namespaces, the limit, and none is empty and unused"
            )
        return self._begin_epoch(self._state(tenant, digest, fields, parts, 0, 0))

    def opened(self, holder: Holder, namespace: NamespaceState) -> None:
        """A client has it open, and a number of it: it is not freed before the client is dead."""
        users = self._users.setdefault((namespace.tenant.name, namespace.base), set())
        users.intersection_update(namespace.tenant.holders.values())
        users.add(holder)

    def closed(self, holder: Holder, namespace: NamespaceState) -> None:
        """A client does not use it any more."""
        self._users.get((namespace.tenant.name, namespace.base), set()).discard(holder)

    def in_use(self, tenant: Tenant, base: bytes) -> bool:
        """Whether a client has a namespace open, or it has slots here."""
        self._ledger.settle()
        users = self._users.get((tenant.name, base), ())
        return any(id(user) in tenant.holders for user in users) or self.holds(tenant, base)

    def holds(self, tenant: Tenant, base: bytes) -> bool:
        """Whether a namespace has slots here, in any epoch."""
        states = [*tenant.epochs.get(base, ())]
        if (out := self._outdated.get((tenant.name, base))) is not None:
            states.append(out)
        return any(
            table.blocks or table.garbage or table.reserved
            for state in states
            for table in state.tables
        )

    def _free_one(self, tenant: Tenant, may_free: Callable[[NamespaceState], bool]) -> bool:
        """Free the namespace, of those not needed, that was opened longest ago. O(namespaces of the tenant)."""
        self._ledger.settle()
        clients = set(tenant.holders.values())
        for base, epochs in tenant.epochs.items():
            living = epochs[-1]
            users = self._users.get((tenant.name, base), set())
            if (
                users.isdisjoint(clients)
                and not living.quota  # what an operator reserved stays so
                and not self.holds(tenant, base)
                and may_free(living)
            ):
                self._free(living)
                return True
        return False

    def _free(self, living: NamespaceState) -> None:
        """Forget a namespace; whoever still refers to it meets an ended epoch."""
        tenant, base = living.tenant, living.base
        states = tenant.epochs.pop(base)
        del tenant.namespaces[living.digest]
        if (out := self._outdated.pop((tenant.name, base), None)) is not None:
            states.append(out)
        self._users.pop((tenant.name, base), None)
        if not tenant.fences.get(base):  # a fence is not forgotten
            tenant.fences.pop(base, None)
        self._changes.freed(living)
        for state in states:
            state.retired = True
            self._by_directory.pop(state.directory_digest, None)
            self._numbered[state.number] = None

    def _state(
        self,
        tenant: Tenant,
        base: bytes,
        fields: bytes,
        parts: Sequence[PartSpec],
        epoch: int,
        generation: int,
    ) -> NamespaceState:
        """A state with a number and empty tables, not registered yet."""
        number = len(self._numbered)
        namespace = NamespaceState(tenant, base, fields, tuple(parts), number, epoch, generation)
        for part, spec in enumerate(parts):
            namespace.tables.append(self._new_table(namespace, part, spec))
        self._numbered.append(namespace)
        return namespace

    def add_table(self, namespace: NamespaceState, spec: PartSpec) -> PartTable:
        """Another table of a namespace in this epoch, after those of its parts.

        For owners that keep blocks of a part in slots of several lengths: the owner decides which table
        a block is in. Raises `LimitExceeded` if the segment has no class for its slots.
        """
        table = self._new_table(namespace, len(namespace.tables), spec)
        namespace.tables.append(table)
        if namespace.quota:
            self._quotas.divide(namespace, [table])
        return table

    def _new_table(self, namespace: NamespaceState, part: int, spec: PartSpec) -> PartTable:
        stride = namespace.tenant.allocator.stride_of(spec.nbytes)
        self._tables += 1
        return PartTable(namespace, part, spec, self._tables - 1, stride, self._new_index())

    def _begin_epoch(self, namespace: NamespaceState) -> NamespaceState:
        tenant = namespace.tenant
        tenant.epochs.setdefault(namespace.base, []).append(namespace)
        tenant.namespaces[namespace.digest] = namespace
        self._by_directory[namespace.directory_digest] = namespace
        return namespace

    def as_opened(self, namespace: NamespaceState, generation: int) -> NamespaceState:
        """The state for a client with weights of this generation: the living one, or a fenced-out one.

        For clients that opened the namespace before this daemon started. The client's generation cannot be newer:
        learn of the new generation first (`set_epoch`).
        """
        living = self.living(namespace)
        return living if generation >= living.generation else self._fenced_out(living)

    def _fenced_out(self, living: NamespaceState) -> NamespaceState:
        """The state of all clients with older weights: they find nothing and store nothing."""
        out = self._outdated.get((living.tenant.name, living.base))
        if out is None:
            out = self._state(living.tenant, living.base, living.fields, living.parts, 0, -1)
            out.retired = True
            self._outdated[living.tenant.name, living.base] = out
        return out

    def set_epoch(
        self, namespace: NamespaceState, epoch: int, fence: int, generation: int | None = None
    ) -> NamespaceState:
        """Move a namespace to this epoch, valid in the whole cluster; returns its living state.

        generation: of the weights; default: a new fence counts as one more.

        All blocks of older epochs are misses from here on; their slots are freed a few at a time
        (`EndedEpochs.reclaim`), leased ones when the lease ends. Their pins no longer count in quotas.
        Open reservations are dropped at their commit. Clients that opened it in an epoch below
        `fence` find nothing and store nothing until they reopen it; others continue in the new epoch.
        Epochs never go back. One that was freed meanwhile stays as it is.
        """
        self._ledger.settle()
        tenant, base = namespace.tenant, namespace.base
        epochs = tenant.epochs.get(base)
        if epochs is None:
            return namespace
        living = epochs[-1]
        if generation is None:
            generation = living.generation + (fence > tenant.fences.get(base, 0))
        tenant.fences[base] = max(fence, tenant.fences.get(base, 0))
        if epoch <= living.epoch:
            return living
        living.retired = True
        del tenant.namespaces[living.digest]
        self._ended.add(living.tables)
        self._changes.waits_end(living)
        if len(epochs) > EPOCHS_KEPT:
            self._forget(epochs.pop(0))
        generation = max(generation, living.generation)
        new = self._begin_epoch(
            self._state(tenant, base, living.fields, living.parts, epoch, generation)
        )
        new.settings = living.settings
        self._quotas.pass_on(living, new)
        return new

    def _forget(self, ended: NamespaceState) -> None:
        """An epoch is too old to be known by name. Its number stays valid, and its state goes."""
        self._by_directory.pop(ended.directory_digest, None)
        self._numbered[ended.number] = (
            self._fenced_out(ended)
            if ended.fenced
            else Former(ended.tenant, ended.base, ended.epoch)
        )

    # ---- to find them --------------------------------------------------------------------------------

    def living(self, namespace: NamespaceState) -> NamespaceState:
        """The same namespace in its present epoch; itself, retired, if it was freed."""
        epochs = namespace.tenant.epochs.get(namespace.base)
        return epochs[-1] if epochs else namespace

    def by_number(self, tenant: Tenant, number: int) -> NamespaceState:
        """The namespace with this number, for its own tenant only.

        If its epoch has ended, this is the next one, unless a fence is in between. Raises `UnknownNamespace`, also
        if it was freed.
        """
        found = self._numbered[number] if 0 <= number < len(self._numbered) else None
        if found is not None and found.tenant is tenant:
            if not isinstance(found, Former):
                return self.living(found) if found.retired and not found.fenced else found
            if epochs := tenant.epochs.get(found.base):
                fenced = found.epoch < tenant.fences.get(found.base, 0)
                return self._fenced_out(epochs[-1]) if fenced else epochs[-1]
        raise UnknownNamespace(
            f"namespace number {number} is not open here; open the namespace first"
        )

    def by_directory(self, digest: bytes) -> NamespaceState | None:
        """The namespace with this directory digest; for a while also an ended epoch."""
        return self._by_directory.get(digest)

    @property
    def any_replicas(self) -> bool:
        """Whether several replicas are wanted of some namespace's blocks."""
        return any(
            namespace.settings.replicas > 1
            for tenant in self._tenants.values()
            for namespace in tenant.namespaces.values()
        )


def mismatch(known: tuple[PartSpec, ...], asked: tuple[PartSpec, ...], digest: bytes) -> str:
    """The difference, and the remedy."""
    name = digest.hex()
    advice = "Put what makes them differ into the namespace's fields"
    if len(known) != len(asked):
        return f"namespace {name} has {len(known)} parts here, not {len(asked)}. {advice}"
    part = next(i for i, pair in enumerate(zip(known, asked, strict=True)) if pair[0] != pair[1])
    return (
        f"part {part} of namespace {name} is {known[part].nbytes} bytes "
        f"({known[part].kind}) here, not {asked[part].nbytes} ({asked[part].kind}). {advice}"
    )
