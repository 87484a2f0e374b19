"""Sessions: which blocks their next turns will use. No I/O, no clock.

A session is a conversation or a run of an agent: requests, its *turns*, that mostly begin with the same prompt. After
each turn its server reports the blocks of its prompt and answer, or that the session has ended. *Expendable*, that is,
evicted before all others (until they are read again), are the blocks of the turn before that the new one left out, and
all of a session that has ended.

A block that others use too stays an ordinary one: one that was read since the turn, or that belongs to the chain of
another of the sessions that were active last. Nothing is dropped: some of what was left out is used again.

All of it is a hint. It moves blocks within the eviction order of one tenant's segment, and no further.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice

from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.node import Node
from kvpool.types import KEY_BYTES, split_keys

SHARED_LOOKED, SHARED_CHAINS = 64, 256
"""Sessions that were active last, whose chains are compared to find out what others use too."""
SETTLE_S = 2.0
"""Engines tell of a turn when its answer ends, and save its last blocks shortly after that: what is put in this time is
the turn's own.
"""
_OVERHEAD = 512  # bytes of a chain, or of a session, besides its keys and its name


@dataclass(slots=True, eq=False)
class Chain:
    """The blocks of an agent's last turn. tick: when they were saved, which is over once it is `settled`. ended: they
    are all to be expendable once it is settled.
    """

    namespace: NamespaceState
    agent: str
    keys: bytes
    told_at: float
    tick: int
    settled: bool = False
    ended: bool = False
    shared: int = -1  # blocks that others use too, once that was looked for

    @property
    def nbytes(self) -> int:
        return len(self.keys) + sys.getsizeof(self.agent) + _OVERHEAD


@dataclass(slots=True, eq=False)
class Session:
    """A session that is known."""

    name: str
    tenant: Tenant
    last_at: float
    chains: dict[tuple[NamespaceState, str], Chain] = field(default_factory=dict)
    turns: int = 0

    @property
    def nbytes(self) -> int:
        """Besides its chains."""
        return sys.getsizeof(self.name) + _OVERHEAD


@dataclass(slots=True, eq=False)
class _Known:
    """The sessions of a tenant, the one that was active last at the end. nbytes: of what is known of them."""

    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    nbytes: int = 0
    work_bytes: int = 0


class Sessions:
    """All sessions of a node. Not thread-safe.

    What becomes expendable is done later and piece by piece, by `work`: a chain may have many thousand blocks.
    """

    ENDING_BYTES_MAX = 16 << 20
    """Of chains that have ended and wait for their saves; what ends beyond is expendable at once."""
    WORK_BYTES_MAX = 16 << 20
    """Of a tenant's chains that should be expendable and are not yet: blocks beyond it stay ordinary."""

    def __init__(
        self,
        node: Node,
        expended: Callable[[NamespaceState, Sequence[bytes]], object] = lambda _, __: None,
    ) -> None:
        """node: the rules of memory. expended: called with blocks that nobody is to continue, for tiers below, in the
        order in which they should go.
        """
        self._limits = node.limits
        self._ledger = node.ledger
        self._candidates = node.candidates
        self._counters = node.counters
        self._below = expended
        self._known: dict[str, _Known] = {}
        self._work: deque[tuple[_Known, NamespaceState, bytes, int]] = deque()
        self._settling: deque[Chain] = deque()
        self._ending_bytes = 0  # of those that have ended

    # ---- what is told --------------------------------------------------------------------------------

    def turn(
        self,
        tenant: Tenant,
        namespace: NamespaceState,
        name: str,
        agent: str,
        keys: bytes,
        now: float,
        *,
        ended: bool = False,
        shared: bool = False,
    ) -> Session | None:
        """A turn has used these blocks, one chain from its head on, packed; none: only its end is new.

        agent: a strand of the session whose turns follow one another; empty: the main one. shared: several conversations may have this name, so a turn that has less than half of the blocks of the one
        before is taken for one of another conversation, and leaves nothing.
        Returns the session, or None: it has ended, or is unknown and no blocks were told.
        """
        self.settle(now)
        known = self._known.setdefault(tenant.name, _Known())
        session = known.sessions.get(name)
        if session is None:
            if not keys:
                return None
            session = known.sessions[name] = Session(name, tenant, now)
            known.nbytes += session.nbytes
        else:
            known.sessions.move_to_end(name)
        if keys:
            session.turns += 1
            self._replace(known, session, (namespace, agent), keys, now, shared=shared)
        session.last_at = now
        if ended:
            self._end(known, session)
            return None
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
        new = Chain(*at, keys, now, self._ledger.tick)
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
            if chain.settled or self._ending_bytes + chain.nbytes > self.ENDING_BYTES_MAX:
                self._expend(known, chain, 0)
                chain.keys = b""
            else:
                chain.ended = True
                self._ending_bytes += chain.nbytes

    def settle(self, now: float) -> None:
        """Chains of turns that were told of `SETTLE_S` ago: whoever uses their blocks from now on is somebody else."""
        self._ledger.settle()
        while self._settling and self._settling[0].told_at + SETTLE_S <= now:
            chain = self._settling.popleft()
            chain.tick, chain.settled = self._ledger.tick, True
            if chain.ended:
                self._ending_bytes -= chain.nbytes
                self._expend(self._known[chain.namespace.tenant.name], chain, 0)

    def _forget(self, known: _Known, session: Session) -> None:
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
            if known.work_bytes + len(keys) + _OVERHEAD <= self.WORK_BYTES_MAX:
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
            self._expend_now(namespace, keys, tick)
        return bool(self._work)

    def _expend_now(self, namespace: NamespaceState, keys: bytes, tick: int) -> None:
        """Make blocks expendable in memory and in the tiers below, tails first."""
        if namespace.retired:
            return
        tail_first = split_keys(keys)[::-1]
        self._counters.expended += self._candidates.expend(namespace, tail_first, tick, left=True)
        self._below(namespace, tail_first)

    # ---- what is known -------------------------------------------------------------------------------

    def get(self, tenant: Tenant, name: str) -> Session | None:
        """A session, if it is known."""
        known = self._known.get(tenant.name)
        return None if known is None else known.sessions.get(name)

    @property
    def settling(self) -> bool:
        """Whether the blocks of a turn are still being saved."""
        return bool(self._settling)

    def count(self, tenant: Tenant) -> int:
        """Number of known sessions."""
        known = self._known.get(tenant.name)
        return 0 if known is None else len(known.sessions)

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
