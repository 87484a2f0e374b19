"""Which prefixes are told to be read most."""

from kvpool.daemon.features.hot_prefixes import HALF_S, KEPT_MAX, SHOWN_MAX, HotPrefixes
from tests.support.memory import longest


def shown(heat):
    return [(int(each.key, 16), each.blocks, each.reads) for each in heat.hottest()]


def test_what_prompts_share_is_told_once_and_what_they_do_not_each_by_itself(make_pool):
    pool, heat = make_pool(), HotPrefixes()
    system = list(range(1, 9))
    for prompt in range(10):
        heat.read(
            pool.namespace, pool.keys([*system, *range(100 * prompt + 100, 100 * prompt + 108)]), 16
        )
    # All ten read the first 8 blocks, of which 1, 2 and 4 were counted too: only the longest is shown.
    (first, *rest) = shown(heat)
    assert first == (8, 8, 10.0)
    assert sorted(rest) == [(100 * prompt + 107, 16, 1.0) for prompt in range(10)]
    assert heat.hottest()[0].tenant == "red"
    assert heat.hottest()[0].namespace == pool.namespace.base.hex()


def test_only_what_was_leased_counts(make_pool):
    pool, heat = make_pool(), HotPrefixes()
    heat.read(pool.namespace, pool.keys(range(1, 17)), 3)
    assert shown(heat) == [(2, 2, 1.0)]
    heat.read(pool.namespace, pool.keys(range(1, 17)), 0)
    assert shown(heat) == [(2, 2, 1.0)]


def test_what_is_not_read_any_more_fades(make_pool):
    pool, heat = make_pool(), HotPrefixes()
    for _ in range(8):
        heat.read(pool.namespace, pool.keys([1]), 1)
    heat.fade(HALF_S)
    for _ in range(5):
        heat.read(pool.namespace, pool.keys([2]), 1)
    assert shown(heat) == [(2, 1, 5.0), (1, 1, 4.0)]


def test_what_is_remembered_has_a_limit_and_what_is_hot_stays(make_pool):
    pool, heat = make_pool(), HotPrefixes()
    for number in range(10 * KEPT_MAX):
        heat.read(pool.namespace, pool.keys([number + 1000]), 1)
        if number % 100 == 0:
            heat.read(pool.namespace, pool.keys([7]), 1)
    assert longest(heat) <= 2 * KEPT_MAX
    assert shown(heat)[0][:2] == (7, 1)
    assert shown(heat)[0][2] >= 10 * KEPT_MAX // 100
    assert len(shown(heat)) == SHOWN_MAX


def test_an_ended_epoch_is_forgotten(make_pool):
    pool, heat = make_pool(), HotPrefixes()
    heat.read(pool.namespace, pool.keys([1]), 1)
    pool.reset()
    heat.fade(1.0)
    assert shown(heat) == []
