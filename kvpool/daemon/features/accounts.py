"""The accounts of tenants, and the receipts of requests: see `kvpool.telemetry.receipts`. No I/O.

What is counted here is counted in the same call for the tenant since the daemon started (`Traffic.account`), for the
namespace in the open period, and for the request, where the client names one: so they agree whatever happens.

Tokens follow one part of the blocks, the first one that all of a prompt's blocks have. So ranks that store or read their
own parts count none twice, and where they do so on several nodes, only one of these counts tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from kvpool.daemon.core.blocks import Block, Holder, Lease, NamespaceState, Requests
from kvpool.daemon.core.events import Came, Ended, Gone, Handlers, Joined, Put, Read, Refused
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_request
from kvpool.daemon.features.byte_seconds import ByteSeconds
from kvpool.daemon.features.traffic import TrafficCounts
from kvpool.decoding import decode_json
from kvpool.telemetry import receipts
from kvpool.telemetry.receipts import Amount, Booked, Period, Receipt, Row, facts_of
from kvpool.types import PartKind
from kvpool.wire import client as client_wire
from kvpool.wire import frame

FACTS_MAX = 4096  # namespaces


class NamespaceFacts(NamedTuple):
    """What receipts take from a namespace's fields and parts. part: whose blocks stand for its tokens."""

    model: str
    block_tokens: int
    part: int


@dataclass(eq=False)
class Accounts:
    """See the module. Not thread-safe.

    name: the node's. traffic: of its tenants, whose accounts are kept here. clock, wall: seconds, monotonic and since
    1970.
    """

    _name: str
    _node: Node
    _traffic: TrafficCounts
    _clock: Callable[[], float]
    _wall: Callable[[], float]

    ROWS_MAX = 64
    """Of a tenant, in a period; further namespaces have one together."""
    RECEIPTS_MAX = 4096
    """The last ones; a tenant that has more than its part of them gives up its own."""
    ARRIVALS_MAX = 1 << 16
    """Blocks of a tenant, the last ones."""

    def __post_init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}
        self._rows_of: dict[str, int] = {}
        self._receipts: dict[str, OrderedDict[tuple[str, str], Receipt]] = {}
        self._number = 1
        self._begin_s = self._wall()
        self._begun = self._clock()
        self._facts: dict[int, NamespaceFacts] = {}
        # Blocks that came from another tier or node for somebody who waits, and from which, until they are read.
        self._arrivals: defaultdict[str, dict[Block, str]] = defaultdict(dict)
        self._byte_seconds = ByteSeconds(self._clock)
        self.handlers: Handlers = {Came: self._came, Gone: self._gone, Put: self._put}
        self.handlers |= {Read: self._read, Joined: self._joined, Refused: self._refused}
        self.handlers[Ended] = self._byte_seconds.ended

    # ---- what happens ------------------------------------------------------------------------------

    def _came(self, event: Came) -> None:
        self._byte_seconds.came(event)
        if event.origin.tier:
            arrivals = self._arrivals[event.table.namespace.tenant.name]
            arrivals.update(dict.fromkeys(event.blocks, event.origin.tier))
            for block in list(islice(arrivals, max(0, len(arrivals) - self.ARRIVALS_MAX))):
                del arrivals[block]

    def _gone(self, event: Gone) -> None:
        self._byte_seconds.gone(event)
        if arrivals := self._arrivals.get(event.table.namespace.tenant.name):
            for block in event.blocks:
                if not block.leases:  # otherwise it may still be read
                    arrivals.pop(block, None)

    def _read(self, event: Read) -> None:
        if event.lease is not None and not event.lease.unread:
            self._book(event.lease)

    def _joined(self, event: Joined) -> None:
        self._book(event.lease)

    def _book(self, lease: Lease) -> None:
        """The blocks of a lease are read on behalf of its request."""
        held = [(part, blocks) for part, (_, blocks) in lease.parts.items() if blocks]
        beside = lease.beside
        if held:
            namespace = held[0][1][0].table.namespace
        else:
            assert beside is not None, "a lease is of blocks"
            some = next(
                block for row in beside.parts.values() for block in row if block is not None
            )
            namespace = self._in_memory(some.table.namespace)
        facts = self._facts_of(namespace)
        reads: dict[str, Amount] = {}
        memory = reads["dram"] = Amount()
        leased = lease.blocks
        arrivals = self._arrivals.get(lease.tenant.name)
        for part, blocks in held:
            spec = blocks[0].table.spec
            counts = spec.stride if part == facts.part else 0
            leased = max(leased, len(blocks) * counts)  # more where they are scattered
            memory.nbytes += len(blocks) * spec.nbytes
            if not arrivals or arrivals.keys().isdisjoint(blocks):
                continue
            for block in blocks:
                tier = arrivals.pop(block, "")
                if tier:
                    amount = reads.setdefault(tier, Amount())
                    amount.blocks += counts
                    amount.nbytes += spec.nbytes
                    memory.nbytes -= spec.nbytes
        if beside is not None and beside.nbytes:
            device = reads["device"] = Amount(nbytes=beside.nbytes)
            stride = namespace.tables[facts.part].spec.stride
            row = beside.parts.get(facts.part, [])
            device.blocks = stride * (len(row) - row.count(None))
        if facts.part in lease.parts or (beside is not None and facts.part in beside.parts):
            below = sum(amount.blocks for tier, amount in reads.items() if tier != "dram")
            memory.blocks = max(0, leased - below)
        for tier, amount in reads.items():
            if amount.nbytes:
                amount.tokens = amount.blocks * facts.block_tokens
                for booked in self._booked(namespace, lease.request):
                    booked.read(tier, amount)

    def _put(self, event: Put) -> None:
        table, new, requests = event.table, event.new, event.requests
        if requests and event.indices:
            requests = of_kept(requests, sorted(event.indices))
        namespace = table.namespace
        facts = self._facts_of(namespace)
        spec = table.spec
        counts = spec.stride if table.part == facts.part else 0
        blocks = new * counts
        amount = Amount(blocks, blocks * facts.block_tokens, new * spec.nbytes)
        for booked in self._booked(namespace, ""):
            booked.written.add(amount)
        left = new
        for request, most in requests:
            some = min(most, left)
            left -= some
            if request and some:
                blocks = some * counts
                amount = Amount(blocks, blocks * facts.block_tokens, some * spec.nbytes)
                self._receipt(namespace, request).booked.written.add(amount)

    def _refused(self, event: Refused) -> None:
        """Some parts of a put were refused: a request that begins after all blocks that were accepted stored nothing.
        O(parts x requests).
        """
        namespace, parts = event.namespace, event.parts
        shares = _ranges(event.requests, event.count)
        begins: dict[str, int] = {}
        for request, begin, _ in shares:
            begins.setdefault(request, begin)
        tables = namespace.tables
        found: dict[str, dict[str, receipts.Refused]] = {}  # by request, and reason
        for part, reason, first in parts:
            nbytes = tables[part].spec.nbytes if 0 <= part < len(tables) else 0
            for request, begin, end in shares:
                some = end - max(begin, first)
                if some > 0:
                    by_reason = found.get(request)
                    if by_reason is None:
                        by_reason = found[request] = {}
                    refused = by_reason.get(reason)
                    if refused is None:
                        refused = by_reason[reason] = receipts.Refused()
                    refused.parts += some
                    refused.nbytes += some * nbytes
        total = Booked()
        for request, by_reason in found.items():
            if begins[request] >= event.taken:
                next(iter(by_reason.values())).requests = 1
            for reason, refused in by_reason.items():
                total.refuse(reason, refused)
            if request:
                booked = self._receipt(namespace, request).booked
                for reason, refused in by_reason.items():
                    booked.refuse(reason, refused)
        if found:
            for booked in self._booked(namespace, ""):
                booked.add(total)

    def ended(self, namespace: NamespaceState, request: str, session: str = "") -> bool:
        """An engine says that this request has ended; whether it is known. What is still written for it counts."""
        kept = self._receipts.get(namespace.tenant.name)
        receipt = None if kept is None else kept.get((namespace.base_hex, request))
        if receipt is None:
            return False
        receipt.ended_s = self._wall()
        receipt.session = session or receipt.session
        return True

    def end_request(self, holder: Holder, m: client_wire.EndRequest) -> frame.Done:
        """Answer a client that reports the end of a request: 1 if the request is known."""
        namespace = self._node.namespaces.by_number(holder.tenant, m.ns)
        check_request(m.session)
        return frame.Done(int(self.ended(namespace, m.request, m.session)))

    # ---- what is told ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring up to date what time adds."""
        self._node.settle()
        for tier, tenant, namespace, fields, byte_s in self._byte_seconds.take():
            self._row(tenant, namespace, fields).booked.keep(tier, byte_s)
            self._traffic.of(tenant).account.keep(tier, byte_s)

    def open_period(self) -> Period:
        """What was counted since the last one was cut. Its rows go on."""
        self.settle()
        return self._period(self._wall(), self._clock())

    def cut(self) -> Period:
        """End the open period, and begin the next one."""
        self.settle()
        now_s, now = self._wall(), self._clock()
        period = self._period(now_s, now)
        self._rows, self._rows_of = {}, {}
        self._number += 1
        self._begin_s, self._begun = now_s, now
        return period

    def _period(self, now_s: float, now: float) -> Period:
        return Period(
            *(self._name, self._node.incarnation, self._number),
            *(self._begin_s, now_s, now - self._begun),
            list(self._rows.values()),
        )

    def receipts(self, wanted: Callable[[Receipt], bool]) -> list[Receipt]:
        """Those of all tenants, of the last requests, that are wanted; oldest first."""
        found = [
            receipt
            for kept in self._receipts.values()
            for receipt in kept.values()
            if wanted(receipt)
        ]
        return sorted(found, key=lambda receipt: receipt.begun_s)

    # ---- inside ------------------------------------------------------------------------------------

    def _booked(self, namespace: NamespaceState, request: str) -> Sequence[Booked]:
        """Wherever something has to be counted: of the tenant, of the namespace, and perhaps of a request."""
        tenant = namespace.tenant.name
        account = self._traffic.of(tenant).account
        row = self._row(tenant, namespace.base_hex, namespace.fields)
        if not request:
            return account, row.booked
        return account, row.booked, self._receipt(namespace, request).booked

    def _row(self, tenant: str, base: str, fields: bytes) -> Row:
        row = self._rows.get((tenant, base))
        if row is None:
            count = self._rows_of.get(tenant, 0)
            if count >= self.ROWS_MAX and base:
                return self._row(tenant, "", b"{}")
            self._rows_of[tenant] = count + 1
            model, _ = _told(fields)
            row = self._rows[tenant, base] = Row(tenant, base, model)
        return row

    def _receipt(self, namespace: NamespaceState, request: str) -> Receipt:
        name = (namespace.base_hex, request)
        kept = self._receipts.setdefault(namespace.tenant.name, OrderedDict())
        found = kept.get(name)
        now = self._wall()
        if found is None:
            model = self._facts_of(namespace).model
            tenant = namespace.tenant.name
            found = kept[name] = Receipt(request, tenant, namespace.base_hex, model, now, now)
            most = max(1, self.RECEIPTS_MAX // max(1, len(self._node.tenants)))
            while len(kept) > most:
                kept.popitem(last=False)
        else:
            kept.move_to_end(name)
        found.used_s = now
        return found

    def _facts_of(self, namespace: NamespaceState) -> NamespaceFacts:
        facts = self._facts.get(namespace.space)
        if facts is None:
            if len(self._facts) >= FACTS_MAX:
                self._facts.clear()
            of_all = (
                (spec.stride, part)
                for part, spec in enumerate(namespace.parts)
                if spec.kind is PartKind.FULL
            )
            part = min(of_all, default=(1, 0))[1]
            facts = NamespaceFacts(*_told(namespace.fields), part)
            self._facts[namespace.space] = facts
        return facts

    def _in_memory(self, namespace: NamespaceState) -> NamespaceState:
        """The state that memory's rules have of another tier's."""
        known = self._node.namespaces.by_directory(namespace.directory_digest)
        return namespace if known is None else known


def _told(fields: bytes) -> tuple[str, int]:
    """As `facts_of`, of a namespace's fields in JSON."""
    return facts_of(decode_json(fields, dict[str, Any], "a namespace's fields"))


def _ranges(requests: Requests, count: int) -> Sequence[tuple[str, int, int]]:
    """Whose so many blocks are, from which one up to which. What no request has is nobody's."""
    ranges = []
    at = 0
    for request, some in requests:
        ranges.append((request, at, at + some))
        at += some
    return [*ranges, ("", at, count)] if at < count else ranges


def of_kept(requests: Requests, indices: Sequence[int]) -> Requests:
    """The same of those of the keys that are at these indices, which ascend."""
    found = []
    end = at = 0
    for request, count in requests:
        end += count
        after = bisect_left(indices, end, at)
        found.append((request, after - at))
        at = after
    return found
