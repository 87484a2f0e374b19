"""How much of a prefix each node could give, beside the hit rule asked node by node."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.hit_rule import usable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.prefix_lookup import reach
from kvpool.types import PartKind, PartSpec

SPECS = [
    (PartSpec(8),),
    (PartSpec(8), PartSpec(8)),
    (PartSpec(8), PartSpec(4, PartKind.WINDOW, window_blocks=2)),
    (PartSpec(8), PartSpec(8, stride=3)),
]
NODES = [bytes([n]) * 8 for n in range(3)]
entries = st.builds(
    Entry,
    st.sampled_from(NODES),
    st.sampled_from(sorted(TIERS.values())),
    st.integers(1, 3),
)
# Runs of keys of which the same is known, as there are in a directory.
runs = st.lists(st.tuples(st.integers(1, 6), st.lists(entries, max_size=5)), max_size=6)


@given(st.sampled_from(SPECS), runs, st.integers(0, 5))
def test_each_node_is_asked_by_itself(specs, runs, more):
    known = [found for count, found in runs for _ in range(count)]
    keys = [n.to_bytes(16, "big") for n in range(len(known) + more)]
    expected = {}
    for node in NODES:
        lengths = []
        for tiers in ({"dram", "device"}, {"dram", "device", "ssd"}):
            wanted = {TIERS[tier] for tier in tiers}
            held = [
                {
                    key
                    for key, found in zip(keys, known, strict=False)
                    for entry in found
                    if entry.incarnation == node and entry.tier in wanted and entry.mask >> part & 1
                }
                for part in range(len(specs))
            ]
            lengths.append(usable(specs, held, keys))
        if lengths[1]:
            expected[node] = tuple(lengths)
    assert reach(specs, keys, known) == expected
