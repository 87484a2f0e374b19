"""A node, with its tiers and an engine's own cache: which blocks are there, under the real eviction policies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random
from typing import Any

from kvpool.placement.peers import Peers
from kvpool.simulator.links import Link
from kvpool.simulator.shape import Shape
from kvpool.storage.eviction import Costs, EvictionPolicy, Lru, make_policy

SPREAD = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio: makes numbers in a row evenly spread ones


class Block:
    """A block in a tier, as its eviction policy knows it."""

    __slots__ = ("copy", "depth", "freq", "ident", "key", "newer", "older", "queue")

    def __init__(self, key: Hashable, depth: int, *, copy: bool) -> None:
        self.key = key
        self.ident = hash(key) * SPREAD & (1 << 64) - 1
        self.depth = depth
        self.copy = copy
        self.freq = 0
        self.queue = 0
        self.older: Any = None
        self.newer: Any = None


class Tier:
    """Blocks of one size. Copies of what other nodes keep are evicted before all else, as daemons do."""

    def __init__(self, capacity: int, policy: str, costs: Costs | None = None) -> None:
        """capacity: in blocks; 0 holds nothing."""
        self.capacity = capacity
        self.held: dict[Hashable, Block] = {}
        self._policy: EvictionPolicy = make_policy(policy, max(1, capacity), costs)
        self._copies = Lru(1)  # its capacity bounds nothing

    def prefix(self, keys: Sequence[Hashable], start: int = 0) -> int:
        """How far the chain goes on here from there, as a length of the whole."""
        held = self.held
        for position in range(start, len(keys)):
            if keys[position] not in held:
                return position
        return len(keys)

    def touch(self, keys: Sequence[Hashable]) -> None:
        """They were read, from the head on. Those that are not here are passed over."""
        held = self.held
        blocks = [held[key] for key in keys if key in held]
        self._policy.touch([block for block in blocks if not block.copy])
        self._copies.touch([block for block in blocks if block.copy])

    def put(
        self, keys: Sequence[Hashable], depth: int, *, copy: bool = False
    ) -> tuple[list[Hashable], list[tuple[Hashable, int]]]:
        """Store a run of a chain, the first of which has `depth` blocks before it.

        What is new here, and what was evicted for it, with its depth.
        """
        held = self.held
        new = [
            Block(key, depth + number, copy=copy)
            for number, key in enumerate(keys)
            if key not in held
        ][: self.capacity]
        evicted: list[tuple[Hashable, int]] = []
        for _ in range(len(held) + len(new) - self.capacity):
            victim: Block = self._copies.pop() or self._policy.pop()  # type: ignore[assignment]
            del held[victim.key]
            evicted.append((victim.key, victim.depth))
        (self._copies if copy else self._policy).insert(new)
        held.update((block.key, block) for block in new)
        return [block.key for block in new], evicted


class Node:
    """A machine: its tiers, its links, the engine on it."""

    def __init__(self, name: str, number: int, shape: Shape, dram: int, ssd: int) -> None:
        self.name = name
        self.bit = 1 << number
        self.incarnation = number.to_bytes(8)
        self.labels = shape.labels.get(name, {})
        self.peers = Peers(self.labels, Random(number))
        hardware = shape.speeds.hardware
        block = shape.block_bytes
        self.out = Link(shape.bytes_s)
        self.into = Link(shape.bytes_s)
        self.host = Link(hardware.host_bytes_s)
        self.disk = Link(hardware.ssd_bytes_s)
        _, token_s, attended_s = shape.speeds.coefficients
        block_s = shape.block_tokens * token_s
        growth_s = shape.block_tokens**2 * attended_s
        ssd_s = block / hardware.ssd_bytes_s
        dram_costs = Costs(block / hardware.host_bytes_s, ssd_s if ssd else None, block_s, growth_s)
        self.gpu = Tier(shape.speeds.gpu_tokens // shape.block_tokens, "lru")
        self.dram = Tier(dram, shape.eviction, dram_costs)
        self.ssd = Tier(ssd, shape.eviction, Costs(ssd_s, None, block_s, growth_s))

    def local(self, keys: Sequence[Hashable], start: int) -> int:
        """How far the chain goes on from there in its memory or on its disks."""
        dram, ssd = self.dram.held, self.ssd.held
        for position in range(start, len(keys)):
            if keys[position] not in dram and keys[position] not in ssd:
                return position
        return len(keys)

    def read(self, keys: Sequence[Hashable]) -> None:
        """They were read here, each from the fastest tier that has it."""
        self.dram.touch(keys)
        self.ssd.touch([key for key in keys if key not in self.dram.held])
