"""The books of slots below memory: which block is in which slot of a disk, or of spare device memory.

The rules of the slots are those of memory: a `Node` of its own for each life of the process that has the slots.

Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvpool.daemon.core.blocks import Block, Holder, Lease, NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import EMPTY_KEY
from kvpool.types import BlockStatus, PartSpec, split_keys
from kvpool.wire import worker as worker_wire


class SlotBooks:
    """See the module. make_rules: rules of empty slots."""

    make_rules: Callable[[], Node]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.state = TierState.OPENING
        self.error = ""
        # Of this life of the process; those of an earlier one do not apply.
        self.rules = self.make_rules()
        self.holders: dict[str, Holder] = {}  # of the tier itself, by tenant
        self._changed: Callable[[], object] | None = None

    def renew(self) -> None:
        """A life of the process has begun, or ended: nothing is in its slots."""
        self.holders = {}
        former, self.rules = self.rules, self.make_rules()
        former.end()
        if self._changed is not None:
            self.rules.inventory.follow_changes(self._changed)
        self.rules.inventory.tell_of_end(former.inventory)

    def follow_changes(self, changed: Callable[[], object]) -> None:
        """See `Inventory.follow_changes`: in this life and later ones."""
        self._changed = changed
        self.rules.inventory.follow_changes(changed)

    def open_state(
        self, namespace: NamespaceState, specs: Sequence[PartSpec]
    ) -> NamespaceState | None:
        """The rules' own state of a namespace; None if its tenant has no slots, or its epoch is over.

        specs: of its slots. Raises `InvalidRequest` or `LimitExceeded` if it cannot be here.
        """
        known = self.rules.namespaces.by_directory(namespace.directory_digest)
        if known is not None:
            return None if known.retired else known
        tenant = self.rules.tenants.get(namespace.tenant.name)
        if tenant is None or namespace.retired:
            return None
        state = self.rules.namespaces.open(
            *(tenant, namespace.base, namespace.fields, specs),
            # What memory has freed.
            may_free=lambda old: old.base not in namespace.tenant.epochs,
        )
        state = self.rules.namespaces.set_epoch(state, namespace.epoch, 0, namespace.generation)
        return state if state.epoch == namespace.epoch else None

    def state_of(self, namespace: NamespaceState) -> NamespaceState | None:
        """The state here of a namespace in memory; None: nothing is here."""
        state = self.rules.namespaces.by_directory(namespace.directory_digest)
        return None if state is None or state.retired else state

    def table(self, table: PartTable) -> PartTable | None:
        """The state here of a table in memory."""
        state = self.state_of(table.namespace)
        return None if state is None else state.tables[table.part]

    def enter(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch: its older blocks here are misses."""
        tenant = self.rules.tenants.get(namespace.tenant.name)
        epochs = None if tenant is None else tenant.epochs.get(namespace.base)
        if epochs is not None:
            self.rules.namespaces.set_epoch(epochs[-1], namespace.epoch, 0, namespace.generation)

    def remove(self, namespace: NamespaceState, packed: bytes) -> set[bytes]:
        """See `LocalTier`."""
        state = self.rules.namespaces.by_directory(namespace.directory_digest)
        return set() if state is None else self.rules.removal.remove(state, split_keys(packed))

    def lease(self, own: PartTable, keys: Sequence[bytes]) -> Lease | None:
        """Keep those of the blocks that are here in their slots, until `release`."""
        holder = self.holders[own.namespace.tenant.name]
        return self.rules.leases.acquire(
            *(holder, own.namespace, [own.part], keys, None, self.clock()), scattered=True
        )

    def release(self, rules: Node, own: PartTable, lease: Lease) -> None:
        """rules: of the lease; nothing to release if its life has ended."""
        if self.rules is rules:
            rules.leases.release(self.holders[own.namespace.tenant.name], lease.token)

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are in use."""
        return sum(tenant.allocator.bytes_used for tenant in self.rules.tenants.values())


def leased(leases: Iterable[Lease], keys: Sequence[bytes]) -> tuple[list[int], list[Block]]:
    """Which of these keys are leased, by their numbers, and their blocks."""
    found = {
        block.key: block
        for lease in leases
        for _, blocks in lease.parts.values()
        for block in blocks
    }
    at = [index for index, key in enumerate(keys) if key in found]
    return at, [found[keys[index]] for index in at]


def pulled_none(count: int) -> worker_wire.Pulled:
    """None of so many blocks is here."""
    return worker_wire.Pulled(bytes(count), EMPTY_KEY * count, 0.0)


def pulled_some(
    count: int, at: Sequence[int], checksums: bytes, statuses: bytes, pulled: worker_wire.Pulled
) -> worker_wire.Pulled:
    """What became of so many blocks, of which those `at` these numbers were read.

    checksums: of those that were read. statuses: theirs.
    """
    status, sums = bytearray(count), [EMPTY_KEY] * count
    present = int(BlockStatus.PRESENT)
    for index, checksum, one in zip(at, split_keys(checksums), statuses, strict=True):
        status[index] = one
        if one == present:
            sums[index] = checksum
    return worker_wire.Pulled(bytes(status), b"".join(sums), pulled.seconds, pulled.error)
