"""What the nodes of a cluster share in etcd: its configuration, namespaces and their epochs, wishes to drain."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.errors import ConfigError, InvalidRequest, ProtocolError, Unavailable
from kvpool.placement.etcd.client import (
    EtcdClient,
    absent,
    delete,
    found,
    put,
    read,
    unchanged,
)
from kvpool.placement.membership.admission import bumped, configured, founding, renewed
from kvpool.placement.membership.etcd_mirror import Mirror, Paths
from kvpool.placement.records import (
    ClusterConfig,
    NamespaceEntry,
    SettingsChange,
    check_entry,
    decode_record,
    encode_record,
)

CHANGES_MAX = 10  # attempts to change a record that others change at the same time


class SharedRecords:
    """Reads and changes them. What it writes is in the mirror's view at once; `told` hears whether that changed it."""

    def __init__(
        self,
        client: EtcdClient,
        mirror: Mirror,
        paths: Paths,
        own_config: Callable[[], ClusterConfig],
        told: Callable[[bool], None],
    ) -> None:
        self._client = client
        self._mirror = mirror
        self._paths = paths
        self._own_config = own_config
        self._told = told

    @property
    def config(self) -> ClusterConfig:
        """The cluster's configuration, after `agree`."""
        config = self._mirror.view.config
        assert config is not None, "it was written or read before"
        return config

    async def agree(self, deadline_s: float) -> None:
        """Write the cluster's configuration if there is none. Raises `ConfigError` for one that cannot be read."""
        key = self._paths.config
        if self._mirror.view.config is None:
            ours = encode_record(founding(self._own_config()))
            answer = await self._client.txn(
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
            self._told(self._mirror.wrote(answer.header.revision, {key: stored}))

    async def renew_proof(self) -> None:
        """Write the newest secret's proof, if this node has one that is newer than the cluster's.

        One try: where another node writes at the same time, the next call finds what it wrote. Raises `KvpoolError`.
        """
        key, ours = self._paths.config, self._own_config()
        if renewed(self.config, ours) == self.config:
            return
        answer = await self._client.txn([], [read(key)], [], "reading the cluster's configuration")
        kv = found(answer, 0)
        if kv is None:
            return  # etcd has lost it: `save_again`
        value = encode_record(renewed(decode_record(kv.value, ClusterConfig, key.decode()), ours))
        answer = await self._client.txn(
            [unchanged(key, kv.mod_revision)], [put(key, value)], [], "renewing the secret's proof"
        )
        if answer.succeeded:
            self._told(self._mirror.wrote(answer.header.revision, {key: value}))

    async def save_again(self) -> None:
        """Put back what etcd has lost, as far as this node knows it. Raises `KvpoolError`."""
        await self._client.txn(
            [absent(self._paths.config)],
            [
                put(
                    self._paths.config,
                    encode_record(self._mirror.view.config or founding(self._own_config())),
                )
            ],
            [],
            "putting the cluster's configuration back",
        )
        for entry in self._mirror.unsaved:
            await self._raise_epoch(entry)

    async def _raise_epoch(self, entry: NamespaceEntry) -> None:
        def change(stored: NamespaceEntry) -> NamespaceEntry:
            return stored if stored.epoch >= entry.epoch else entry

        await self.create_or_read(entry)
        await self._change(entry.tenant, entry.digest, change, "putting an epoch back")

    async def create_or_read(self, entry: NamespaceEntry) -> NamespaceEntry:
        """As stored, after storing it if necessary."""
        key = self._paths.namespace(entry.tenant, entry.digest)
        value = encode_record(entry)
        answer = await self._client.txn(
            [absent(key)], [put(key, value)], [read(key)], f"registering namespace {entry.digest}"
        )
        if not answer.succeeded:
            kv = found(answer, 0)
            assert kv is not None  # it is not absent, in the same transaction
            return self._take_namespace(kv.value, entry.tenant, entry.digest, 0)
        return self._take_namespace(value, entry.tenant, entry.digest, answer.header.revision)

    def _take_namespace(
        self, value: bytes, tenant: str, digest: str, revision: int
    ) -> NamespaceEntry:
        """Decode the stored value; put it into the view if it was written just now, at `revision`."""
        key = self._paths.namespace(tenant, digest)
        try:
            entry = decode_record(value, NamespaceEntry, key.decode())
            check_entry(entry, key.decode())
        except ProtocolError as error:
            raise Unavailable(
                f"{error}. If no node of a newer version wrote it, delete it from etcd"
            ) from None
        self._told(self._mirror.wrote(revision, {key: value}))
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
        key = self._paths.namespace(tenant, digest)
        for _ in range(CHANGES_MAX):
            kv = found(await self._client.txn([], [read(key)], [], what), 0)
            if kv is None:
                raise InvalidRequest(
                    f"{what}: the cluster knows no namespace {digest} of tenant {tenant!r}"
                )
            entry = self._take_namespace(kv.value, tenant, digest, 0)
            changed = change(entry)
            if changed == entry:
                return entry
            value = encode_record(changed)
            answer = await self._client.txn(
                [unchanged(key, kv.mod_revision)], [put(key, value)], [], what
            )
            if answer.succeeded:
                return self._take_namespace(value, tenant, digest, answer.header.revision)
        raise Unavailable(f"{what}: other nodes kept changing namespace {digest} at the same time")

    async def set_drain(self, node: str, wanted: bool) -> None:
        key = self._paths.drain(node)
        write = put(key, b"") if wanted else delete(key)
        answer = await self._client.txn([], [write], [], f"the drain of {node!r}")
        revision = answer.header.revision
        if wanted:
            self._told(self._mirror.wrote(revision, {key: b""}))
        else:
            self._told(self._mirror.wrote(revision, {}, [key]))
