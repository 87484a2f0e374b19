"""What the index says of the pool, beside a list of what was told last of each key."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.router.engines.pool_view import PoolView
from kvpool.router.upstream.specs import pool_holders
from kvpool.scheduler.index import PrefixIndex, Reach

NODES = ["a", "b", "c"]
CHAINS = [[*range(n * 10, n * 10 + 10)] for n in range(3)]
# Prompts that share a beginning with others.
PROMPTS = [*CHAINS, CHAINS[0][:4] + CHAINS[1], CHAINS[0][:4], []]
lengths = st.dictionaries(
    st.sampled_from(NODES), st.tuples(st.integers(0, 14), st.integers(0, 14)).map(sorted).map(tuple)
)
kept = st.sets(st.sampled_from(NODES))


NAMESPACE = (b"n" * 16).hex()


def make(keys_max=1000):
    index, nodes = PrefixIndex(), {}
    return (
        index,
        nodes,
        PoolView(index, b"n" * 16, nodes, {}, keys_max),
    )


def held(index, key):
    """Who holds this key, by the index."""
    return {name for name, length in index.match([key], now=0.0).lengths.items() if length}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PROMPTS), lengths) | kept, max_size=12))
def test_the_index_says_what_was_told_last(steps):
    index, nodes, view = make()
    model, wanted = {}, set()
    for step in steps:
        if isinstance(step, set):
            view.keep(step)
            wanted = step
        else:
            prompt, told = step
            view.told(prompt, told)
            for at, key in enumerate(prompt):
                model[key] = {
                    holder
                    for node, each in told.items()
                    for holder, length in zip(pool_holders(node, b"n" * 16), each, strict=True)
                    if length > at
                }
        for key in range(30):
            assert held(index, key) == model.get(key, set())
        having = {holder for holders in model.values() for holder in holders}
        having |= {holder for node in wanted for holder in pool_holders(node, b"n" * 16)}
        assert set(nodes) == having
        assert all(
            nodes[holder] == node for node in NODES for holder in nodes if f":{node}/" in holder
        )
    assert len(index) == len([1 for holders in model.values() if holders])


def test_a_namespace_that_nobody_uses_any_more():
    index, nodes, view = make()
    view.keep({"a"})
    view.told(CHAINS[0], {"a": (3, 5), "b": (1, 1)})
    view.close()
    assert (len(view), nodes) == (0, {})
    assert index.match(CHAINS[0], now=1.0).lengths == {}


def test_what_was_not_asked_about_for_long_is_forgotten():
    index, _, view = make(keys_max=15)
    view.told(CHAINS[0], {"a": (10, 10)})
    view.told(CHAINS[1][:5], {"b": (5, 5)})
    view.told(CHAINS[0][:3], {"a": (10, 10)})
    view.told(CHAINS[2][:5], {"b": (0, 5)})
    assert len(view) == 15
    assert [held(index, key) != set() for key in CHAINS[0]] == [True] * 3 + [False] * 5 + [True] * 2
    assert all(held(index, key) for key in CHAINS[1][:5])


def test_what_is_asked_about_again_and_again_stays():
    index, _, view = make(keys_max=40)
    for n in range(100):
        for keys in (CHAINS[0], [*range(100 + 8 * n, 108 + 8 * n)]):
            view.told(keys, {"a": (10, 10)})
            assert all(held(index, key) for key in CHAINS[0])
    assert len(view) == len(index) == 40


def test_the_pool_reaches_as_far_as_its_nodes_do_together():
    index, _, view = make()
    view.told(CHAINS[0], {"a": (4, 6), "b": (0, 9)})
    match = index.match(CHAINS[0], now=1.0)
    assert match.namespaces == {NAMESPACE: Reach(9, 9, -math.inf)}
    assert sorted(match.lengths.values()) == [4, 6, 9]
