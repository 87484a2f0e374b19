"""Operators' requests to a node: one place for all ways in. Event loop only.

A request arrives over the control socket, bare (about this node, for the connection's tenant) or in an `OnNode`,
which names node, tenant and on whose behalf; or from another node in an `Operate`, made from its operator's
`OnNode` there. Every change is one audit event (`event_log.AUDIT`), on the node that makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.engine_registry import describe as describe_engines
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import Block, Holder, NamespaceState, Tenant
from kvpool.daemon.core.masks import pack_masks, unpack_masks, width_for, width_of
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import parse_change
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import NOT_NODES, OBJECT
from kvpool.daemon.ops.event_log import AUDIT, EventLog
from kvpool.daemon.ops.intents import Intents, parse_wanted
from kvpool.daemon.ops.jobs import JobRunner, Work
from kvpool.daemon.ops.listing import describe_chains, describe_session, list_blocks, show_blocks
from kvpool.daemon.ops.miss_reasons import MissReasons
from kvpool.daemon.ops.pins import pin_in_all_tiers
from kvpool.daemon.ops.prefixes import prefixes
from kvpool.daemon.ops.receipts import AccountPeriods
from kvpool.daemon.ops.runtime_settings import changed, describe
from kvpool.daemon.ops.session_turns import SessionTurns
from kvpool.daemon.ops.stats_gatherer import StatsGatherer
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.tiers.tier_rules import TierRules
from kvpool.decoding import decode_hex, decode_json
from kvpool.errors import (
    ClusterUnavailable,
    InternalError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
)
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.telemetry import logs
from kvpool.telemetry.spans import Spans
from kvpool.types import KEY_BYTES, Intent, Outcome, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from kvpool.wire.command import COMMANDS
from kvpool.wire.jobs import JobSpec, Key, WarmJob, parse_job

KEYS_BYTES_MAX = frame.KEYS_MAX * KEY_BYTES
LOCATE_KEYS_MAX = 4096
SHOW_KEYS_MAX = 1024
LIST_SESSIONS_MAX = 1000
LIST_BLOCKS_MAX = 1000
EVICT_TOGETHER = 500  # in one go: about a millisecond
EVENTS_MAX = 1000  # in one answer
CLIENT = (
    "client "  # before the name of a client, where it is told on whose behalf something is asked
)
WAIT_S_MAX = 60.0
ANSWER_S = 5.0  # beyond a request's own wait, for the round trip
BY_CHARACTERS_MAX = 200

Answer = frame.Done | frame.Bytes
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
_OF_CLIENTS = {client_wire.Engines, client_wire.Prefixes, client_wire.Stats, client_wire.WhyMissing}


class _Named(msgspec.Struct, frozen=True):
    key: Key


class _Listed(msgspec.Struct, frozen=True):
    """The used fields of a `ListBlocks`' answer."""

    blocks: list[_Named]
    cursor: str | None


class Asks(Protocol):
    """How other nodes are asked: `Paths`."""

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes: ...


class Asker(NamedTuple):
    """Whose objects a request is about, and who makes it, for the audit log."""

    tenant: Tenant
    by: str


def answers(method: Handler) -> Handler:
    """Make a method of `Operators` the handler of the command that its argument `m` is.

    It returns a number or what is to be encoded as JSON, as the command declares.
    """
    (*_, kind, _) = get_type_hints(method).values()
    vars(method)["answers"] = kind
    return method


class Operators:
    """See the module. config: the current one, including operators' changes."""

    def __init__(
        self,
        config: DaemonConfig,
        node: Node,
        cluster: ClusterMember,
        tiers: SsdTier,
        store: ObjectTier,
        device: DeviceTier | None,
        rules: TierRules,
        fetcher: BlockFetcher,
        replication: Replication,
        engines: Engines,
        transport: Asks,
        sessions: SessionTurns,
        intents: Intents,
        journal: EventLog,
        stats: StatsGatherer,
        miss_reasons: MissReasons,
        receipts: AccountPeriods,
        spans: Spans,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.node = node
        self.cluster = cluster
        self.tiers = tiers
        self.store = store
        self.device = device
        self.fetcher = fetcher
        self.engines = engines
        self.journal = journal
        self._rules = rules
        self._replication = replication
        self._transport = transport
        self._sessions = sessions
        self._intents = intents
        self._clock = clock
        self._stats = stats
        self._miss_reasons = miss_reasons
        self._receipts = receipts
        self._spans = spans
        work = Work(tiers, fetcher, rules.by_tier, self._list_on, self._evict_on, clock)
        tenants = [each.name for each in config.all_tenants()]
        self.jobs = JobRunner(config.node, work, journal, clock, tenants)
        self._handlers: dict[type, Callable[[Asker, Any], Awaitable[Any]]] = {
            method.answers: getattr(self, name)
            for name, method in vars(type(self)).items()
            if hasattr(method, "answers")
        }

    @property
    def requests(self) -> tuple[type, ...]:
        """Requests that operators may make without an envelope; clients make some of these themselves."""
        return tuple(kind for kind in self._handlers if kind not in _OF_CLIENTS)

    async def close(self) -> None:
        """End all jobs."""
        await self.jobs.close()

    # ---- ways in -----------------------------------------------------------------------------------

    async def bare(self, holder: Holder, message: frame.Message) -> Answer:
        """A request about this node from a connection of an operator."""
        check_operator(holder)
        return await self._answer(holder.tenant, _user(holder), message)

    async def on_node(self, holder: Holder, m: operator_wire.OnNode) -> Answer:
        """A request in an envelope. Raises `KvpoolError`; `ClusterUnavailable` if another node fails."""
        check_operator(holder)
        tenant, by = m.tenant or holder.tenant.name, m.by[:BY_CHARACTERS_MAX] or _user(holder)
        wait_s = min(max(0.0, m.wait_s), WAIT_S_MAX)
        if m.node in {"", self.config.node}:
            return await self._answer(
                self._tenant(tenant), by, client_wire.decode_client(m.request)
            )
        with asking_others():
            return await self._pass_on(m.node, tenant, by, m.request, wait_s)

    async def _on(
        self, node: str, tenant: str, by: str, message: frame.Message, wait_s: float
    ) -> Answer:
        """Another node's answer."""
        payload = frame.encode(message, 0)[frame.HEADER.size :]
        return await self._pass_on(node, tenant, by, payload, wait_s)

    async def _pass_on(
        self, node: str, tenant: str, by: str, request: bytes, wait_s: float
    ) -> Answer:
        order = peer_wire.Operate(self.config.node, request, wait_s, tenant, by, node)
        answer = await self._transport.ask(
            worker_wire.AskPeer(self._url(node), order, wait_s + ANSWER_S)
        )
        if not isinstance(answer, frame.Bytes):
            raise ProtocolError("the answer to an Operate is not a Bytes message")
        found = client_wire.decode_daemon(answer.data)
        if isinstance(found, frame.Error):
            frame.raise_error(found)
        if not isinstance(found, (frame.Done, frame.Bytes)):
            raise ProtocolError(f"the answer to an Operate is a {type(found).__name__}")
        return found

    async def operated(self, order: peer_wire.Operate) -> frame.Bytes:
        """A request from another node; returns the payload of the answer."""
        by = f"{order.by[:BY_CHARACTERS_MAX]} on {order.node[:63]}"
        try:
            self._check_may_operate(order.node)
            answer: frame.Message = await self._answer(
                self._tenant(order.tenant), by, client_wire.decode_client(order.request)
            )
        except KvpoolError as error:
            answer = frame.error_message(error)
        return frame.Bytes(frame.encode(answer, 0)[frame.HEADER.size :])

    def _check_may_operate(self, node: str) -> None:
        """Raises `NotAuthenticated` where the configuration names nodes, and this is none of them."""
        allowed = self.config.operated_by
        if allowed and node not in allowed:
            raise NotAuthenticated(
                f"node {self.config.node} takes no operators' requests from node {node:.63}: use a node that its "
                "setting operated_by names, or its own socket"
            )

    def _tenant(self, name: str) -> Tenant:
        found = self.node.tenants.get(name)
        if found is None:
            raise InvalidRequest(f"node {self.config.node} has no tenant {name!r:.80}")
        return found

    def _url(self, node: str) -> str:
        record = self.cluster.view.nodes.get(node)
        if record is None or not record.url:
            raise InvalidRequest(
                f"there is no node {node!r:.80} in this cluster, or it does not listen; `kvpool nodes` lists the "
                "nodes"
            )
        return record.url

    async def _answer(self, tenant: Tenant, by: str, message: frame.Message) -> Answer:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise InvalidRequest(f"a {type(message).__name__} is not an operator's request")
        found = await handler(Asker(tenant, by), message)
        if COMMANDS[type(message)].answer is int:
            return frame.Done(found)
        return frame.Bytes(msgspec.json.encode(found))

    def _changed(self, by: str, what: str, **details: Any) -> None:
        self.journal.note(AUDIT, by=by, what=what, **details)

    # ---- looking -----------------------------------------------------------------------------------

    @answers
    async def _describe_cluster(self, _who: Asker, _m: operator_wire.Cluster) -> Any:
        return self.cluster.describe()

    @answers
    async def _inspect(self, _who: Asker, _m: operator_wire.Inspect) -> Any:
        return self._stats.all()

    @answers
    async def _tenant_stats(self, who: Asker, _m: client_wire.Stats) -> Any:
        return self._stats.tenant(who.tenant)

    @answers
    async def _describe_engines(self, who: Asker, _m: client_wire.Engines) -> Any:
        nodes, here = self.cluster.view.nodes.values(), self.cluster.record()
        return describe_engines(nodes, here, who.tenant.name)

    @answers
    async def _locate(self, who: Asker, m: operator_wire.Locate) -> Any:
        keys = _keys(m.keys, LOCATE_KEYS_MAX)
        found = []
        with asking_others():
            for namespace in _chosen(who.tenant, m.digest):
                found += await self._replicas(namespace, keys)
        return found

    @answers
    async def _prefixes(self, who: Asker, m: client_wire.Prefixes) -> Any:
        keys = _keys(m.keys, frame.KEYS_MAX)
        return await prefixes(self.cluster, who.tenant, m.digest, keys, m.wait_s)

    @answers
    async def _why_missing(self, who: Asker, m: client_wire.WhyMissing) -> Any:
        """Explain what this node lacks, whatever node the message names."""
        keys = _keys(m.keys, frame.KEYS_MAX)
        if not keys:
            raise InvalidRequest("no keys: name those of a prompt, in their order")
        return self._miss_reasons.explain(_named(who.tenant, m.digest), [], keys)

    async def why_missing(self, holder: Holder, m: client_wire.WhyMissing) -> Answer:
        """Answer a tenant's own client, about this node or another one."""
        asked = msgspec.structs.replace(m, node="")
        return await self._for_client(holder, m.node, asked, ANSWER_S)

    async def intend(self, holder: Holder, m: client_wire.Intend) -> Answer:
        """Do what a tenant's own client wants of this node or another one: for that tenant, and nothing else."""
        if m.session:
            raise InvalidRequest("a session is named with a namespace that the client has opened")
        wanted = operator_wire.IntendBlocks(
            *(m.intent, m.digest, m.keys, "", m.hard, m.for_s, m.dry_run)
        )
        return await self._for_client(holder, m.node, wanted, 0.0)

    async def _for_client(
        self, holder: Holder, node: str, message: frame.Message, wait_s: float
    ) -> Answer:
        by = f"{CLIENT}{holder.name}"
        if node in {"", self.config.node}:
            return await self._answer(holder.tenant, by, message)
        with asking_others():
            return await self._on(node, holder.tenant.name, by, message, wait_s)

    @answers
    async def _hit_curves(self, who: Asker, _m: operator_wire.HitCurves) -> Any:
        return self._miss_reasons.memory(who.tenant)

    @answers
    async def _list_accounts(self, _who: Asker, m: operator_wire.ListAccounts) -> Any:
        return await self._receipts.accounts(m)

    @answers
    async def _list_receipts(self, _who: Asker, m: operator_wire.ListReceipts) -> Any:
        return self._receipts.receipts(m)

    @answers
    async def _list_blocks(self, who: Asker, m: operator_wire.ListBlocks) -> Any:
        namespaces = _chosen(who.tenant, m.digest)
        rules = self._tier(m.tier)
        count = min(max(1, m.count), LIST_BLOCKS_MAX)
        shown: dict[Block, dict[str, Any]] = {}
        answer = list_blocks(rules, namespaces, m.cursor, count, self._clock(), shown)
        await self._show_parents(shown)
        return answer

    @answers
    async def _show_blocks(self, who: Asker, m: operator_wire.ShowBlocks) -> Any:
        keys = _keys(m.keys, SHOW_KEYS_MAX)
        namespaces = _chosen(who.tenant, m.digest)
        shown: dict[Block, dict[str, Any]] = {}
        answer = show_blocks(self._rules.by_tier(), namespaces, keys, self._clock(), shown)
        await self._show_parents(shown)
        return answer

    async def _show_parents(self, shown: Mapping[Block, dict[str, Any]]) -> None:
        """Where the rules of a tier do not know a block's parent, its disk does; it stays empty if the disk is away."""
        unknown = [block for block in shown if not block.parent_known]
        try:
            parents = await self.tiers.parents(unknown)
        except Unavailable:
            return
        for block, parent in zip(unknown, parents, strict=True):
            shown[block]["parent"] = parent.hex()

    @answers
    async def _events(self, _who: Asker, m: operator_wire.Events) -> Any:
        journal = self.journal
        await journal.wait(m.after, min(m.wait_s, WAIT_S_MAX))
        events = journal.after(m.after, min(max(1, m.count), EVENTS_MAX))
        return {"events": events, "first": journal.first, "last": journal.last}

    @answers
    async def _take_spans(self, _who: Asker, m: operator_wire.TakeSpans) -> Any:
        return self._spans.take(m.count)

    def _tier(self, tier: str) -> list[Node]:
        found = self._rules.by_tier()
        if tier not in found:
            raise InvalidRequest(f"tier {tier!r:.40}: this node has only {', '.join(found)}")
        return found[tier]

    async def _replicas(
        self, namespace: NamespaceState, keys: Sequence[bytes]
    ) -> list[dict[str, Any]]:
        """Where blocks of one namespace are: here from this node's state, elsewhere from the directory."""
        digest = namespace.directory_digest
        _, masks = self.node.inventory.masks(digest, keys)
        _, on_disk = self.tiers.masks(digest, keys)
        on_disk = on_disk or [0] * len(keys)
        _, on_device = (0, []) if self.device is None else self.device.masks(digest, keys)
        on_device = on_device or [0] * len(keys)
        _, in_engines = self.engines.masks(digest, keys)
        in_engines = in_engines or [0] * len(keys)
        stored = await self.store.where(namespace, namespace.tables, keys)
        on_nodes: Sequence[Sequence[Entry]] = [[] for _ in keys]
        if self.cluster.directory is not None:
            on_nodes = await self.fetcher.locator.replicas(namespace, keys, engines=True)
        tier_names = {number: name for name, number in TIERS.items()}
        found = []
        for key, gpu, device, dram, ssd, entries in zip(
            keys, in_engines, on_device, masks, on_disk, on_nodes, strict=True
        ):
            replicas = [
                {
                    "node": self.cluster.living[entry.incarnation].record.node,
                    "incarnation": entry.incarnation.hex(),
                    "tier": tier_names.get(entry.tier, str(entry.tier)),
                    "parts": entry.mask.bit_count(),
                }
                for entry in entries
            ]
            if objects := stored.get(key, 0):
                nowhere = {"node": NOT_NODES[OBJECT], "incarnation": ""}
                replicas.append({**nowhere, "tier": "object", "parts": objects.bit_count()})
            here = {"node": self.config.node, "incarnation": self.cluster.incarnation}
            if ssd:
                replicas.insert(0, {**here, "tier": "ssd", "parts": ssd.bit_count()})
            if device:
                replicas.insert(0, {**here, "tier": "device", "parts": device.bit_count()})
            if dram:
                replicas.insert(0, {**here, "tier": "dram", "parts": dram.bit_count()})
            if gpu:
                replicas.insert(0, {**here, "tier": "gpu", "parts": gpu.bit_count()})
            if replicas:
                found.append(
                    {
                        "key": key.hex(),
                        "namespace": namespace.base.hex(),
                        "parts": len(namespace.tables),
                        "replicas": replicas,
                    }
                )
        return found

    # ---- changing ----------------------------------------------------------------------------------

    @answers
    async def _drain(self, who: Asker, m: operator_wire.Drain) -> int:
        known = {self.config.node, *self.cluster.view.nodes, *self.cluster.view.drains}
        if m.node not in known:
            raise InvalidRequest(
                f"there is no node {m.node!r} in this cluster; `kvpool nodes` lists the nodes"
            )
        if not self.config.join:
            raise InvalidRequest(
                "this node is alone: no other node can take its blocks. Stop it instead"
            )
        with asking_others():
            await self.cluster.membership.set_drain(m.node, m.wanted)
        self._changed(who.by, "drain" if m.wanted else "undrain", of=m.node)
        return 0

    @answers
    async def _clear(self, who: Asker, m: operator_wire.Clear) -> int:
        return await self.clear(who.tenant, who.by, m.digest, fence=m.fence)

    async def clear(self, tenant: Tenant, by: str, digest: bytes, *, fence: bool) -> int:
        """Start a new epoch of a namespace; returns it. by: who wants it, for the audit."""
        with asking_others():
            epoch = await self.cluster.namespaces.clear(tenant, digest, fence=fence)
        self._changed(
            by, "clear", tenant=tenant.name, namespace=digest.hex(), fence=fence, epoch=epoch
        )
        return epoch

    @answers
    async def _configure(self, who: Asker, m: operator_wire.Configure) -> int:
        change = parse_change(m)
        with asking_others():
            await self.cluster.namespaces.configure(who.tenant, m.digest, change)
        set_to = {
            name: value for name, value in msgspec.to_builtins(change).items() if value is not None
        }
        self._changed(
            who.by, "configure", tenant=who.tenant.name, namespace=m.digest.hex(), to=set_to
        )
        return 0

    @answers
    async def _evict(self, who: Asker, m: operator_wire.Evict) -> int:
        if m.tier not in {"", "dram", "ssd", "device"}:
            raise InvalidRequest(
                f"blocks can be evicted from tier dram, ssd or device, not {m.tier!r}"
            )
        rules = [node for tier, node in self._rules if m.tier in {"", tier}]
        gone = 0
        named: Sequence[bytes] = split_keys(m.keys)
        if m.masks:
            if not m.digest:
                raise InvalidRequest("masks of parts need a namespace: name it")
            named = self._taken_over(_named(who.tenant, m.digest), m)
            if not named:
                return 0
        wanted = {namespace.directory_digest for namespace in _chosen(who.tenant, m.digest)}
        for node in rules:
            for state, keys in _some_each(node, who.tenant.name, wanted, named):
                gone += node.removal.give_up(state, keys)
                await asyncio.sleep(0)
        what = {"namespace": m.digest.hex(), "keys": len(m.keys) // KEY_BYTES, "tier": m.tier}
        self._changed(who.by, "evict", tenant=who.tenant.name, **what, gone=gone)
        return gone

    def _taken_over(self, namespace: NamespaceState, m: operator_wire.Evict) -> list[bytes]:
        """Blocks without any part here, in any tier, beyond those that another node reports."""
        keys = split_keys(m.keys)
        theirs = unpack_masks(m.masks, width_of(m.keys, m.masks))
        more = set()
        for _, node in self._rules:
            _, ours = node.inventory.masks(namespace.directory_digest, keys)
            more |= {k for k, our, their in zip(keys, ours, theirs, strict=False) if our & ~their}
        return [key for key in keys if key not in more]

    @answers
    async def _pin_blocks(self, who: Asker, m: operator_wire.PinBlocks) -> int:
        _keys(m.keys, frame.KEYS_MAX)
        count = await pin_in_all_tiers(
            self.node, self.tiers, _chosen(who.tenant, m.digest), m.keys, m.kind
        )
        named = {"namespace": m.digest.hex(), "keys": len(m.keys) // KEY_BYTES, "kind": m.kind}
        self._changed(who.by, "pin", tenant=who.tenant.name, **named, blocks=count)
        return count

    @answers
    async def _settings(self, _who: Asker, _m: operator_wire.Settings) -> Any:
        return describe(self.config)

    @answers
    async def _change_settings(self, who: Asker, m: operator_wire.ChangeSettings) -> int:
        try:
            changes = decode_json(m.changes, dict[str, Any], "a JSON object with settings")
        except ProtocolError as error:
            raise InvalidRequest(str(error)) from None
        self._follow(changed(self.config, changes))
        logs.set_level(self.config.log_level)
        self._changed(who.by, "settings", to=changes)
        return len(changes)

    def _follow(self, config: DaemonConfig) -> None:
        """Apply a configuration in which some settings have changed."""
        before, self.config = self.config, config
        self.cluster.follow(config)
        if config.replication_bandwidth != before.replication_bandwidth:
            self._replication.set_bandwidth(config.replication_bandwidth)
        if config.ssd_bytes_per_day != before.ssd_bytes_per_day:
            self.tiers.budget.change(config.ssd_bytes_per_day, self._clock())

    # ---- sessions ------------------------------------------------------------------------------------

    @answers
    async def _list_sessions(self, who: Asker, m: operator_wire.ListSessions) -> Any:
        count = min(max(1, m.count), LIST_SESSIONS_MAX)
        found = self.node.sessions.named(who.tenant, m.after, count + 1)
        now = self._clock()
        some = [describe_session(session, now) for session in found[:count]]
        return {"sessions": some, "more": len(found) > count}

    @answers
    async def _show_session(self, who: Asker, m: operator_wire.ShowSession) -> Any:
        session = self.node.sessions.get(who.tenant, m.session)
        if session is None:
            return []
        about = describe_session(session, self._clock())
        return [{**about, "chains": await describe_chains(session, self.node, self.tiers)}]

    @answers
    async def _end_session(self, who: Asker, m: operator_wire.EndSession) -> int:
        known = self._sessions.end(who.tenant, m.session)
        if known:
            self._changed(who.by, "end session", tenant=who.tenant.name, session=m.session)
        return int(known)

    @answers
    async def _intend_blocks(self, who: Asker, m: operator_wire.IntendBlocks) -> Any:
        _keys(m.keys, frame.KEYS_MAX)
        wanted = parse_wanted(m.intent, hard=m.hard, for_s=m.for_s, dry_run=m.dry_run)
        if wanted.intent is Intent.PREFETCH and m.digest and not m.session:
            # A new node is filled before its engines start.
            self.cluster.namespaces.open_known(who.tenant, m.digest)
        namespace = _named(who.tenant, m.digest) if m.digest else None
        answer = await self._intents.answer(who.tenant, namespace, m.keys, m.session, wanted)
        # A client's are no operator's changes, and as many as it likes: they would push those out of the audit.
        changed = not m.dry_run and answer.outcome not in {Outcome.REFUSED, Outcome.MISSING}
        if changed and not who.by.startswith(CLIENT):
            named = {"namespace": m.digest.hex(), "keys": len(m.keys) // KEY_BYTES}
            named |= {"session": m.session} if m.session else {}
            self._changed(
                who.by,
                m.intent,
                tenant=who.tenant.name,
                **named,
                blocks=answer.blocks,
                outcome=answer.outcome,
            )
        return answer

    # ---- jobs --------------------------------------------------------------------------------------

    @answers
    async def _begin_job(self, who: Asker, m: operator_wire.BeginJob) -> Any:
        spec = parse_job(m.spec)
        digest = bytes.fromhex(getattr(spec, "namespace", ""))
        if isinstance(spec, WarmJob):
            if spec.source == self.config.node:
                raise InvalidRequest(
                    f"node {spec.source} is both source and destination: start this on the nodes that should receive "
                    "the blocks"
                )
            self.cluster.namespaces.open_known(
                who.tenant, digest
            )  # a new node is warmed before its engines start
        namespaces = _chosen(who.tenant, digest)
        view = self.jobs.begin(m.job, spec, namespaces, who.tenant, who.by, dry_run=m.dry_run)
        if not m.dry_run:
            self._changed(who.by, view.kind, tenant=who.tenant.name, job=m.job, **_chosen_by(spec))
        return view

    @answers
    async def _jobs(self, _who: Asker, m: operator_wire.Jobs) -> Any:
        return self.jobs.views(m.jobs)

    @answers
    async def _stop_job(self, who: Asker, m: operator_wire.StopJob) -> int:
        stopped = self.jobs.stop(m.job)
        if stopped:
            self._changed(who.by, "stop job", job=m.job)
        return int(stopped)

    async def _list_on(
        self, node: str, namespace: NamespaceState, cursor: str
    ) -> tuple[list[bytes], str | None]:
        """Blocks that another node has in memory or on its disks, and the next cursor."""
        tier, _, inner = cursor.partition(":") if cursor else ("dram", "", "")
        ask = operator_wire.ListBlocks(tier, inner, LIST_BLOCKS_MAX, namespace.base)
        answer = await self._on(node, namespace.tenant.name, "", ask, 0.0)
        if not isinstance(answer, frame.Bytes):
            raise ProtocolError(f"node {node} listed its blocks with a number")
        found = decode_json(answer.data, _Listed, f"a list of blocks, as node {node} should send")
        after = found.cursor
        if after is not None:
            after = f"{tier}:{after}"
        elif tier == "dram":
            after = "ssd:"
        return [decode_hex(each.key, "a block's key") for each in found.blocks], after

    async def _evict_on(
        self, node: str, namespace: NamespaceState, taken: Mapping[bytes, int], by: str
    ) -> int:
        """Have another node evict blocks of which it has only these parts; returns how many it had."""
        masks = pack_masks(list(taken.values()), width_for(len(namespace.tables)))
        request = operator_wire.Evict(b"".join(taken), namespace.base, masks=masks)
        answer = await self._on(node, namespace.tenant.name, by, request, ANSWER_S)
        return answer.value if isinstance(answer, frame.Done) else 0


def _some_each(
    node: Node, tenant: str, wanted: set[bytes], named: Sequence[bytes]
) -> Iterator[tuple[NamespaceState, Sequence[bytes]]]:
    """The named blocks of these namespaces, or all that are here, a few at a time."""
    states = {digest: state for digest in wanted if (state := node.namespaces.by_directory(digest))}
    for state in states.values() if named else ():
        for at in range(0, len(named), EVICT_TOGETHER):
            yield state, named[at : at + EVICT_TOGETHER]
    owner = node.tenants.get(tenant)
    cursor: int | None = None if named or owner is None else 0
    while cursor is not None:
        blocks, cursor = node.inventory.scan(cursor, EVICT_TOGETHER, owner)
        found: dict[bytes, list[bytes]] = {digest: [] for digest in states}
        for block in blocks:
            if (digest := block.table.namespace.directory_digest) in found:
                found[digest].append(block.key)
        for digest, keys in found.items():
            yield states[digest], keys


def _named(tenant: Tenant, digest: bytes) -> NamespaceState:
    """The tenant's namespace of this digest, in its current epoch. Raises `InvalidRequest` if it is not open here."""
    epochs = tenant.epochs.get(digest)
    if not epochs:
        raise InvalidRequest(f"namespace {digest.hex()} is not open on this node")
    return epochs[-1]


def _chosen(tenant: Tenant, digest: bytes) -> list[NamespaceState]:
    """One of the tenant's namespaces, or all of them if `digest` is empty. Raises as `_named`."""
    if digest:
        return [_named(tenant, digest)]
    return [epochs[-1] for epochs in tenant.epochs.values()]


def check_operator(holder: Holder) -> None:
    """Only operators see and change other tenants' state. Raises `NotAuthenticated`."""
    if not holder.operator:
        raise NotAuthenticated(
            "this is reserved for operators: those who can open the operators' socket (operator_socket), as the daemon's "
            "own user, or have the operator_token if one is set (KVPOOL_OPERATOR_TOKEN)"
        )


@contextlib.contextmanager
def asking_others() -> Iterator[None]:
    """Failures of others are not failures of this daemon: its client may continue to use it."""
    try:
        yield
    except (InternalError, Unavailable) as error:
        raise ClusterUnavailable(str(error)) from None


def _user(holder: Holder) -> str:
    return f"uid {holder.uid}" if holder.uid >= 0 else "local"


def _keys(packed: bytes, most: int) -> Sequence[bytes]:
    if len(packed) > most * KEY_BYTES:
        raise LimitExceeded(f"at most {most} keys per request")
    return split_keys(packed)


def _chosen_by(spec: JobSpec) -> dict[str, Any]:
    """A short description of a job: how many keys, not which."""
    asked = {name: value for name, value in msgspec.structs.asdict(spec).items() if value}
    if "keys" in asked:
        asked["keys"] = len(asked["keys"])
    return asked
