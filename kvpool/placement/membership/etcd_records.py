"""What the nodes of a cluster share in etcd: its configuration, namespaces and their epochs, wishes to drain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool.errors import (
    ConfigError,
    InvalidRequest,
    KvpoolError,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
)
from kvpool.placement.etcd.client import EtcdClient, absent, delete, found, put, read, unchanged
from kvpool.placement.membership.admission import (
    after_deletion,
    begun,
    bumped,
    configured,
    founding,
    later,
    noted,
    renewed,
)
from kvpool.placement.membership.etcd_mirror import Mirror, Paths
from kvpool.placement.records import (
    ClusterConfig,
    NamespaceClock,
    NamespaceEntry,
    SettingsChange,
    check_clock,
    check_entry,
    decode_record,
    encode_record,
)

CHANGES_MAX = 10  # attempts to change a record that others change at the same time


@contextlib.contextmanager
def refusals_as_unavailable() -> Iterator[None]:
    """Who is a member survives a role that was revoked and a password that was changed: they can be put right."""
    try:
        yield
    except NotAuthenticated as error:
        raise Unavailable(str(error)) from None


@dataclass(eq=False)
class SharedRecords:
    """Reads and changes them. What it writes is in the mirror's view at once; `told` hears whether that changed it."""

    client: EtcdClient
    mirror: Mirror
    paths: Paths
    own_config: Callable[[], ClusterConfig]
    told: Callable[[bool], None]

    async def _txn(self, *request: Any) -> Any:
        """See `EtcdClient.txn`, whose arguments it takes; a refusal is `Unavailable`."""
        with refusals_as_unavailable():
            return await self.client.txn(*request)

    @property
    def config(self) -> ClusterConfig:
        """The cluster's configuration, after `agree`."""
        config = self.mirror.view.config
        assert config is not None, "it was written or read before"
        return config

    async def agree(self, deadline_s: float) -> None:
        """Write the cluster's configuration if there is none. Raises `ConfigError` for one that cannot be read."""
        key = self.paths.config
        if self.mirror.view.config is None:
            ours = encode_record(founding(self.own_config()))
            answer = await self.client.txn(
                [absent(key)], [put(key, ours)], [read(key)], "founding the cluster", deadline_s
            )
            stored = ours
            if not answer.succeeded and (kv := found(answer, 0)) is not None:
                stored = kv.value
            try:
                decode_record(stored, ClusterConfig, key.decode())
            except ProtocolError as error:
                raise ConfigError(
                    f"etcd's record of the cluster cannot be read: {error}. "
                    "If no node of a newer version wrote it, delete it and start again"
                ) from None
            self.told(self.mirror.wrote(answer.header.revision, {key: stored}))

    async def renew_proof(self) -> None:
        """Write the newest secret's proof, if this node has one that is newer than the cluster's.

        One try: where another node writes at the same time, the next call finds what it wrote. Raises `KvpoolError`.
        """
        key, ours = self.paths.config, self.own_config()
        if renewed(self.config, ours) == self.config:
            return
        answer = await self._txn([], [read(key)], [], "reading the cluster's configuration")
        kv = found(answer, 0)
        if kv is None:
            return  # etcd has lost it: `save_again`
        value = encode_record(renewed(decode_record(kv.value, ClusterConfig, key.decode()), ours))
        answer = await self._txn(
            [unchanged(key, kv.mod_revision)], [put(key, value)], [], "renewing the secret's proof"
        )
        if answer.succeeded:
            self.told(self.mirror.wrote(answer.header.revision, {key: value}))

    async def save_again(self) -> None:
        """Put back what etcd has lost, as far as this node knows it. Raises `KvpoolError`."""
        await self._txn(
            [absent(self.paths.config)],
            [
                put(
                    self.paths.config,
                    encode_record(self.mirror.view.config or founding(self.own_config())),
                )
            ],
            [],
            "putting the cluster's configuration back",
        )
        failed: KvpoolError | None = None
        for entry in self.mirror.unsaved:
            try:
                await self._raise_epoch(entry)
            except KvpoolError as error:
                failed = error
        if self.mirror.clock_lost:  # last: until then, what is missing does not look deleted
            await self._change_clock(lambda stored: stored)
        if failed is not None:
            raise failed

    async def _raise_epoch(self, entry: NamespaceEntry) -> None:
        def change(stored: NamespaceEntry) -> NamespaceEntry:
            kept = stored if stored.epoch >= entry.epoch else entry
            return msgspec.structs.replace(kept, used=max(stored.used, entry.used))

        key, what = self.paths.namespace(entry.tenant, entry.digest), "putting an epoch back"
        await self._txn([absent(key)], [put(key, encode_record(entry))], [], what)
        await self._change(entry.tenant, entry.digest, change, what)

    async def use_or_create(self, entry: NamespaceEntry) -> NamespaceEntry:
        """The entry of a namespace, noted as used."""
        try:
            return await self.use(entry.tenant, entry.digest)
        except InvalidRequest:  # deleted since it was read
            return await self.create_or_read(entry)

    async def create_or_read(self, entry: NamespaceEntry) -> NamespaceEntry:
        """As stored, after storing it if necessary."""
        key = self.paths.namespace(entry.tenant, entry.digest)
        what = f"registering namespace {entry.digest}"
        clock, clock_revision = self.mirror.clock, self.mirror.clock_revision
        for _ in range(CHANGES_MAX):
            # By the clock of this very moment: another namespace of this name may just have been deleted.
            value = encode_record(noted(begun(entry, clock), clock))
            answer = await self._txn(
                [absent(key), unchanged(self.paths.clock, clock_revision)],
                [put(key, value)],
                [read(key), read(self.paths.clock)],
                what,
            )
            if answer.succeeded:
                revision = answer.header.revision
                return self._take_namespace(value, entry.tenant, entry.digest, revision)
            if (kv := found(answer, 0)) is not None:
                return self._take_namespace(kv.value, entry.tenant, entry.digest, 0)
            stored, clock_revision = self._clock_in(found(answer, 1))
            clock = later(self.mirror.clock, stored)
        raise Unavailable(f"{what}: the clock of the namespaces kept changing at the same time")

    def _clock_in(self, kv: Any | None) -> tuple[NamespaceClock, int]:
        """The clock that etcd has, and its revision; 0: it has none. Raises `Unavailable` if it cannot be decoded."""
        if kv is None:
            return NamespaceClock(), 0
        where = self.paths.clock.decode()
        try:
            clock = check_clock(decode_record(kv.value, NamespaceClock, where), where)
        except ProtocolError as error:
            raise Unavailable(
                f"{error}. A node of a newer version may have written it: upgrade"
            ) from None
        return clock, kv.mod_revision

    async def use(self, tenant: str, digest: str) -> NamespaceEntry:
        def change(entry: NamespaceEntry) -> NamespaceEntry:
            return noted(entry, self.mirror.clock)

        return await self._change(tenant, digest, change, "noting the use of a namespace")

    async def count_hour(self, hours: int) -> None:
        def change(clock: NamespaceClock) -> NamespaceClock:
            passed = int(clock.hours == hours)
            return msgspec.structs.replace(clock, hours=clock.hours + passed)

        await self._change_clock(change)

    async def _change_clock(self, change: Callable[[NamespaceClock], NamespaceClock]) -> None:
        """Change it, and write what this node knows better. Raises `Unavailable`."""
        key, what = self.paths.clock, "the clock of the namespaces"
        for _ in range(CHANGES_MAX):
            answer = await self._txn([], [read(key)], [], what)
            stored, revision = self._clock_in(found(answer, 0))
            changed = later(self.mirror.clock, change(stored))
            if changed == stored:
                return
            value = encode_record(changed)
            answer = await self._txn([unchanged(key, revision)], [put(key, value)], [], what)
            if answer.succeeded:
                self.told(self.mirror.wrote(answer.header.revision, {key: value}))
                return
        raise Unavailable(f"{what}: other nodes kept changing it at the same time")

    async def delete_unused(self, tenant: str, digest: str, used: int) -> bool:
        """One try: whoever changes it at the same time uses it."""
        key, what = self.paths.namespace(tenant, digest), f"deleting namespace {digest}"
        there = await self._txn([], [read(key), read(self.paths.clock)], [], what)
        kv = found(there, 0)
        if kv is None:
            return False
        entry = self._take_namespace(kv.value, tenant, digest, 0)
        known = self.mirror.view.namespaces.get((tenant, digest))
        if entry.used > used or (known is not None and known.epoch > entry.epoch):
            return False  # in the second case etcd is yet to be told of its epoch
        stored, clock_revision = self._clock_in(found(there, 1))
        clock = later(self.mirror.clock, stored)
        moved = after_deletion(clock, entry)
        written = {} if moved == stored else {self.paths.clock: encode_record(moved)}
        answer = await self._txn(
            [unchanged(key, kv.mod_revision), unchanged(self.paths.clock, clock_revision)],
            [*(put(*pair) for pair in written.items()), delete(key)],
            [],
            what,
        )
        if answer.succeeded:
            self.told(self.mirror.wrote(answer.header.revision, written, [key]))
        return bool(answer.succeeded)

    def _take_namespace(
        self, value: bytes, tenant: str, digest: str, revision: int
    ) -> NamespaceEntry:
        """Decode the stored value; put it into the view if it was written just now, at `revision`."""
        key = self.paths.namespace(tenant, digest)
        try:
            entry = decode_record(value, NamespaceEntry, key.decode())
            check_entry(entry, key.decode())
        except ProtocolError as error:
            raise Unavailable(
                f"{error}. If no node of a newer version wrote it, delete it from etcd"
            ) from None
        self.told(self.mirror.wrote(revision, {key: value}))
        return entry

    async def bump_epoch(
        self, tenant: str, digest: str, expected: int, *, fence: bool
    ) -> NamespaceEntry:
        def change(entry: NamespaceEntry) -> NamespaceEntry:
            return bumped(entry, expected, fence=fence)

        return await self._change(tenant, digest, change, "beginning a new epoch")

    async def configure(self, tenant: str, digest: str, change: SettingsChange) -> NamespaceEntry:
        def apply(entry: NamespaceEntry) -> NamespaceEntry:
            return configured(entry, change)

        return await self._change(tenant, digest, apply, "changing settings")

    async def _change(
        self,
        tenant: str,
        digest: str,
        change: Callable[[NamespaceEntry], NamespaceEntry],
        what: str,
    ) -> NamespaceEntry:
        """Read, change, and write if nobody else has written meanwhile; else repeat."""
        key = self.paths.namespace(tenant, digest)
        for _ in range(CHANGES_MAX):
            kv = found(await self._txn([], [read(key)], [], what), 0)
            if kv is None:
                raise InvalidRequest(
                    f"{what}: the cluster knows no namespace {digest} of tenant {tenant!r}"
                )
            entry = self._take_namespace(kv.value, tenant, digest, 0)
            changed = change(entry)
            if changed == entry:
                return entry
            value = encode_record(changed)
            answer = await self._txn([unchanged(key, kv.mod_revision)], [put(key, value)], [], what)
            if answer.succeeded:
                return self._take_namespace(value, tenant, digest, answer.header.revision)
        raise Unavailable(f"{what}: other nodes kept changing namespace {digest} at the same time")

    async def set_drain(self, node: str, wanted: bool) -> None:
        key = self.paths.drain(node)
        write = put(key, b"") if wanted else delete(key)
        answer = await self._txn([], [write], [], f"the drain of {node!r}")
        revision = answer.header.revision
        if wanted:
            self.told(self.mirror.wrote(revision, {key: b""}))
        else:
            self.told(self.mirror.wrote(revision, {}, [key]))
