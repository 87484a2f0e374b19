"""Sessions: which blocks their next turns will use, and when. No I/O, no clock.

A session is a conversation or a run of an agent: requests, its *turns*, that mostly begin with the same prompt. After
each turn whoever serves it tells the blocks of its prompt and answer, and, if known, how long the session will pause,
or that it has ended. From that follows which blocks are *expendable*, that is, evicted before all others (until they
are read again):

* those of the turn before that the new one left out, and all of a session that has ended;
* if there is too little room, the ends of the chains of the sessions that are expected back last, where that is later
  than the next ordinary victim was used ago: without other knowledge, a block is expected to be unused for about as
  long as it already is.

A block that others use too stays an ordinary one: one that was read since the turn, or that belongs to the chain of
another of the sessions that were active last. Nothing is dropped: some of what was left out is used again.

All of it is a hint. It moves blocks within the eviction order of one tenant's segment, and no further.
"""

from __future__ import annotations

import bisect
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from statistics import median

from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.candidates import Candidates
from kvpool.daemon.core.idle_age import IdleAge
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.telemetry.memory_stats import Counters
from kvpool.types import KEY_BYTES, PauseKind, split_keys

SLICE = 16
"""Blocks that become expendable at a time for lack of room: a session loses the end of its chain first."""
AHEAD_MIN = 64
"""Parts of blocks that should be expendable in a full segment, at least; more if more was evicted since last time."""
AHEAD_SLICES_MAX = 64  # in one call
SHARED_LOOKED, SHARED_CHAINS = 64, 256
"""Sessions that were active last, whose chains are compared to find out what others use too."""
SETTLE_S = 2.0
"""Engines tell of a turn when its answer ends, and save its last blocks shortly after that: what is put in this time is
the turn's own.
"""
ENDING_BYTES_MAX = 16 << 20  # of chains that wait for that; what ends beyond is expendable at once
PAUSES_KEPT = 255  # of each kind, to know what is usual
PAUSES_USED = 8  # before that the usual one is assumed
ASSUMED_PAUSE_S = {PauseKind.TOOL: 5.0, PauseKind.PERSON: 120.0}
WORK_BYTES_MAX = 16 << 20
"""Of a tenant's chains that should be expendable and are not yet: blocks beyond it stay ordinary."""
_OVERHEAD = 512  # bytes of a chain, or of a session, besides its keys and its name


@dataclass(slots=True, eq=False)
class Chain:
    """The blocks of an agent's last turn. tick: when they were saved, which is over once it is `settled`. left: blocks,
    from the head on, that it has not given up. ended: they are all to be expendable once it is settled.
    """

    namespace: NamespaceState
    agent: str
    keys: bytes
    told_at: float
    tick: int
    left: int
    settled: bool = False
    ended: bool = False
    shared: int = -1  # blocks that others use too, once that was looked for

    @property
    def nbytes(self) -> int:
        return len(self.keys) + sys.getsizeof(self.agent) + _OVERHEAD


@dataclass(slots=True, eq=False)
class Session:
    """A session that is known.

    back_at: when its next turn is expected; None: unknown. prefetch_at: when its blocks should be brought into memory
    for it; None: it was not looked at yet for this turn; infinite: that was done.
    """

    name: str
    tenant: Tenant
    last_at: float
    chains: dict[tuple[NamespaceState, str], Chain] = field(default_factory=dict)
    back_at: float | None = None
    prefetch_at: float | None = None
    pause: PauseKind | None = None
    turns: int = 0

    @property
    def nbytes(self) -> int:
        """Besides its chains."""
        return sys.getsizeof(self.name) + _OVERHEAD


@dataclass(slots=True, eq=False)
class _Known:
    """The sessions of a tenant, the one that was active last at the end.

    nbytes: of what is known of them. returns: when those are expected that are; giving: the same of those that have not given up all that they can.
    """

    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    returns: list[tuple[float, str]] = field(default_factory=list)  # sorted
    giving: list[tuple[float, str]] = field(default_factory=list)  # sorted
    nbytes: int = 0
    work_bytes: int = 0
    evicted: int = 0  # blocks of the tenant, when `keep_ahead` was called last
    pauses: dict[PauseKind, deque[float]] = field(default_factory=dict)


class Sessions:
    """All sessions of a node. Not thread-safe.

    What becomes expendable is done later and piece by piece, by `work`: a chain may have many thousand blocks.
    """

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        limits: Limits,
        ledger: Ledger,
        candidates: Candidates,
        idle_age: IdleAge,
        counters: Counters,
    ) -> None:
        self._tenants = tenants
        self._limits = limits
        self._ledger = ledger
        self._candidates = candidates
        self._idle_age = idle_age
        self._counters = counters
        self._known: dict[str, _Known] = {}
        self._work: deque[tuple[_Known, NamespaceState, bytes, int]] = deque()
        self._settling: deque[Chain] = deque()
        self._ending_bytes = 0  # of those that have ended
        self._below: Callable[[NamespaceState, Sequence[bytes]], object] = lambda _, __: None

    def follow(self, expended: Callable[[NamespaceState, Sequence[bytes]], object]) -> None:
        """expended: called with blocks that nobody is to continue, for tiers below; in the order in which they should go."""
        self._below = expended

    # ---- what is told --------------------------------------------------------------------------------

    def turn(
        self,
        tenant: Tenant,
        namespace: NamespaceState | None,
        name: str,
        agent: str,
        keys: bytes,
        now: float,
        *,
        pause_s: float | None = None,
        pause: PauseKind | None = None,
        ended: bool = False,
        shared: bool = False,
    ) -> Session | None:
        """A turn has used these blocks, one chain from its head on, packed; none: only what else is told is new, and
        `namespace` may be None.

        agent: a strand of the session whose turns follow one another; empty: the main one. pause_s: until the next
        turn of the session; without it `pause` says what the session waits for, and the usual time of that is assumed.
        shared: several conversations may have this name, so a turn that has less than half of the blocks of the one
        before is taken for one of another conversation, and leaves nothing.
        Returns the session, or None: it has ended, or is unknown and no blocks were told.
        """
        self.settle(now)
        known = self._known.setdefault(tenant.name, _Known())
        session = known.sessions.get(name)
        if session is None:
            if not keys or namespace is None:
                return None
            session = known.sessions[name] = Session(name, tenant, now)
            known.nbytes += session.nbytes
        else:
            self._learn_pause(known, session, now)
            known.sessions.move_to_end(name)
        self._expect(known, session, None)
        if keys and namespace is not None:
            session.turns += 1
            self._replace(known, session, (namespace, agent), keys, now, shared=shared)
        session.last_at = now
        if ended:
            self._end(known, session)
            return None
        session.pause = pause
        if pause_s is None and pause is not None:
            pause_s = self.usual_pause_s(tenant, pause)
        self._expect(known, session, None if pause_s is None else now + pause_s)
        self._bound(known)
        return session

    def _replace(
        self,
        known: _Known,
        session: Session,
        at: tuple[NamespaceState, str],
        keys: bytes,
        now: float,
        *,
        shared: bool,
    ) -> None:
        """An agent's chain is another one now; what the old one had besides is expendable."""
        self._ledger.settle()
        before = session.chains.pop(at, None)
        if before is None and len(session.chains) >= self._limits.agents_per_session:
            oldest = session.chains.pop(next(iter(session.chains)))
            known.nbytes -= oldest.nbytes
            oldest.keys = b""
        new = Chain(*at, keys, now, self._ledger.tick, len(keys) // KEY_BYTES)
        session.chains[at] = new
        self._settling.append(new)
        known.nbytes += new.nbytes
        if before is not None:
            known.nbytes -= before.nbytes
            if not before.settled:
                before.tick = self._ledger.tick
            common = common_blocks(before.keys, keys)
            if not shared or 2 * common * KEY_BYTES >= len(before.keys):
                self._expend(known, before, common)
            before.keys = b""

    def end(self, tenant: Tenant, name: str) -> bool:
        """A session has no further turns; returns whether it was known."""
        known = self._known.get(tenant.name)
        session = None if known is None else known.sessions.get(name)
        if known is None or session is None:
            return False
        self._end(known, session)
        return True

    def _end(self, known: _Known, session: Session) -> None:
        self._forget(known, session)
        for chain in session.chains.values():
            chain.shared = -1  # its other agents do not count any more
            if chain.settled or self._ending_bytes + chain.nbytes > ENDING_BYTES_MAX:
                self._expend(known, chain, 0)
                chain.keys = b""
            else:
                chain.ended = True
                self._ending_bytes += chain.nbytes

    def settle(self, now: float) -> None:
        """Chains of turns that were told of `SETTLE_S` ago: whoever uses their blocks from now on is somebody else."""
        while self._settling and self._settling[0].told_at + SETTLE_S <= now:
            chain = self._settling.popleft()
            chain.tick, chain.settled = self._ledger.tick, True
            if chain.ended:
                self._ending_bytes -= chain.nbytes
                self._expend(self._known[chain.namespace.tenant.name], chain, 0)

    def _forget(self, known: _Known, session: Session) -> None:
        self._expect(known, session, None)
        del known.sessions[session.name]
        known.nbytes -= session.nbytes + sum(chain.nbytes for chain in session.chains.values())

    def _bound(self, known: _Known) -> None:
        """Forget the sessions that were active longest ago, if there are too many. Their blocks stay ordinary ones."""
        limits = self._limits
        while (
            len(known.sessions) > limits.sessions_per_tenant
            or known.nbytes > limits.session_bytes_per_tenant
        ):
            oldest = next(iter(known.sessions.values()))
            self._forget(known, oldest)
            for chain in oldest.chains.values():
                chain.keys = b""
            self._counters.sessions_forgotten += 1

    # ---- expendable blocks ---------------------------------------------------------------------------

    def _expend(self, known: _Known, chain: Chain, first: int) -> None:
        """A chain's blocks from `first` on are expendable, as far as others do not use them."""
        first = max(first, self._shared_of(known, chain))
        if first * KEY_BYTES < len(chain.keys) and not chain.namespace.retired:
            keys = chain.keys[first * KEY_BYTES :]
            if known.work_bytes + len(keys) + _OVERHEAD <= WORK_BYTES_MAX:
                known.work_bytes += len(keys) + _OVERHEAD
                self._work.append((known, chain.namespace, keys, chain.tick))

    def _shared_of(self, known: _Known, chain: Chain) -> int:
        """Once a turn: what others begin to use later they have read since."""
        if chain.shared < 0:
            chain.shared = self._shared(
                known, chain.namespace, chain.keys, lambda _, other: other is chain
            )
        return chain.shared

    @staticmethod
    def _shared(
        known: _Known,
        namespace: NamespaceState,
        keys: bytes,
        but: Callable[[Session, Chain], bool],
    ) -> int:
        """How many blocks of a chain, from its head on, others of the sessions that were active last use too.

        but: chains that are no others.
        """
        active = islice(reversed(known.sessions.values()), SHARED_LOOKED)
        chains = ((session, other) for session in active for other in session.chains.values())
        return max(
            (
                common_blocks(keys, other.keys)
                for session, other in islice(chains, SHARED_CHAINS)
                if other.namespace is namespace and not but(session, other)
            ),
            default=0,
        )

    def work(self, blocks_max: int) -> bool:
        """Make up to so many blocks expendable that should be; returns whether there are more."""
        left = blocks_max
        while self._work and left > 0:
            known, namespace, keys, tick = self._work.popleft()
            if len(keys) > left * KEY_BYTES:
                cut = len(keys) - left * KEY_BYTES
                self._work.appendleft((known, namespace, keys[:cut], tick))
                keys = keys[cut:]
                known.work_bytes -= len(keys)
            else:
                known.work_bytes -= len(keys) + _OVERHEAD
            left -= len(keys) // KEY_BYTES
            self._expend_now(namespace, keys, tick, left=True)
        return bool(self._work)

    def _expend_now(
        self, namespace: NamespaceState, keys: bytes, tick: int, *, left: bool = False
    ) -> int:
        """Tails first; how many parts are newly expendable in memory. left: nobody is to continue them."""
        if namespace.retired:
            return 0
        tail_first = split_keys(keys)[::-1]
        count = self._candidates.expend(namespace, tail_first, tick, left=left)
        self._counters.expended += count
        if left:  # what a session gives up for a pause it loads from a disk
            self._below(namespace, tail_first)
        return count

    def keep_ahead(self, now: float) -> None:
        """Where there is too little room, sessions that are expected back last give up the ends of their chains.

        To be called a few times a second.
        """
        self._ledger.settle()
        self.settle(now)
        for name, known in self._known.items():
            tenant = self._tenants[name]
            evicted, known.evicted = tenant.evicted - known.evicted, tenant.evicted
            if evicted and known.giving:
                self._keep_ahead(tenant, known, now, max(AHEAD_MIN, evicted))

    def _keep_ahead(self, tenant: Tenant, known: _Known, now: float, wanted: int) -> None:
        expendable = self._candidates.expendable(tenant)
        for _ in range(AHEAD_SLICES_MAX):
            if not known.giving or expendable >= wanted:
                return
            back_at, name = known.giving[-1]
            # Who is overdue was used longer ago than that, and has its turn without a word.
            if back_at - now <= (self._next_victim_age_s(tenant, now) or 0.0):
                return
            session = known.sessions[name]
            chain = max(session.chains.values(), key=lambda each: each.left, default=None)
            end = 0 if chain is None else chain.left
            first = 0 if chain is None else max(end - SLICE, self._shared_of(known, chain))
            if chain is None or first >= end:
                _remove(known.giving, session)  # the rest is others' too
                continue
            chain.left = first
            keys = chain.keys[first * KEY_BYTES : end * KEY_BYTES]
            expendable += self._expend_now(chain.namespace, keys, chain.tick)

    def _next_victim_age_s(self, tenant: Tenant, now: float) -> float | None:
        """How long ago the next ordinary victim was used, of the size of blocks where that is shortest."""
        ages = [
            self._idle_age.age_s(victim.used, now)
            for slot_class in tenant.classes.values()
            if (victim := slot_class.policy.peek_ordinary()) is not None
        ]
        return min(ages, default=None)

    # ---- expected returns ----------------------------------------------------------------------------

    def _expect(self, known: _Known, session: Session, back_at: float | None) -> None:
        if session.back_at is not None:
            _remove(known.returns, session)
            _remove(known.giving, session)
        session.back_at, session.prefetch_at = back_at, None
        if back_at is not None:
            bisect.insort(known.returns, (back_at, session.name))
            bisect.insort(known.giving, (back_at, session.name))

    def _learn_pause(self, known: _Known, session: Session, now: float) -> None:
        if session.pause is not None:
            seen = known.pauses.setdefault(session.pause, deque(maxlen=PAUSES_KEPT))
            seen.append(now - session.last_at)
            session.pause = None

    def usual_pause_s(self, tenant: Tenant, kind: PauseKind) -> float:
        """The median of the last pauses of this kind."""
        known = self._known.get(tenant.name)
        seen = () if known is None else known.pauses.get(kind, ())
        return median(seen) if len(seen) >= PAUSES_USED else ASSUMED_PAUSE_S[kind]

    # ---- what is known -------------------------------------------------------------------------------

    def get(self, tenant: Tenant, name: str) -> Session | None:
        """A session, if it is known."""
        known = self._known.get(tenant.name)
        return None if known is None else known.sessions.get(name)

    @property
    def expecting(self) -> bool:
        """Whether any session is expected back, or the blocks of a turn are still being saved."""
        return bool(self._settling) or any(known.returns for known in self._known.values())

    def count(self, tenant: Tenant) -> int:
        """Number of known sessions."""
        known = self._known.get(tenant.name)
        return 0 if known is None else len(known.sessions)

    def expected(self, since: float, until: float) -> Iterator[Session]:
        """Sessions that are expected back, or were, from `since` until then, in order."""
        for known in self._known.values():
            first = bisect.bisect_left(known.returns, (since, ""))
            for back_at, name in islice(known.returns, first, None):
                if back_at > until:
                    break
                yield known.sessions[name]

    def named(self, tenant: Tenant, after: str, count: int) -> list[Session]:
        """Some of the known sessions, by ascending names, from after this one on."""
        known = self._known.get(tenant.name)
        if known is None:
            return []
        names = nsmallest(count, (name for name in known.sessions if name > after))
        return [known.sessions[name] for name in names]

    def others_use(self, session: Session, namespace: NamespaceState, keys: bytes) -> int:
        """How many blocks of a chain, from the head on, other sessions that were active last use too."""
        known = self._known[session.tenant.name]
        return self._shared(known, namespace, keys, lambda other, _: other is session)

    def recall(self, session: Session) -> None:
        """It is about to return: what it gave up for a long pause is ordinary again, as far as it is still here."""
        for chain in session.chains.values():
            chain.left = len(chain.keys) // KEY_BYTES


def _remove(expected: list[tuple[float, str]], session: Session) -> None:
    """Where it is in one of these lists, it is not any more."""
    if session.back_at is not None:
        entry = (session.back_at, session.name)
        at = bisect.bisect_left(expected, entry)
        if at < len(expected) and expected[at] == entry:
            del expected[at]


def common_blocks(one: bytes, other: bytes) -> int:
    """How many blocks two chains share. Keys are chained hashes: if two are equal, so are all before them."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = (middle - 1) * KEY_BYTES
        if one[at : at + KEY_BYTES] == other[at : at + KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
