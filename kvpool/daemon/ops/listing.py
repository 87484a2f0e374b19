"""Lists of blocks and sessions for operators: some at a time from a cursor, or by their keys. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvpool.daemon.core.blocks import PIN_KINDS, Block, NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.sessions import Session
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest
from kvpool.hit_rule import needed
from kvpool.types import KEY_BYTES, split_keys
from kvpool.wire import answers

SCAN_ROWS = 10_000
"""Slots examined for one answer: about two milliseconds."""
STEP_ROWS = 500
CHAIN_TOGETHER = 1024
_PINS = {level: kind for kind, level in PIN_KINDS.items()}


def some_blocks(
    node: Node, tenant: str, wanted: set[bytes], keys: Sequence[bytes], count: int
) -> Iterator[tuple[int, list[Block]]]:
    """Blocks of a tenant's namespaces in a tier, `count` looked at at a time, and how many were: one part of each.

    wanted: the digests of the namespaces for the directory. keys: the blocks, or all if there are none.
    """
    for at in range(0, len(keys), count):
        some = keys[at : at + count]
        states = filter(None, map(node.namespaces.by_directory, wanted))
        living = [state for state in states if not state.retired]
        parts = ([t.blocks.get(key) for t in state.tables] for state in living for key in some)
        yield len(some), [next(filter(None, each)) for each in parts if any(each)]
    owner = node.tenants.get(tenant)
    cursor: int | None = None if keys or owner is None else 0
    while cursor is not None:
        blocks, cursor = node.inventory.scan(cursor, count, owner)
        yield count, [b for b in blocks if b.table.namespace.directory_digest in wanted]


def give_up(node: Node, blocks: Sequence[Block]) -> int:
    """Evict these blocks, with all their parts, from a tier; returns how many were there to go."""
    going: dict[NamespaceState, list[bytes]] = {}
    for block in blocks:
        going.setdefault(block.table.namespace, []).append(block.key)
    return sum(node.removal.give_up(namespace, keys) for namespace, keys in going.items())


def list_blocks(
    rules: Sequence[Node],
    namespaces: Sequence[NamespaceState],
    cursor: str,
    count: int,
    now: float,
    show: Callable[[Block, float], answers.Block],
) -> answers.Blocks:
    """About `count` blocks of these namespaces of one tenant in one tier, and the next cursor (null: the end).

    rules: of the tier's parts. Few may be returned, or none, between others' blocks. A block present
    throughout is returned once; one that comes or goes meanwhile at most once. show: makes the answer of a block and its
    age.
    """
    wanted = {namespace.directory_digest for namespace in namespaces}
    name = namespaces[0].tenant.name if namespaces else ""
    number, inner = _parse(cursor)
    found: list[answers.Block] = []
    left = SCAN_ROWS
    while number < len(rules) and left > 0 and len(found) < count:
        step = min(STEP_ROWS, left, count - len(found))
        tenant = rules[number].tenants.get(name)
        if tenant is None:
            number, inner = number + 1, 0
            continue
        blocks, after = rules[number].inventory.scan(inner, step, tenant)
        left -= step
        ages = rules[number].idle_age
        found += [
            show(block, ages.age_s(block.used, now))
            for block in blocks
            if block.table.namespace.directory_digest in wanted
        ]
        number, inner = (number + 1, 0) if after is None else (number, after)
    return answers.Blocks(found, f"{number}.{inner}" if number < len(rules) else None)


def show_blocks(
    tiers: Mapping[str, Sequence[Node]],
    namespaces: Sequence[NamespaceState],
    keys: Sequence[bytes],
    now: float,
    show: Callable[[Block, float, str], answers.Block],
) -> list[answers.Block]:
    """The replicas of each of these blocks here, tier by tier; absent blocks are left out. show: takes the tier too."""
    found = []
    for namespace in namespaces:
        for key in keys:
            for tier, rules in tiers.items():
                for node in rules:
                    state = node.namespaces.by_directory(namespace.directory_digest)
                    if state is None or state.retired:
                        continue
                    parts = [block for t in state.tables if (block := t.blocks.get(key))]
                    if parts:
                        age_s = node.idle_age.age_s(max(b.used for b in parts), now)
                        one = show(parts[0], age_s, tier)
                        one.leases = sum(block.leases for block in parts)
                        found.append(one)
    return found


def part_bytes(block: Block) -> tuple[int, int]:
    """Parts of a block that are in its tier, and the bytes of their slots."""
    strides = [t.stride for t in block.table.namespace.tables if block.key in t.blocks]
    return len(strides), sum(strides)


def describe_block(node: str, tier: str, block: Block, age_s: float) -> answers.Block:
    """Describe a block in a tier of a node. Its parent is right where `block.parent_known`."""
    parts, nbytes = part_bytes(block)
    return answers.Block(
        node=node,
        tier=tier,
        key=block.key.hex(),
        namespace=block.table.namespace.base.hex(),
        parent=block.parent.hex(),
        depth=block.depth,
        parts=parts,
        bytes=nbytes,
        pin=_PINS[block.pin],
        copy=block.secondary,
        reused=block.used > block.put,
        age_s=round(age_s, 1),
    )


def _parse(cursor: str) -> tuple[int, int]:
    if not cursor:
        return 0, 0
    number, _, inner = cursor.partition(".")
    if not (number.isdecimal() and inner.isdecimal()) or len(cursor) > 40:
        raise InvalidRequest(f"{cursor!r:.60} is not a cursor of this list")
    return int(number), int(inner)


def describe_session(session: Session, now: float) -> answers.Session:
    """Describe a session without its prompts."""
    chains = list(session.chains.values())
    return answers.Session(
        session=session.name,
        turns=session.turns,
        agents=len(chains),
        blocks=sum(len(chain.keys) // KEY_BYTES for chain in chains),
        nbytes=sum(
            len(chain.keys) // KEY_BYTES * sum(each.nbytes for each in chain.namespace.parts)
            for chain in chains
        ),
        idle_s=now - session.last_at,
    )


async def describe_chains(
    session: Session, node: Node, tiers: SsdTier
) -> list[answers.SessionChain]:
    """Describe the prompts of a session. A few blocks at a time, and others are served in between."""
    found = []
    for (namespace, agent), chain in list(session.chains.items()):
        keys = split_keys(chain.keys)
        wanted = dict.fromkeys(keys, 0)
        for table in namespace.tables:
            for key in needed(table.spec, keys):
                wanted[key] |= 1 << table.part
        memory = disks = 0
        for at in range(0, len(keys), CHAIN_TOGETHER):
            some = keys[at : at + CHAIN_TOGETHER]
            nothing = [0] * len(some)
            _, here = node.inventory.masks(namespace.directory_digest, some)
            _, below = tiers.masks(namespace.directory_digest, some)
            for key, up, down in zip(some, here or nothing, below or nothing, strict=True):
                if not wanted[key] & ~up:
                    memory += 1
                elif not wanted[key] & ~(up | down):
                    disks += 1
            await asyncio.sleep(0)
        missing = len(keys) - memory - disks
        found.append(
            answers.SessionChain(namespace.base.hex(), agent, len(keys), memory, disks, missing)
        )
    return found
