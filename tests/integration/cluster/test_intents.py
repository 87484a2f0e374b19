"""Two nodes: what is brought ahead from another one, and what is not worth another one's memory."""

import pytest

from kvpool.types import Intent, Outcome
from kvpool.wire.operator import ShowSession
from tests.integration.cluster.conftest import HYBRID, NBYTES, PLAIN, keys_of

MEMORY = 16 << 20
BLOCKS = MEMORY // NBYTES


@pytest.mark.parametrize("record", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_sessions_blocks_come_from_another_node_before_it_returns(
    start_cluster, numbers, until, record
):
    a, b = start_cluster(nodes=2).seats(record)
    some = numbers(32)
    a.put(some)
    until(lambda: a.announced)
    b.client.session_turn(b.ns, "moved", keys_of(some), pause_s=2.0)
    until(lambda: b.match(some) == 32)
    assert b.read(some, wait_s=0.0) == 32, "and they are right"
    counted = b.stats.counters.prefetched
    assert counted >= 32
    b.client.session_turn(b.ns, "moved", keys_of(some))
    until(lambda: b.stats.counters.prefetches_used > 0)
    assert b.stats.counters.prefetches_used + b.stats.counters.prefetches_wasted == counted


def test_an_intent_tells_what_another_node_has(start_cluster, numbers, until):
    a, b = start_cluster(nodes=2).seats()
    some = numbers(8)
    a.put(some[:5])
    until(lambda: a.announced)
    until(lambda: b.holders(some[4]) == {"a"})
    answer = b.client.intend(b.ns, Intent.PREFETCH, keys_of(some))
    assert (answer.outcome, answer.blocks, answer.missing) == (Outcome.ACCEPTED, 5, 3)
    until(lambda: b.here(some) == 5)
    assert b.client.intend(b.ns, Intent.PIN, keys_of(some[5:])).outcome is Outcome.MISSING
    a.node.kill()
    answer = b.client.intend(b.ns, Intent.PREFETCH, keys_of(some))
    assert (answer.outcome, answer.blocks) == (Outcome.ACCEPTED, 5), "they are here by now"


def test_what_a_session_has_left_is_not_forwarded(start_cluster, numbers, until):
    """A full node has others keep its coldest blocks, but not those that nobody is to continue."""
    world = start_cluster(nodes=2, memory="16MiB")
    a, b = world.seats()
    left = numbers(BLOCKS // 2)
    for at in range(0, len(left), 8):
        a.put(left[at : at + 8])
    a.client.session_turn(a.ns, "over", keys_of(left))
    until(lambda: a.client.ask_node(ShowSession("over")))
    a.client.session_turn(a.ns, "over", [], ended=True)
    until(lambda: a.stats.counters.expended == len(left))
    others = numbers(BLOCKS - 32)
    for at in range(0, len(others), 8):
        a.put(others[at : at + 8])
    gone = a.stats.counters.evicted_expendable
    assert gone >= BLOCKS // 2 - 48, "they were the first to go"
    until(lambda: a.announced)
    assert b.here(left) == 0
    assert a.here(others) + b.here(others) >= len(others), "and cost no other a place"
