"""Which blocks to load, save and pin, and the messages that carry it. Pure: no vLLM, no I/O.

A *chain index* counts blocks of `hash_tokens` tokens, the granularity of the engine's block hashes.
A cache group whose blocks hold `stride` times as many tokens has its own, coarser index: its block
`b` is stored under the key of chain index `(b + 1) * stride - 1`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.engine_plugins.vllm.following import Following
from kvpool.engine_plugins.vllm.layout.shards import Held
from kvpool.types import KEY_BYTES, REQUEST_MAX, NamespaceRecord, PartKind, Recompute

NULL_BLOCK = 0
"""vLLM's block id for "not there": blocks that slid out of a window."""

SAVE_WEIGHT = 0.2
"""Of a save in the average of all of its size."""

QUIET_S = 0.5, 30.0


@dataclass(frozen=True)
class GroupRule:
    """One cache group that is stored: its number in vLLM, its stride, and what a hit needs of it.

    state: a block is the state of its layers after the block's last token, and stands for all tokens before it. The
        engine writes few of them, and hands over those that it keeps (`Handover`); no other is saved.
    """

    group: int
    stride: int = 1
    kind: PartKind = PartKind.FULL
    window_blocks: int = 0
    state: bool = False


Handover = tuple[int, int, int]
"""A state that the engine keeps: vLLM group, block id, and the tokens that it stands for."""


# --- scheduler to worker ------------------------------------------------------------------------


@dataclass
class GroupLoad:
    """Blocks of one group to fill: `block_ids[i]` takes the group's block `first + i`.

    first: in the group's own index, counted from the start of the lease.
    """

    stride: int
    first: int
    block_ids: list[int]


def label_of(request_id: str) -> str:
    """By which the pool knows a request: as the engine names it, but for what no label may have."""
    label = request_id[:REQUEST_MAX]
    return label if label.isprintable() else "".join(c for c in label if c.isprintable())


@dataclass
class LoadJob:
    """Fill a request's blocks from leased slots. `groups` is aligned with the engine's rules.

    token: of the lease that all ranks share. lookup: where each has its own, the lookup by which it got it.
    """

    job: int
    request_id: str
    token: str
    sync: bool
    groups: list[GroupLoad]
    lookup: int = 0

    def block_ids(self) -> set[int]:
        return {block for group in self.groups for block in group.block_ids}


@dataclass
class LookupJob:
    """Lease what this rank reads of a prompt's blocks, at its own node's daemon (`rank_lookups.py`).

    keys: packed. wait_s: how long to wait for blocks of other nodes; following: how long while they are computed.
    """

    job: int
    keys: bytes
    lease_s: float
    wait_s: float
    recompute: Recompute | None
    following: Following | None
    trace: str


@dataclass
class GroupSave:
    """Blocks of one group to save: `block_ids[i]` under the i-th of the packed `keys`.

    rule: the group, as a position in the engine's rules.
    parent: the key before the first in the chain, if there is one.
    """

    rule: int
    keys: bytes
    block_ids: list[int]
    parent: bytes | None


@dataclass
class SaveJob:
    """Save blocks that the step which carries this job completes."""

    job: int
    request_id: str
    generation: int
    saves: list[GroupSave]


@dataclass
class Opening:
    """Open the namespace: what is saved from here on belongs to it.

    generation: how many times the engine has opened it; the number that later saves carry.
    weights: the generation of weights in which it was opened (`Client.namespaces.generation`), the same on all ranks,
        whatever others reset meanwhile; -1: not known yet, another opening follows.
    """

    generation: int
    record: NamespaceRecord
    weights: int


@dataclass
class StepPlan:
    """What the scheduler half asks of every rank in one step.

    opening: the namespace is to be opened (again), before any of the saves.
    reused: saves under way of which this step may overwrite blocks.
    acknowledged: failed synchronous loads that the scheduler has heard of.
    want_report: the scheduler does not know the ranks' layouts yet.
    measured: number of the step, if it is to be told how long its forward pass takes; else 0.
    reset: the ranks are to report which weights they have since the reset of this number; 0: they need not.
    lookups: of ranks that lease by themselves. released: those whose leases are given back.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    opening: Opening | None = None
    reused: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    want_report: bool = False
    measured: int = 0
    reset: int = 0
    lookups: list[LookupJob] = field(default_factory=list)
    released: list[int] = field(default_factory=list)


# --- worker to scheduler ------------------------------------------------------------------------


@dataclass
class RankReport:
    """What one rank knows of the bytes of its paged KV.

    groups: for each stored group, its layers as (name, bytes a block).
    held: for each of them, how the rank's share of it is cut into parts.
    backends: attention backend of each layer.
    config: digest of the model's configuration, once the model is loaded: some change it as they are, and only in
        the rank's own process.
    rotations: how the rank's models turn positions into rotations (`positions.py`).
    fp8: the type in which the rank's platform reads 8-bit floats.
    place: the machine and the socket of the rank's daemon.
    life: of the daemon's spare device memory, if the rank is attached to it and computes on that very
        device; else 0.
    weights: a digest of the rank's weights as they were at the start, or after a reset; empty: they cannot be seen.
    reset: number of that reset; 0: the start.
    pinned: whether its device may read the pool's memory: it is registered with the driver, which takes a while.

    The last four change: then the rank reports anew.
    """

    rank: int
    device: str
    layout: str
    isa: str
    groups: list[list[tuple[str, int]]]
    backends: dict[str, str]
    life: int = 0
    held: list[Held] = field(default_factory=list)
    weights: str = ""
    reset: int = 0
    pinned: bool = True
    place: str = ""
    config: str = ""
    rotations: list[str] = field(default_factory=list)
    fp8: str = ""


@dataclass
class StepDone:
    """What ranks finished since their last report; merged over ranks before the scheduler sees it.

    loads, saves: job → number of ranks that ended it.
    failed_loads, failed_saves: jobs that failed on some rank.
    outdated: generations in which saves were refused, since another engine has reset the namespace.
    steps: measured step → seconds of its forward pass, and how many pipeline stages these are of.
    save_seconds: ended save → its seconds, of the slowest rank.
    load_seconds: synchronous load → how long it took on the slowest rank.
    lookups: job → how many blocks each of some ranks has.
    """

    loads: dict[int, int] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    failed_loads: set[int] = field(default_factory=set)
    failed_saves: set[int] = field(default_factory=set)
    outdated: set[int] = field(default_factory=set)
    reports: list[RankReport] = field(default_factory=list)
    steps: dict[int, tuple[float, int]] = field(default_factory=dict)
    save_seconds: dict[int, float] = field(default_factory=dict, compare=False)
    load_seconds: dict[int, float] = field(default_factory=dict, compare=False)
    lookups: dict[int, list[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.reports or self.steps or self.lookups)

    def merge(self, other: StepDone) -> None:
        """Add another rank's report to this one."""
        for mine, theirs in ((self.loads, other.loads), (self.saves, other.saves)):
            for job, ranks in theirs.items():
                mine[job] = mine.get(job, 0) + ranks
        self.failed_loads |= other.failed_loads
        self.failed_saves |= other.failed_saves
        for job, seconds in other.save_seconds.items():
            self.save_seconds[job] = max(self.save_seconds.get(job, 0.0), seconds)
        self.outdated |= other.outdated
        self.reports = self.reports + other.reports
        for job, seconds in other.load_seconds.items():
            self.load_seconds[job] = max(seconds, self.load_seconds.get(job, 0.0))
        for job, blocks in other.lookups.items():
            self.lookups[job] = self.lookups.get(job, []) + blocks
        for step, (seconds, stages) in other.steps.items():
            mine_s, mine_stages = self.steps.get(step, (0.0, 0))
            self.steps[step] = mine_s + seconds, mine_stages + stages


# --- rules --------------------------------------------------------------------------------------


def common_life(reports: Iterable[RankReport]) -> int:
    """The life of the device memory that every rank reads by itself; 0: there is no such."""
    lives = {report.life for report in reports}
    return lives.pop() if len(lives) == 1 else 0


def common_weights(reports: Sequence[RankReport], reset: int) -> str | None:
    """A digest of the whole engine's weights since that reset; empty: some cannot be seen; None: not all ranks said it.

    reports: of all ranks, by rank.
    """
    if any(report.reset != reset for report in reports):
        return None
    each = [report.weights for report in reports]
    return hashlib.sha256("\n".join(each).encode()).hexdigest()[:32] if all(each) else ""


def several_nodes(reports: Iterable[RankReport]) -> bool:
    """Whether the ranks do not all use one daemon."""
    return len({report.place for report in reports}) > 1


def block_key(block_hash: bytes) -> bytes:
    """The pool's key of a block: the last 16 bytes of the engine's chained hash."""
    return block_hash[-KEY_BYTES:]


def pack(block_hashes: Iterable[bytes]) -> bytes:
    """Packed keys of a run of the chain."""
    return b"".join([block_hash[-KEY_BYTES:] for block_hash in block_hashes])


def plan_load(
    rules: Sequence[GroupRule], tables: Sequence[Sequence[int]], base: int, start: int, end: int
) -> list[GroupLoad]:
    """Where the blocks of chain range [start, end) go, for a lease whose keys begin at `base`.

    tables: the request's block ids, by vLLM group. A null block at the front of a range slid out
    of its window and is not loaded; inside a range it would be a hole that attention reads, which
    the engine never makes.
    """
    groups = []
    for rule in rules:
        first, last = start // rule.stride, end // rule.stride
        ids = list(tables[rule.group][first:last])
        assert len(ids) == last - first, "an engine allocates before it loads"
        skipped = 0
        while skipped < len(ids) and ids[skipped] == NULL_BLOCK:
            skipped += 1
        ids = ids[skipped:]
        assert NULL_BLOCK not in ids, "a window has no holes"
        groups.append(GroupLoad(rule.stride, first + skipped - base // rule.stride, ids))
    return groups


def plan_save(
    rules: Sequence[GroupRule],
    tables: Sequence[Sequence[int]],
    block_hashes: Sequence[bytes],
    wanted: Iterable[int],
) -> list[GroupSave]:
    """The saves of the chain indices `wanted` (ascending), one for each group and unbroken run.

    Only blocks that the tables hold are saved, and no states: `plan_states`.
    """
    saves = []
    for run in runs(wanted):
        for position, rule in enumerate(rules):
            if rule.state:
                continue
            table = tables[rule.group]
            keys: list[bytes] = []
            ids: list[int] = []
            parent = None
            for index in run:
                block, rest = divmod(index + 1, rule.stride)
                if rest or block > len(table) or table[block - 1] == NULL_BLOCK:
                    continue
                if not ids and block > 1:
                    parent = block_key(block_hashes[(block - 1) * rule.stride - 1])
                keys.append(block_key(block_hashes[index]))
                ids.append(table[block - 1])
            if ids:
                saves.append(GroupSave(position, b"".join(keys), ids, parent))
    return saves


def plan_states(
    rules: Sequence[GroupRule],
    handed: Iterable[Handover],
    block_hashes: Sequence[bytes],
    hash_tokens: int,
    end: int,
) -> dict[int, list[GroupSave]]:
    """The saves of states that the engine keeps, by the chain index of their last block, ascending.

    end: chain index behind the last block whose state is saved. States within a block are left out: they have no key.
    """
    positions = {rule.group: at for at, rule in enumerate(rules) if rule.state}
    saves: dict[int, list[GroupSave]] = {}
    for group, block_id, tokens in sorted(handed, key=lambda each: each[2]):
        position = positions.get(group)
        blocks, inside = divmod(tokens, hash_tokens)
        if position is None or inside or not 0 < blocks <= min(end, len(block_hashes)):
            continue
        stride = rules[position].stride
        if blocks % stride or block_id == NULL_BLOCK:
            continue
        parent = block_key(block_hashes[blocks - stride - 1]) if blocks > stride else None
        save = GroupSave(position, block_key(block_hashes[blocks - 1]), [block_id], parent)
        saves.setdefault(blocks - 1, []).append(save)
    return saves


def state_name(key: bytes, rule: int) -> bytes:
    """What `Offered` knows a state by, where the key alone means the blocks of other groups. It ends in the key."""
    return rule.to_bytes(2) + key


def runs(indices: Iterable[int]) -> Iterator[list[int]]:
    """Split ascending numbers into runs without gaps, so that each save has one true parent."""
    run: list[int] = []
    for index in indices:
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


class Offered:
    """Keys that were offered to the pool of late, so that no block is saved twice.

    A key is forgotten after `keep_s`, so that blocks which the pool has evicted since are offered
    again when a request uses them, and when more than `limit` are known.
    """

    def __init__(self, limit: int, keep_s: float) -> None:
        self._limit = limit
        self._keep_s = keep_s
        self._since: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def holds(self, key: bytes, now: float) -> bool:
        since = self._since.get(key)
        return since is not None and now - since < self._keep_s

    def add(self, keys: Iterable[bytes], now: float) -> None:
        for key in keys:
            self._since[key] = now
            self._since.move_to_end(key)
        while len(self._since) > self._limit:
            self._since.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._since.pop(key, None)

    def clear(self) -> None:
        self._since.clear()


class SaveTimes:
    """How long saves take, by their sizes: a save has a fixed part, and generated blocks are saved one by one."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by powers of two of blocks

    def learn(self, blocks: int, seconds: float) -> None:
        size = blocks.bit_length()
        before = self._seconds.get(size, seconds)
        self._seconds[size] = before + SAVE_WEIGHT * (seconds - before)

    def expect(self, saves: Iterable[int]) -> float | None:
        """Seconds of saves of so many blocks each, one after the other; None: nothing was learned yet.

        From the nearest size: in proportion if that is smaller, the same if it is larger.
        """
        if not self._seconds:
            return None
        expected_s = 0.0
        for blocks in saves:
            size = blocks.bit_length()
            near = min(self._seconds, key=lambda known: (abs(known - size), known))
            expected_s += self._seconds[near] * 2.0 ** max(0, size - near)
        return expected_s
