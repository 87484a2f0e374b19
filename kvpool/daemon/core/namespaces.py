"""Namespaces and their epochs, as this node knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvpool.daemon.core.block_index import BlockIndex
from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable, Tenant
from kvpool.daemon.core.commit_waiters import CommitWaiters
from kvpool.daemon.core.ended_epochs import EndedEpochs
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.quotas import Quotas
from kvpool.errors import InvalidRequest, LimitExceeded, NamespaceMismatch
from kvpool.telemetry.node_stats import Counters
from kvpool.types import PartSpec

EPOCHS_KEPT = 64  # ended epochs of a namespace that are remembered by name


class Former(NamedTuple):
    """What is left of an epoch that is forgotten by name, for the clients that opened it."""

    tenant: Tenant
    base: bytes
    epoch: int


class Namespaces:
    """The namespaces of all tenants, each with its present epoch last. Not thread-safe."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        limits: Limits,
        ledger: Ledger,
        ended: EndedEpochs,
        quotas: Quotas,
        commit_waiters: CommitWaiters,
        counters: Counters,
        new_index: Callable[[], BlockIndex[Block]],
    ) -> None:
        """new_index: for the blocks of a table."""
        self._new_index = new_index
        self._tenants = tenants
        self._limits = limits
        self._ledger = ledger
        self._ended = ended
        self._quotas = quotas
        self._commit_waiters = commit_waiters
        self._counters = counters
        self._by_directory: dict[bytes, NamespaceState] = {}
        self._outdated: dict[tuple[str, bytes], NamespaceState] = {}  # for clients with old weights
        self._numbered: list[NamespaceState | Former] = []
        self._tables = 0

    def open(
        self, tenant: Tenant, digest: bytes, fields: bytes, parts: Sequence[PartSpec]
    ) -> NamespaceState:
        """The namespace with these fields in its present epoch, created if new. digest: of the fields.

        Its number is valid for this incarnation. Raises `NamespaceMismatch` if it is known with other
        parts.
        """
        epochs = tenant.epochs.get(digest)
        if epochs:
            known = epochs[-1]
            if known.parts != tuple(parts):
                raise NamespaceMismatch(mismatch(known.parts, tuple(parts), digest))
            return known
        if len(tenant.epochs) >= self._limits.namespaces_per_tenant:
            raise LimitExceeded(
                f"tenant {tenant.name!r} has {len(tenant.epochs)} namespaces, the limit"
            )
        for spec in parts:
            tenant.allocator.stride_of(spec.nbytes)  # rejects invalid parts before anything changes
        return self._begin_epoch(self._state(tenant, digest, fields, parts, 0, 0))

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
        namespace = NamespaceState(tenant, base, fields, parts, number, epoch, generation)
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
        Epochs never go back.
        """
        self._ledger.settle()
        tenant, base = namespace.tenant, namespace.base
        epochs = tenant.epochs[base]
        living = epochs[-1]
        if generation is None:
            generation = living.generation + (fence > tenant.fences.get(base, 0))
        tenant.fences[base] = max(fence, tenant.fences.get(base, 0))
        if epoch <= living.epoch:
            return living
        living.retired = True
        del tenant.namespaces[living.digest]
        self._ended.add(living.tables)
        self._counters.epochs_ended += 1
        self._commit_waiters.end(living.directory_digest)
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
        """The same namespace in its present epoch."""
        return namespace.tenant.epochs[namespace.base][-1]

    def by_number(self, tenant: Tenant, number: int) -> NamespaceState:
        """The namespace with this number, for its own tenant only.

        If its epoch has ended, this is the next one, unless a fence is in between.
        """
        if 0 <= number < len(self._numbered):
            found = self._numbered[number]
            if found.tenant is tenant:
                if isinstance(found, Former):
                    living = tenant.epochs[found.base][-1]
                    fenced = found.epoch < tenant.fences.get(found.base, 0)
                    return self._fenced_out(living) if fenced else living
                if found.retired and not found.fenced:
                    return self.living(found)
                return found
        raise InvalidRequest(
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
