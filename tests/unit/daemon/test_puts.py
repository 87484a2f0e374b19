"""Blocks of several prompts in one reservation, against the depths that their parents give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec

PAGE = 4096


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_each_block_is_as_deep_as_its_own_chain_says(
    lengths: list[int], data: st.DataObject
) -> None:
    """Some blocks are there before; the others are reserved together, each after the one before it."""
    node = Node(make_policy=policy_maker("lru"), limits=Limits(reserved_share_per_holder=1.0))
    tenant = node.add_tenant("red", 0, 64 * PAGE)
    holder = node.holders.add("red", "")
    namespace = node.namespaces.open(tenant, bytes(16), b"{}", (PartSpec(PAGE),))
    keys, parents, depths = [], [], []
    for number, length in enumerate(lengths):
        chain = [key(100 * (number + 1) + at) for at in range(length)]
        keys += chain
        parents += [b"", *chain[:-1]]
        depths += range(length)
    present = data.draw(st.sets(st.sampled_from(range(len(keys)))))
    before = sorted(present)
    for ticket, some in enumerate((before, range(len(keys))), start=1):
        wanted = [keys[at] for at in some]
        if not wanted:
            continue
        after = [parents[at] for at in some]
        node.puts.reserve(holder, namespace, 0, ticket, wanted, parents=after)
        if (reserved := holder.reservations.get(ticket)) is not None:
            node.puts.commit(holder, ticket, bytes(16 * len(reserved.rows)))
        node.settle()
    blocks = namespace.tables[0].blocks
    for at, name in enumerate(keys):
        if not present:
            assert blocks[name].depth == depths[at]
        # A block that came without those before it counts as the first; what comes after it goes on from there.
        missing_first = at in present and depths[at] and at - 1 not in present
        expected = 0 if missing_first else depths[at] and blocks[keys[at - 1]].depth + 1
        assert blocks[name].depth == expected
