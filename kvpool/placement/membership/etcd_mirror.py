"""The known state of the cluster's records in etcd, and the view that follows. No I/O.

Below `/kvpool/<cluster>/`:

    config                       ClusterConfig; written by the first node
    nodes/<node>                 NodeRecord; bound to the node's lease
    incarnations/<hex>           the node's name; bound to the same lease
    namespaces/<tenant>/<digest> NamespaceEntry
    clock                        NamespaceClock
    drains/<node>                empty; an operator wants the node drained
    chores/<chore>               the name of the node that does it; bound to its lease

Other keys belong to later versions, and are ignored. Unreadable values are ignored and counted, and so are addresses of
nodes that this version cannot use; the rest of their record is used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from kvpool.errors import ConfigError, ProtocolError
from kvpool.net import host_and_port, scheme_of
from kvpool.placement.etcd import rpc_pb2 as rpc
from kvpool.placement.membership.admission import begun, later
from kvpool.placement.records import (
    INCARNATION_BYTES,
    ClusterConfig,
    NamespaceClock,
    NamespaceEntry,
    NodeRecord,
    NodeState,
    View,
    check_clock,
    check_entry,
    decode_record,
)

log = logging.getLogger("kvpool.placement")

LOGGED_MAX = 1000  # keys whose contents were logged as invalid
INCARNATION = re.compile(rf"[0-9a-f]{{{2 * INCARNATION_BYTES}}}")


class Paths:
    """The keys of one cluster. Raises `ConfigError` for a name that would not be one path element."""

    def __init__(self, cluster: str) -> None:
        self.root = f"/kvpool/{element(cluster, 'a cluster')}/".encode()
        self.config = self.root + b"config"
        self.clock = self.root + b"clock"

    def node(self, node: str) -> bytes:
        return self.root + b"nodes/" + element(node, "a node").encode()

    def incarnation(self, incarnation: str) -> bytes:
        return self.root + b"incarnations/" + incarnation.encode()

    def namespace(self, tenant: str, digest: str) -> bytes:
        return self.root + f"namespaces/{tenant}/{digest}".encode()

    def drain(self, node: str) -> bytes:
        return self.root + b"drains/" + element(node, "a node").encode()

    def chore(self, chore: str) -> bytes:
        return self.root + b"chores/" + element(chore, "a chore").encode()


def element(name: str, what: str) -> str:
    """The name, if it can be a path element."""
    if not name or "/" in name or not name.isprintable():
        raise ConfigError(
            f"{name!r} is not a valid name of {what}: use printable characters, without slashes"
        )
    return name


class Mirror:
    """The records as last seen, and the `View` made of them when it is asked for.

    A change is O(1); a view is O(records of the kinds that have changed), and shares the others with the one before.
    A record that is written again as it was stays the same object: whoever compares two views by identity finds
    what has changed.

    Deletions of nodes apply at once, except until the time given to `forgive`: after an outage of
    etcd, all leases may have ended although their nodes live, and each needs a moment to return. So
    nodes that are missing then stay in the view until that time is over (`tick`).

    A namespace is dropped only if it was deleted because nobody used it, and its epoch never goes back, even if etcd has
    lost its data: old misses must stay misses. A deletion moves the clock beyond the namespace's epoch in the same
    transaction, so one that is missing while the clock has not moved there, or has gone back, is lost. And one that
    appears below the clock was deleted before: a copy of etcd has brought it back. It is taken as beginning now.
    `unsaved` are the entries that etcd does not have as they are here; `clock_lost`: its clock has gone back.
    """

    def __init__(self, paths: Paths) -> None:
        self.undecodable = 0
        self.chores: dict[str, int] = {}  # the leader, by lease
        self.config_seen = False  # at the last reset
        self._paths = paths
        self._revision = 0  # the watch is complete up to here
        self._known: dict[bytes, int] = {}  # the revision that last changed each key
        self._nodes: dict[str, NodeRecord] = {}
        self._missing: dict[str, float] = {}  # in `_nodes`, but not in etcd: when to drop them
        self._namespaces: dict[tuple[str, str], NamespaceEntry] = {}
        self._saved: set[tuple[str, str]] = set()
        # Whose keys went away in the changes that are being read.
        self._absent: set[tuple[str, str]] = set()
        self.clock = NamespaceClock()
        self.clock_revision = 0  # at which etcd had this one; 0: it has none
        self.clock_lost = False
        self._drains: set[str] = set()
        self._config: ClusterConfig | None = None
        self._forgiven_until = float("-inf")
        self._logged: set[bytes] = set()
        self._view = View()
        self._stale: set[str] = set()  # fields of the view that have changed since
        self._urgent = False
        self._changes = 0

    @property
    def view(self) -> View:
        """The present one; the same object as long as nothing changes."""
        if self._stale:
            made: dict[str, Any] = {
                "nodes": lambda: MappingProxyType(dict(self._nodes)),
                "namespaces": lambda: MappingProxyType(dict(self._namespaces)),
                "clock": lambda: self.clock,
                "drains": lambda: frozenset(self._drains),
                "config": lambda: self._config,
            }
            changed = {name: made[name]() for name in self._stale}
            self._view = replace(self._view, revision=self._view.revision + 1, **changed)
            self._stale.clear()
            self._urgent = False
        return self._view

    # ---- what happens; each says whether the view has changed -----------------------------------------

    def reset(self, kvs: Iterable[Any], revision: int, now: float) -> bool:
        """These are all records (`rpc.KeyValue`), as of `revision`."""
        listed = {kv.key: kv for kv in kvs}
        before = self._changes
        self._revision = revision
        self._saved.clear()
        self.config_seen = self._paths.config in listed
        self.clock_revision = 0
        self.clock_lost = self.clock != NamespaceClock()  # until it is found in the list
        for key in self._known.keys() - listed.keys():
            self._delete(key, now)
        # An etcd that lost its data counts from 1 again.
        self._known = {}
        if (clock := listed.get(self._paths.clock)) is not None:
            self._put(clock)  # the namespaces are judged by it
        for kv in listed.values():
            if kv is not clock:
                self._put(kv)
        self._absent.update(
            key for key in self._namespaces if self._paths.namespace(*key) not in listed
        )
        self._drop_deleted()
        return self._changes != before

    def changed(self, events: Iterable[Any], revision: int, now: float) -> bool:
        """These changes (`rpc.Event`) came over the watch, the last one at `revision`."""
        before = self._changes
        self._revision = revision
        for event in events:
            if event.kv.mod_revision < self._known.get(event.kv.key, 0):
                continue  # our own later write is known already
            if event.type == rpc.Event.DELETE:
                self._delete(event.kv.key, now)
            else:
                self._put(event.kv)
        self._drop_deleted()
        return self._changes != before

    def wrote(self, revision: int, puts: dict[bytes, bytes], deletes: Iterable[bytes] = ()) -> bool:
        """This node has written this, at `revision`: its view has it before the watch brings it."""
        if revision <= self._revision:
            return False  # the watch was faster, and may have brought later changes, too
        before = self._changes
        for key in deletes:
            self._delete(key, float("inf"))
            self._known[key] = revision
        for key, value in puts.items():
            self._put(rpc.KeyValue(key=key, value=value, mod_revision=revision))
        self._drop_deleted()
        return self._changes != before

    def forgive(self, until: float) -> None:
        """Etcd was unavailable: nodes that turn out to be missing are kept until then."""
        self._forgiven_until = until

    def tick(self, now: float) -> bool:
        """Drop the nodes that did not return in time."""
        before = self._changes
        for node in [node for node, until in self._missing.items() if until <= now]:
            self._drop_node(node)
        return self._changes != before

    @property
    def urgent(self) -> bool:
        """Whether the next view differs in what somebody opens a namespace by, or drains a node."""
        return self._urgent and bool(self._stale)

    @property
    def next_tick(self) -> float | None:
        """When `tick` needs to be called next."""
        return min(self._missing.values(), default=None)

    @property
    def incomplete(self) -> bool:
        """Whether etcd lacks something of the namespaces: some are `unsaved`, or the clock is lost."""
        return self.clock_lost or len(self._saved) < len(self._namespaces)

    @property
    def unsaved(self) -> list[NamespaceEntry]:
        return [entry for key, entry in self._namespaces.items() if key not in self._saved]

    def _changed(self, field: str, *, urgent: bool = True) -> None:
        self._stale.add(field)
        self._urgent = self._urgent or urgent
        self._changes += 1

    def _drop_deleted(self) -> None:
        """Of the namespaces whose keys have gone, those that were deleted; the others are lost, and stay."""
        absent, self._absent = self._absent, set()
        if self.clock_lost:
            return
        for key in absent:
            entry = self._namespaces.get(key)
            if entry is not None and entry.epoch < self.clock.first_epoch:
                del self._namespaces[key]
                self._changed("namespaces")

    # ---- one key --------------------------------------------------------------------------------------

    def _split(self, key: bytes) -> tuple[str, str]:
        """(kind, name) of a key below the root."""
        text = key[len(self._paths.root) :].decode(errors="replace")
        kind, _, name = text.partition("/")
        return kind, name

    def _put(self, kv: Any) -> None:
        self._known[kv.key] = kv.mod_revision
        kind, name = self._split(kv.key)
        try:
            match kind:
                case "nodes":
                    self._put_node(name, kv)
                case "namespaces":
                    self._put_namespace(name, kv)
                case "config" if kv.key == self._paths.config:
                    self._put_config(kv)
                case "clock" if kv.key == self._paths.clock:
                    self._put_clock(kv)
                case "drains":
                    if name not in self._drains:
                        self._drains.add(name)
                        self._changed("drains")
                case "chores":
                    self.chores[name] = kv.lease
        except ProtocolError as error:
            self._skipped(kv.key, f"an invalid record in etcd is ignored: {error}")

    def _skipped(self, key: bytes, what: str) -> None:
        """Count a record that is ignored, wholly or in part; say it once for each key."""
        self.undecodable += 1
        if key not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(key)
            log.warning("%s", what)

    def _put_config(self, kv: Any) -> None:
        config = decode_record(kv.value, ClusterConfig, "the cluster's record")
        if config != self._config:
            self._config = config
            self._changed("config")

    def _put_clock(self, kv: Any) -> None:
        where = "the clock of the namespaces"
        stored = check_clock(decode_record(kv.value, NamespaceClock, where), where)
        clock = later(self.clock, stored)
        self.clock_revision, self.clock_lost = kv.mod_revision, clock != stored
        if clock != self.clock:
            self.clock = clock
            self._changed("clock", urgent=False)

    def _put_node(self, node: str, kv: Any) -> None:
        record = decode_node(kv.value, node)
        usable = tuple(each for each in record.transports if _is_usable(each.url))
        if len(usable) < len(record.transports):
            unknown = [each.url for each in record.transports if each not in usable]
            self._skipped(
                kv.key,
                f"the record of node {node!r} in etcd has addresses that this version cannot use, which are ignored: "
                f"{unknown!r:.500}",
            )
            record = msgspec.structs.replace(record, transports=usable)
        if record.state is NodeState.GONE:  # it is leaving, and its lease is about to end
            self._drop_node(node)
            return
        self._missing.pop(node, None)
        if self._nodes.get(node) != record:
            self._nodes[node] = record
            self._changed("nodes", urgent=False)

    def _drop_node(self, node: str) -> None:
        self._missing.pop(node, None)
        if self._nodes.pop(node, None) is not None:
            self._changed("nodes", urgent=False)

    def _put_namespace(self, name: str, kv: Any) -> None:
        where = f"the record of namespace {name!r}"
        entry = check_entry(decode_record(kv.value, NamespaceEntry, where), where)
        key = (entry.tenant, entry.digest)
        if "/".join(key) != name:
            raise ProtocolError(f"{where} contains the record of {'/'.join(key)!r}")
        self._saved.add(key)
        self._absent.discard(key)
        old = self._namespaces.get(key)
        if old is not None and old.epoch > entry.epoch:
            self._saved.discard(key)  # etcd was restored from a copy
            entry = msgspec.structs.replace(
                entry,
                epoch=old.epoch,
                fence=max(old.fence, entry.fence),
                generation=max(old.generation, entry.generation),
            )
        elif old is None and self._was_deleted(entry, kv):
            self._saved.discard(key)
            entry = begun(entry, self.clock)
        if old is not None and old.used > entry.used:  # of a copy of etcd
            self._saved.discard(key)
            entry = msgspec.structs.replace(entry, used=old.used)
        if old != entry:
            self._namespaces[key] = entry
            of_use = old is not None and msgspec.structs.replace(old, used=entry.used) == entry
            self._changed("namespaces", urgent=not of_use)

    def _was_deleted(self, entry: NamespaceEntry, kv: Any) -> bool:
        """Whether a namespace that appears cannot have been registered by the clock as it stands."""
        made_since = kv.create_revision > self.clock_revision or self.clock_lost
        # What this node writes itself has no revision of its making here, and is right.
        return made_since and kv.create_revision > 0 and entry.epoch < self.clock.first_epoch

    def _delete(self, key: bytes, now: float) -> None:
        self._known.pop(key, None)
        kind, name = self._split(key)
        match kind:
            case "nodes":
                if name in self._nodes and now < self._forgiven_until:
                    self._missing.setdefault(name, self._forgiven_until)
                else:
                    self._drop_node(name)
            case "drains":
                if name in self._drains:
                    self._drains.remove(name)
                    self._changed("drains")
            case "chores":
                self.chores.pop(name, None)
            case "namespaces":
                tenant, _, digest = name.rpartition("/")
                self._saved.discard((tenant, digest))
                self._absent.add((tenant, digest))
            case "clock":
                self.clock_revision, self.clock_lost = 0, True


def _is_usable(url: str) -> bool:
    """Whether a node can be reached at this URL, as far as it tells. Schemes of installed transports have forms of their
    own.
    """
    try:
        if scheme_of(url) in {"tcp", "nixl"}:
            host_and_port(url)
    except ConfigError:
        return False
    return True


def decode_node(value: bytes, node: str) -> NodeRecord:
    """A node's record, as stored under its name. Raises `ProtocolError`."""
    record = decode_record(value, NodeRecord, f"the record of node {node!r}")
    if record.node != node:
        raise ProtocolError(f"the record of node {node!r} contains {record.node!r}")
    if not INCARNATION.fullmatch(record.incarnation):
        raise ProtocolError(f"the record of node {node!r} has no incarnation")
    return record
