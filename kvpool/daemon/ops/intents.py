"""What clients and operators want for blocks of a prompt or of a session, and the answers. Event loop only.

Each intent is bounded, and clipped at whole blocks, from the beginning of the prompt on:

* pins, by the quotas of pins in memory and on each disk; what is kept for a time, by a share of the segment as well;
* what is prefetched, by the room that there is without the eviction of ordinary blocks;
* what a session's owner wants expended or dropped leaves out what other sessions use too.

All of it is done a few blocks at a time, and others are served in between.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress

from kvpool.daemon.core.blocks import PIN_HARD, PIN_NONE, NamespaceState, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.pins import Fit, Taken
from kvpool.daemon.features.sessions import Sessions
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.plan import Located, missing
from kvpool.daemon.ops.pins import PINNED_TOGETHER, pin_in_all_tiers
from kvpool.daemon.ops.prefetcher import LOOKUP_S, QUEUE_MAX, Prefetcher
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.types import Intent, IntentAnswer, Outcome, split_keys
from kvpool.waits import wait_for

KEEP_MAX_S = 7 * 86_400.0
TOGETHER = 256  # blocks take the event loop about a millisecond
LOOK_S = 0.25  # between looks whether a time is over


@dataclass(frozen=True, slots=True)
class Wanted:
    """An intent. hard: of a pin. for_s: how long to keep. dry_run: only answer."""

    intent: Intent
    hard: bool = False
    for_s: float = 0.0
    dry_run: bool = False

    @property
    def pin_kind(self) -> str:
        """What a pin, or its removal, asks for."""
        if self.intent is not Intent.PIN:
            return "none"
        return "hard" if self.hard else "soft"


@dataclass(slots=True)
class _Promised:
    """What a dry run has given away of the limits, all prompts of its session together.

    nbytes: of pins and what is kept, by whose limits these are and the namespace's directory digest. brought: bytes of
    memory, for what is to be prefetched.
    """

    nbytes: Counter[tuple[Node, bytes]] = field(default_factory=Counter)
    brought: int = 0

    def taken(self, rules: Node, digest: bytes) -> Taken:
        here = self.nbytes[rules, digest]
        whole = sum(nbytes for (whose, _), nbytes in self.nbytes.items() if whose is rules)
        return Taken(here, whole - here)


def parse_wanted(intent: str, *, hard: bool, for_s: float, dry_run: bool) -> Wanted:
    """Raises `InvalidRequest`."""
    if intent not in list(Intent):
        raise InvalidRequest(f"an intent is one of {', '.join(Intent)}, not {intent!r:.40}")
    if hard and intent != Intent.PIN:
        raise InvalidRequest("only a pin can be hard")
    if (intent == Intent.KEEP) != (for_s > 0) or not for_s <= KEEP_MAX_S:
        raise InvalidRequest(
            f"for_s says how long blocks are to be kept, at most {KEEP_MAX_S:.0f} seconds, and is for that only"
        )
    return Wanted(Intent(intent), hard, for_s, dry_run)


@dataclass(eq=False)
class Intents:
    """See the module."""

    tiers: Tiers
    fetcher: BlockFetcher
    prefetcher: Prefetcher
    sessions: Sessions
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._awake = asyncio.Event()
        self.tiers.node.counters.intents = dict.fromkeys(map(str, Outcome), 0)

    async def run(self) -> None:
        """End what was kept for a time. Until cancelled."""
        keeps = self.tiers.node.keeps
        while True:
            await wait_for(self._awake, None if keeps.next_end is None else LOOK_S)
            self._awake.clear()
            more = True
            while more:
                more = keeps.end_some(self.clock())
                await asyncio.sleep(0)

    async def answer(
        self,
        tenant: Tenant,
        namespace: NamespaceState | None,
        keys: bytes,
        name: str,
        wanted: Wanted,
    ) -> IntentAnswer:
        """Do what is wanted for the blocks of one prompt, or of a session by its name, all of its agents.

        namespace: of the keys; for a session only its blocks in that one, or None: in all.
        Raises `InvalidRequest`.
        """
        if bool(keys) == bool(name):
            raise InvalidRequest("name the blocks of a prompt, or a session")
        if name:
            answer = await self._of_session(tenant, namespace, name, wanted)
        elif namespace is None:
            raise InvalidRequest("name the namespace of these blocks")
        else:
            unique = _unique(split_keys(keys))
            answer = await self._of_chain(namespace, unique, wanted, _Promised())
        self.tiers.node.counters.intents[answer.outcome] += 1
        return answer

    async def _of_session(
        self, tenant: Tenant, namespace: NamespaceState | None, name: str, wanted: Wanted
    ) -> IntentAnswer:
        sessions = self.sessions
        session = sessions.get(tenant, name)
        if session is None:
            return IntentAnswer(Outcome.MISSING, reason=f"no session {name!r:.100} is known here")
        answers = []
        promised = _Promised()
        seen: dict[NamespaceState, set[bytes]] = {}
        for chain in list(session.chains.values()):
            if chain.namespace.retired or namespace not in {None, chain.namespace}:
                continue
            shared = 0
            if wanted.intent in {Intent.EXPEND, Intent.DROP}:
                shared = sessions.others_use(session, chain.namespace, chain.keys)
            keys = _unique(split_keys(chain.keys))
            before = seen.setdefault(chain.namespace, set())
            if wanted.intent is not Intent.PREFETCH:  # it needs prompts from their beginning on
                shared = sum(key not in before for key in keys[:shared])
                keys = [key for key in keys if key not in before]
                before.update(keys)
            if keys:
                answers.append(
                    await self._of_chain(chain.namespace, keys, wanted, promised, shared)
                )
        return together(answers)

    async def _of_chain(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        wanted: Wanted,
        promised: _Promised,
        shared: int = 0,
    ) -> IntentAnswer:
        """shared: blocks that others use too, from the first on."""
        match wanted.intent:
            case Intent.PREFETCH:
                return await self._prefetch(namespace, keys, wanted, promised)
            case Intent.EXPEND | Intent.DROP:
                return await self._part_with(namespace, keys, wanted, shared)
            case _:
                return await self._hold(namespace, keys, wanted, promised)

    # ---- pins, and what is kept for a time -----------------------------------------------------------

    async def _hold(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        wanted: Wanted,
        promised: _Promised,
    ) -> IntentAnswer:
        """Pin or unpin blocks in memory and on disks, or keep them for a time, in memory only."""
        keeping = wanted.intent is Intent.KEEP
        until = self.clock() + wanted.for_s
        here = nbytes = done = 0
        reason, limit = "", None
        for some in _pieces(keys, PINNED_TOGETHER):
            there = self._found(namespace, some, memory=keeping)
            here += len(there)
            if there and not reason:
                fit, limit = self._fit(namespace, there, wanted, promised)
                if fit < len(there):
                    reason = (
                        "the share of memory for what is kept is used up"
                        if keeping
                        else f"the quota of {wanted.pin_kind} pins is used up"
                    )
                held = there[:fit]
                if held and not wanted.dry_run:
                    try:
                        if keeping:
                            self.tiers.node.keeps.keep(namespace, held, until)
                        else:
                            packed = b"".join(held)
                            await pin_in_all_tiers(
                                self.tiers.node,
                                self.tiers.ssd,
                                [namespace],
                                packed,
                                wanted.pin_kind,
                            )
                    except KvpoolError as error:
                        reason, held = str(error), []
                done += len(held)
                nbytes += self._nbytes(namespace, held)
            await asyncio.sleep(0)
        if keeping:
            self._awake.set()
            if not here and self._found(namespace, keys[:TOGETHER]):
                reason = "they are on disks only: prefetch them first"
        return _answer(keys, here, done, nbytes, reason, limit)

    def _fit(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        wanted: Wanted,
        promised: _Promised,
    ) -> tuple[int, int | None]:
        """How many of these blocks may be held, and the bytes that are left if not all."""
        blocks, room = len(keys), None
        keeping = wanted.intent is Intent.KEEP
        digest = namespace.directory_digest
        limits: list[tuple[Node, partial[Fit]]] = []
        for rules in (self.tiers.node,) if keeping else (self.tiers.node, *self.tiers.ssd.rules()):
            state = rules.namespaces.by_directory(digest)
            if state is None:
                continue
            taken = promised.taken(rules, digest)
            if keeping:
                limit = partial(rules.keeps.fit, state, taken=taken)
            else:
                limit = partial(rules.pins.fit, state, kind=wanted.pin_kind, taken=taken)
            fit = limit(keys)
            if fit.blocks < blocks:
                blocks, room = fit.blocks, fit.room
            limits.append((rules, limit))
        if wanted.dry_run:
            for rules, limit in limits:
                promised.nbytes[rules, digest] += limit(keys[:blocks]).nbytes
        return blocks, room

    # ---- prefetching -------------------------------------------------------------------------------

    async def _prefetch(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        wanted: Wanted,
        promised: _Promised,
    ) -> IntentAnswer:
        there, located = await self.fetcher.lookups.locate_prefix(namespace, keys, LOOKUP_S)
        if not there:
            return _answer(keys, 0, 0, 0, "neither this node nor another one has them")
        here = self.tiers.node.leases.match(namespace, [], keys)
        if here >= there:
            return _answer(keys, there, there, 0)
        tenant = namespace.tenant.name
        room = self.tiers.node.candidates.room_bytes(namespace) - self.prefetcher.waiting_bytes(
            tenant
        )
        room = max(0, room - promised.brought)
        fit, nbytes = self._fitting(namespace, keys[:there], located, room)
        reason, limit = "", None
        if fit < there:
            reason = "there is no room for more without the eviction of blocks that are in use"
            limit = room
        if fit <= here or not nbytes:  # of a window's last block only whole ones are of use
            return _answer(keys, there, here, 0, reason, limit)
        chosen = b"".join(keys[:fit])
        if wanted.dry_run:
            act = self.prefetcher.foreseen(namespace, chosen)
            promised.brought += nbytes
        else:
            act = self.prefetcher.order(namespace, chosen, nbytes)
        if act is Outcome.REFUSED:
            return _answer(keys, there, here, 0, f"{QUEUE_MAX} prompts wait already")
        answer = _answer(keys, there, fit, nbytes, reason, limit)
        if act is Outcome.DEFERRED and answer.outcome is Outcome.ACCEPTED:
            return replace(answer, outcome=act, reason="others are brought before it")
        return answer

    def _fitting(
        self, namespace: NamespaceState, keys: Sequence[bytes], located: Located, room: int
    ) -> tuple[int, int]:
        """How many blocks of a prompt, from the first on, can be brought into so much room, and the bytes that takes."""
        takes: Counter[bytes] = Counter()
        for request in missing(namespace.tables, keys, located):
            for key in request.keys:
                takes[key] += request.table.stride
        nbytes = 0
        for at, key in enumerate(keys):
            if nbytes + takes[key] > room:
                return at, nbytes
            nbytes += takes[key]
        return len(keys), nbytes

    # ---- what is not needed any more ---------------------------------------------------------------

    async def _part_with(
        self, namespace: NamespaceState, keys: Sequence[bytes], wanted: Wanted, shared: int
    ) -> IntentAnswer:
        """Of these blocks those that others do not use too, which are the last ones."""
        drop = wanted.intent is Intent.DROP
        here = len(self._found(namespace, keys[:shared]))
        reason = "the first blocks are in use by other sessions" if here else ""
        done: list[bytes] = []
        nbytes = 0
        for some in _pieces(keys[shared:][::-1], TOGETHER):  # the end first
            there = self._found(namespace, some)
            here += len(there)
            free = [key for key in there if not self._is_held(namespace, key, drop=drop)]
            if len(free) < len(there):
                reason = "some are pinned" if drop else "some are pinned, or being read or copied"
            nbytes += self._nbytes(namespace, free)
            if not wanted.dry_run:
                if drop:
                    self._drop(namespace, free)
                else:
                    self.tiers.node.candidates.expend(namespace, free, left=True)
                    self.tiers.ssd.expend(namespace, free)
            done += free
            await asyncio.sleep(0)
        return _answer(keys, here, len(done), nbytes, reason)

    def _is_held(self, namespace: NamespaceState, key: bytes, *, drop: bool) -> bool:
        """Whether a pin keeps a block from being dropped anywhere here; or in memory from being expended, or a read."""
        for tier, rules in self.tiers:
            state = rules.namespaces.by_directory(namespace.directory_digest)
            for table in () if state is None else state.tables:
                block = table.blocks.get(key)
                if block is None:
                    continue
                if drop:
                    if block.pin == PIN_HARD:
                        return True
                elif tier == "dram" and (block.pin != PIN_NONE or block.leases):
                    return True
        return False

    def _drop(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        self.tiers.node.keeps.forget(namespace, keys)
        for _, rules in self.tiers:
            state = rules.namespaces.by_directory(namespace.directory_digest)
            if state is not None:
                rules.removal.give_up(state, keys)

    # ---- answers -----------------------------------------------------------------------------------

    def _masks(
        self, namespace: NamespaceState, keys: Sequence[bytes], *, memory: bool = False
    ) -> list[int]:
        """The parts of each block that are on this node, or in its memory."""
        masks = [0] * len(keys)
        for tier, rules in self.tiers:
            if memory and tier != "dram":
                continue
            _, found = rules.inventory.masks(namespace.directory_digest, keys)
            if found:
                masks = [mask | more for mask, more in zip(masks, found, strict=True)]
        return masks

    def _found(
        self, namespace: NamespaceState, keys: Sequence[bytes], *, memory: bool = False
    ) -> list[bytes]:
        """Those of the blocks of which any part is on this node, or in its memory."""
        return list(compress(keys, self._masks(namespace, keys, memory=memory)))

    def _nbytes(self, namespace: NamespaceState, keys: Sequence[bytes]) -> int:
        """Of the parts of these blocks that are on this node."""
        sizes = [table.spec.nbytes for table in namespace.tables]
        return sum(
            sum(size for part, size in enumerate(sizes) if mask >> part & 1)
            for mask in self._masks(namespace, keys)
        )


def _answer(
    keys: Sequence[bytes],
    here: int,
    done: int,
    nbytes: int,
    reason: str = "",
    limit: int | None = None,
) -> IntentAnswer:
    """here: how many of the blocks there are. done: for how many the intent holds, and how many bytes these have."""
    if not here:
        outcome, reason = Outcome.MISSING, reason or "this node has none of them"
    elif not done:
        outcome = Outcome.REFUSED
    else:
        outcome = Outcome.ACCEPTED if done >= here else Outcome.CLIPPED
    return IntentAnswer(
        *(outcome, done, nbytes, len(keys), len(keys) - here), limit_bytes=limit, reason=reason
    )


def together(answers: Sequence[IntentAnswer]) -> IntentAnswer:
    """One answer for several prompts."""
    if not answers:
        return IntentAnswer(Outcome.MISSING, reason="nothing of it is known any more")
    if len(answers) == 1:
        return answers[0]
    outcomes = {answer.outcome for answer in answers if answer.outcome is not Outcome.MISSING}
    if not outcomes:
        outcome = Outcome.MISSING
    elif len(outcomes) == 1:
        (outcome,) = outcomes
    elif outcomes == {Outcome.ACCEPTED, Outcome.DEFERRED}:
        outcome = Outcome.DEFERRED
    else:
        outcome = Outcome.CLIPPED
    limits = [answer.limit_bytes for answer in answers if answer.limit_bytes is not None]
    return IntentAnswer(
        outcome,
        sum(answer.blocks for answer in answers),
        sum(answer.nbytes for answer in answers),
        sum(answer.asked for answer in answers),
        sum(answer.missing for answer in answers),
        min(limits, default=None),
        next((answer.reason for answer in answers if answer.reason), ""),
    )


def _unique(keys: Sequence[bytes]) -> list[bytes]:
    return list(dict.fromkeys(keys))


def _pieces(keys: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    for at in range(0, len(keys), size):
        yield keys[at : at + size]
