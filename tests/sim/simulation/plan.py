"""What one seed makes of the world: how many nodes, how little memory, what goes wrong and how often."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvpool.types import DEFAULT_TENANT, NamespaceRecord, PartKind, PartSpec

Write = Literal["back", "through"]
WRITES: tuple[Write, ...] = ("back", "through")

SLAB = 4096

PART_CHOICES = (
    (PartSpec(64),),
    (PartSpec(100),),
    (PartSpec(64), PartSpec(64)),
    (PartSpec(64), PartSpec(128)),
    (PartSpec(64), PartSpec(64, PartKind.WINDOW, 2)),
    (PartSpec(64), PartSpec(192, stride=2)),
)
# So few of these fit into memory that it gives some up all the time.
LARGE_PART_CHOICES = (
    (PartSpec(448),),
    (PartSpec(300),),
    (PartSpec(256), PartSpec(384)),
    (PartSpec(320), PartSpec(448, PartKind.WINDOW, 2)),
    (PartSpec(256), PartSpec(512, stride=2)),
)

ACTIONS = {
    "crash": 3,
    "stop": 2,
    "pause": 4,
    "worker": 2,
    "cut": 3,
    "mute": 2,
    "alone": 2,
    "away": 1,
    "expire": 2,
    "no_directory": 2,
    "lose": 2,
    "drain": 2,
}

DISK_ACTIONS = {
    "disk_dies": 6,
    "disk_slow": 3,
    "disk_stalls": 3,
    "disk_refuses": 4,
    "disk_keeps": 4,
    "disk_unreadable": 3,
    "disk_flips": 6,
    "disk_closed": 2,
    "disk_empty": 1,
}

# Lies of a disk, and places that keep nothing.
MEDIA_ACTIONS = {
    "disk_loses": 4,
    "disk_misdirects": 4,
    "disk_spoils": 4,
}

# How few may be under way, or wait, in place of what a large node takes: see `World`.
LIMITS: dict[str, Sequence[int]] = {
    "pulls": (8, 12),  # with fewer, one that hangs holds them all
    "pulls_each": (1, 2),
    "copies": (1, 3),
    "loads": (1, 2),
    "waiting": (1, 3),
    "order_bytes": (256, 1024),
    "stream_leases": (2,),
    "stream_questions": (1, 2),
    "rounds": (2,),
    "ssd_writes": (1,),
    "ssd_queue": (2, 8),
    "wanted": (4, 16),
    "questions": (8, 12),
    "questions_each": (
        4,
        6,
    ),  # with fewer, one offer that takes its time, as it may, would hold them all
    "waits": (4, 8),
    "waits_each": (1, 2),
    "disk_writers": (1, 2),
}
# Threads of a transfer worker beyond those that one source may keep. Without it control orders none too many; with it
# each source may keep few, so that orders do wait.
THREADS_BEYOND = (1, 2, 4)
EACH = ("pulls_each", "questions_each", "waits_each", "copies")

# What does not end by itself, until all that should go on beside it was seen to go on.
Stays = Literal["", "stopped", "mute", "disk", "membership", "directory"]
NODE_STAYS: tuple[Stays, ...] = ("stopped", "mute")

MODEST_SLABS = 16
MODEST_CHAINS, MODEST_BLOCKS = 2, 4


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """A tenant of a seed. slabs: of its segment on each node. namespaces: how many it has, of the same parts.

    modest: all its prompts fit into each of its segments, several times over: it should lose nothing.
    """

    name: str
    slabs: int
    namespaces: int = 1
    modest: bool = False


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks of a seed. most: of one node; some have fewer.

    pages: of each at least, and page: its bytes. entries_max: what its index has room for. pace_s: what a
    step of an order takes at most. write: see `WriteMode`.
    """

    most: int
    pages: int
    page: int
    entries_max: int
    pace_s: float
    write: Write

    @classmethod
    def draw(cls, rng: random.Random) -> Disks:
        page = rng.choice((64, SLAB))
        # The slab of a disk is as small as one of memory; so several sizes of blocks share few of them.
        pages = rng.choice((8, 12, 24)) if page == SLAB else rng.choice((1, 2, 4)) * SLAB // page
        return cls(
            most=rng.choice((1, 2)),
            pages=pages,
            page=page,
            entries_max=pages if rng.random() < 0.7 else pages // 2,
            pace_s=rng.choice((0.002, 0.02, 0.1)),
            write=rng.choice(WRITES),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Probabilities are a call, a transfer, or a notification; 0 for what does not happen in this seed.

    slabs: of a node's segment, 4 KiB each. chains, blocks: how many prompts, and how long each is.
    roomy: all that is ever put fits into every node. actions: what happens to nodes, with weights. disks: None: there are none.
    limits: of `LIMITS`, those that are lower than in a daemon. namespaces: of the default tenant; tenants: the others.
    stays: what goes wrong for good once all else has come right. dies: how often a node dies at one of the places where
    that is worst (`World.may_die`). members: nodes of which there is nothing but a record. delete: how often the cluster
    deletes a namespace, although it is used.
    """

    nodes: int
    operations: int
    gap_s: float
    slabs: int
    parts: tuple[PartSpec, ...]
    chains: int
    blocks: int
    replicas: int
    zones: bool
    roomy: bool
    directory: bool
    small_batches: bool
    lose_message: float = 0.0
    stall_message: float = 0.0
    slow_message: float = 0.0
    twice_message: float = 0.0
    flip_bit: float = 0.0
    publish_fails: float = 0.0
    publish_late: float = 0.0
    publish_twice: float = 0.0
    publish_lost: float = 0.0
    locate_fails: float = 0.0
    locate_old: float = 0.0
    locate_lies: float = 0.0
    membership_fails: float = 0.0
    news_lost: float = 0.0
    news_late_s: float = 0.02
    client_dies: float = 0.0
    reset: float = 0.0
    remove: float = 0.0
    pin: float = 0.0
    quota: float = 0.0
    follow: float = 0.0
    actions: dict[str, int] = field(default_factory=dict)
    fault_gap_s: float = 1.0
    disks: Disks | None = None
    limits: dict[str, int] = field(default_factory=dict)
    namespaces: int = 1
    tenants: tuple[TenantPlan, ...] = ()
    stays: Stays = ""
    dies: float = 0.0
    members: int = 0
    delete: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether nothing goes wrong at all."""
        return not (
            self.actions
            or self.lose_message
            or self.stall_message
            or self.slow_message
            or self.flip_bit
            or self.publish_fails
            or self.publish_late
            or self.publish_lost
            or self.locate_fails
            or self.locate_old
            or self.locate_lies
            or self.membership_fails
            or self.client_dies
        )

    def with_quotas(self) -> Plan:
        """Operators change how much the namespace may hold. Not where several copies are wanted of all."""
        return replace(self, quota=0.03 if self.replicas == 1 else 0.0)

    def with_follows(self, rng: random.Random) -> Plan:
        """Clients follow prompts, in two of five seeds."""
        return replace(self, follow=rng.choice((0.0, 0.0, 0.0, 0.05, 0.2)))

    def with_bad_media(self, rng: random.Random) -> Plan:
        """Disks lie, in half of the seeds that have some where something goes wrong."""
        if self.disks is None or not self.actions or rng.random() < 0.5:
            return self
        return replace(self, actions={**self.actions, **MEDIA_ACTIONS})

    def with_limits(self, rng: random.Random) -> Plan:
        """Some of a daemon's limits are very low, in half of the seeds."""
        if rng.random() < 0.5:
            return self
        chosen = {name: rng.choice(few) for name, few in LIMITS.items() if rng.random() < 0.5}
        return replace(self, limits=chosen)

    def with_few_threads(self, rng: random.Random) -> Plan:
        """A transfer worker has fewer threads than control may order of it, in a quarter of the seeds with limits."""
        if not self.limits or rng.random() < 0.75:
            return self
        few = {name: rng.choice(LIMITS[name]) for name in EACH}
        beyond = {"threads_beyond": rng.choice(THREADS_BEYOND)}
        return replace(self, limits={**self.limits, **few, **beyond})

    def with_tenants(self, rng: random.Random) -> Plan:
        """Several tenants, and namespaces of them, in a fifth of the seeds. Each has its own share of the disks."""
        if rng.random() < 0.8:
            return self
        tenants = [
            TenantPlan("modest", MODEST_SLABS, modest=True),
            TenantPlan("other", self.slabs, rng.choice((1, 2))),
        ]
        chosen = tuple(tenants[: rng.choice((1, 2, 2))])
        disks = self.disks
        if disks is not None:
            count = 1 + len(chosen)
            disks = replace(disks, pages=disks.pages * count, entries_max=disks.entries_max * count)
        return replace(self, tenants=chosen, namespaces=rng.choice((1, 1, 2)), disks=disks)

    def with_what_stays(self, rng: random.Random) -> Plan:
        """Something goes wrong for good, in a sixth of the seeds."""
        if rng.random() > 1 / 6:
            return self
        kinds: list[Stays] = ["membership"]
        kinds += NODE_STAYS if self.nodes > 2 else ()
        kinds += ["directory"] if self.directory else []
        kinds += ["disk", "disk"] if self.disks is not None else []
        return replace(self, stays=rng.choice(kinds))

    def with_deaths(self, rng: random.Random) -> Plan:
        """Nodes die where that is worst, in half of the seeds where nodes die at all."""
        if "crash" not in self.actions or rng.random() < 0.5:
            return self
        return replace(self, dies=rng.choice((0.01, 0.05)))

    def with_many(self, rng: random.Random) -> Plan:
        """Many nodes, with few operations, in one of 200 seeds; many members without data in another."""
        drawn = rng.random()
        if drawn < 1 / 200:
            return replace(
                self,
                nodes=rng.choice((15, 30, 50)),
                directory=True,  # without one a node asks 16 peers, and no more
                operations=min(self.operations, 50),
                chains=min(self.chains, 12),
            )
        if drawn < 2 / 200:
            return replace(self, members=rng.choice((100, 300, 1000)), directory=True)
        return self

    def with_deletions(self, rng: random.Random) -> Plan:
        """Namespaces are deleted, in a tenth of the seeds."""
        return replace(self, delete=0.03) if rng.random() < 0.1 else self

    @property
    def segments(self) -> dict[str, int]:
        """Bytes of each tenant's segment on a node."""
        slabs = {DEFAULT_TENANT: self.slabs, **{one.name: one.slabs for one in self.tenants}}
        return {name: count * SLAB for name, count in slabs.items()}

    def record(self, number: int = 0) -> NamespaceRecord:
        """Of a tenant's namespace with this number."""
        model = f"simulated {number}" if number else "simulated"
        return NamespaceRecord({"model": model}, self.parts)

    @classmethod
    def draw(cls, rng: random.Random, *, disks: bool = True) -> Plan:
        """disks: False: none, where half of the seeds have some; all else is then as if there were none."""
        faults = rng.random() > 0.1
        roomy = rng.random() < 0.3

        def sometimes(most: float, chance: float = 0.5) -> float:
            return rng.uniform(0.1, 1.0) * most if faults and rng.random() < chance else 0.0

        actions = {
            name: weight for name, weight in ACTIONS.items() if faults and rng.random() < 0.5
        }
        parts = PART_CHOICES[rng.randrange(len(PART_CHOICES))]
        if roomy:
            slabs = 8
            chains, blocks = 6, 6
        else:
            slabs = len({part.nbytes for part in parts}) * rng.choice((1, 1, 2))
            blocks = rng.choice((2, 4, 8))
            chains = _chains(rng, slabs, parts, blocks)
        plan = cls(
            nodes=rng.randint(2, 5),
            operations=rng.randint(50, 200),
            gap_s=rng.choice((0.005, 0.02, 0.05)),
            slabs=slabs,
            parts=parts,
            chains=chains,
            blocks=blocks,
            replicas=rng.choice((1, 1, 1, 2, 3)),
            zones=rng.random() < 0.5,
            roomy=roomy,
            directory=rng.random() < 0.9,
            small_batches=rng.random() < 0.5,
            lose_message=sometimes(0.2),
            stall_message=sometimes(0.1),
            slow_message=sometimes(0.2),
            twice_message=sometimes(0.2),
            flip_bit=sometimes(0.1),
            publish_fails=sometimes(0.3),
            publish_late=sometimes(0.2, 0.3),
            publish_twice=sometimes(0.2, 0.3),
            publish_lost=sometimes(0.1, 0.2),
            locate_fails=sometimes(0.2),
            locate_old=sometimes(0.2),
            locate_lies=sometimes(0.1, 0.3),
            membership_fails=sometimes(0.2),
            news_lost=sometimes(0.3),
            news_late_s=rng.choice((0.02, 0.02, 0.5, 1.5)) if faults else 0.02,
            client_dies=sometimes(0.05),
            reset=rng.choice((0.0, 0.0, 0.02, 0.05)),
            remove=rng.choice((0.0, 0.0, 0.03)),
            pin=rng.choice((0.0, 0.0, 0.05)),
            actions=actions,
            fault_gap_s=rng.choice((0.2, 0.5, 1.0)),
        )
        return plan._with_disks(rng, faults) if disks and rng.random() >= 0.5 else plan

    def _with_disks(self, rng: random.Random, faults: bool) -> Plan:
        disks = Disks.draw(rng)
        troubles = {
            name: weight for name, weight in DISK_ACTIONS.items() if faults and rng.random() < 0.5
        }
        plan = replace(self, disks=disks, actions={**self.actions, **troubles})
        if self.roomy:
            return plan
        parts = rng.choice(LARGE_PART_CHOICES)
        slabs = 2 * len(parts)
        chains = _chains(rng, slabs, parts, self.blocks)
        return replace(plan, parts=parts, slabs=slabs, chains=chains)


def _chains(rng: random.Random, slabs: int, parts: Sequence[PartSpec], blocks: int) -> int:
    """How many prompts: between half of what a node holds, and twice what all do."""
    per_block = sum(-(-part.nbytes // 64) * 64 for part in parts)
    return min(64, max(4, int(rng.uniform(0.5, 6.0) * slabs * SLAB / per_block / blocks)))
