"""A node stops, with all its workers, while many prompts are read that another one has too."""

import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.types import NamespaceRecord, PartSpec
from tests.support.waiting import until

PROMPTS, PARTS, BLOCKS = 64, 8, 2
MANY_PARTS = NamespaceRecord({"model": "many parts"}, (PartSpec(4096),) * PARTS)
WAIT_S = 20.0
"""Less than until the stopped node is no member any more, so that it is one throughout."""


@pytest.mark.slow
def test_many_prompts_are_answered_whole_while_a_peer_is_stopped(start_cluster, numbers):
    cluster = start_cluster(memory="64MiB", environ={"KVPOOL_MEMBER_TTL_S": "120"})
    a, b = cluster.seat("a", MANY_PARTS), cluster.seat("b", MANY_PARTS)
    c = cluster.seat("c", MANY_PARTS, connections_max=PROMPTS)
    cluster.until_all_see([a, b, c])
    every = numbers(3 * PROMPTS * BLOCKS)
    prompts_of = [every[at : at + BLOCKS] for at in range(0, len(every), BLOCKS)]
    rounds = [prompts_of[at : at + PROMPTS] for at in range(0, len(prompts_of), PROMPTS)]
    for seat in (a, b):
        for prompts in rounds:
            seat.put([number for prompt in prompts for number in prompt])
    until(lambda: a.announced and b.announced)
    with ThreadPoolExecutor(PROMPTS) as threads:

        def read(prompts: Sequence[range]) -> list[int]:
            """The blocks that each prompt got; what they hold is compared."""
            return list(threads.map(lambda prompt: c.read(prompt, WAIT_S), prompts))

        assert read(rounds[0]) == [BLOCKS] * PROMPTS
        a.node.signal(signal.SIGSTOP)
        try:
            for prompts in rounds[1:]:
                assert read(prompts) == [BLOCKS] * PROMPTS
        finally:
            a.node.signal(signal.SIGCONT)
        asked = {peer.node: peer for peer in c.stats.fetch.peers}
        assert asked["b"].failed == 0
        # What nobody waits for any more has been given up, and holds nothing.
        until(lambda: c.stats.fetch.transfers == 0)
