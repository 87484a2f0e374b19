"""The scheduler: when orders are given, what waits, what is refused."""

import math
from dataclasses import replace
from random import Random

import pytest

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.queue import FIFO, QueueRule
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.values import Engine, Order, Request, Role

BLOCK, STEP = 16, 64
TOKEN_S = 0.01
SJF = QueueRule(knee_s=1000.0, aging=1e-6, begun=1.0)
WHOLE = Settings(queue=SJF, segment_s=0.0)


def cluster(
    prefill: int = 2,
    decode: int = 0,
    *,
    policy: str = "kvpool",
    settings: Settings = WHOLE,
    capacity: int = 1000,
    load_bytes_s: float = 1e12,
    tiers: bool = True,
) -> tuple[Scheduler, list[Engine], PrefixIndex]:
    index = PrefixIndex()
    engines = []
    for number in range(prefill + decode):
        role = Role.PREFILL if number < prefill else Role.DECODE
        name = f"{number}"
        own = (f"dram:{name}",) if tiers else ()
        engines.append(Engine(name, name, role, "k", f"gpu:{name}", own, capacity))
        index.join(f"gpu:{name}", pool=False)
        index.join(f"dram:{name}", pool=True)
    loads = {"dram": LoadEstimate(0.0, load_bytes_s), "peer": LoadEstimate(0.0, 1e12)}
    prefill_step, decode_step = StepEstimate((0.0, TOKEN_S, 0.0)), StepEstimate((0.01, 0.001, 0.0))
    kinds = {"k": KindEstimates(prefill_step, decode_step, loads, STEP, BLOCK, 1000)}
    nodes = {f"dram:{e.name}": e.node for e in engines}
    view = Cluster(kinds, nodes, Traffic())
    settings = replace(settings, decodes=decode > 0)
    scheduler = Scheduler(engines, view, index, make_policy(policy), Random(0), settings)
    return scheduler, engines, index


def prompt(ident: int, tokens: int, arrived_s: float = 0.0, output_tokens: int = 10) -> Request:
    keys = [(ident, number) for number in range(-(-tokens // BLOCK))]
    return Request(ident, keys, tokens, output_tokens, arrived_s)


def idents(orders: list[Order]) -> list[object]:
    return [order.request.ident for order in orders]


def test_a_policy_of_others_sends_at_once() -> None:
    scheduler, engines, _ = cluster(1, policy="least-loaded")
    for ident in range(5):
        scheduler.submit(prompt(ident, 100), 0.0)
    assert idents(scheduler.poll(0.0)) == [0, 1, 2, 3, 4]
    assert engines[0].queued_tokens == 500
    assert engines[0].free_at == pytest.approx(5.0)
    assert scheduler.wake_at() == math.inf


def test_ours_keeps_requests_until_an_engine_has_room_and_the_shortest_goes_first() -> None:
    scheduler, engines, _ = cluster(1)
    for ident, tokens in enumerate((200, 300, 100)):
        scheduler.submit(prompt(ident, tokens), 0.0)
    assert idents(scheduler.poll(0.0)) == [2]
    assert scheduler.poll(0.5) == []
    assert scheduler.wake_at() == pytest.approx(1.0 - WHOLE.ahead_s)
    assert idents(scheduler.poll(0.996)) == [0]
    scheduler.computed(engines[0], 2, 1.0)
    assert engines[0].free_at == pytest.approx(3.0)
    assert scheduler.waiting == 1


def test_in_order_of_arrival_if_the_rule_says_so() -> None:
    scheduler, _, _ = cluster(1, settings=Settings(queue=FIFO, segment_s=0.0))
    for ident, tokens in enumerate((300, 200, 100)):
        scheduler.submit(prompt(ident, tokens, ident / 10), ident / 10)
    assert idents(scheduler.poll(0.5)) == [0]


def test_a_long_prompt_goes_in_segments_between_which_short_ones_come() -> None:
    scheduler, engines, index = cluster(
        1, settings=Settings(queue=SJF, segment_s=2 * STEP * TOKEN_S)
    )
    scheduler.submit(prompt(1, 1000), 0.0)
    (first,) = scheduler.poll(0.0)
    assert (first.end, first.last) == (2 * STEP, False)
    scheduler.submit(prompt(2, 50, 0.1), 0.1)
    assert scheduler.poll(0.1) == []
    index.add("gpu:0", first.request.keys[: 2 * STEP // BLOCK])
    scheduler.computed(engines[0], 1, 1.28)
    assert idents(scheduler.poll(1.28)) == [2]
    scheduler.computed(engines[0], 2, 1.78)
    ends = []
    now = 1.78
    while orders := scheduler.poll(now):
        (order,) = orders
        assert order.estimate.cached * BLOCK == (ends[-1] if ends else 2 * STEP)
        ends.append(order.end)
        now += order.estimate.prefill_s
        index.add("gpu:0", order.request.keys[: order.end // BLOCK])
        scheduler.computed(engines[0], 1, now)
    assert ends[-1] == 1000
    assert all(end % BLOCK == 0 for end in ends[:-1])
    assert now == pytest.approx(1000 * TOKEN_S + 0.5, rel=0.01)


def test_between_segments_only_shorter_ones_come() -> None:
    settings = Settings(queue=SJF, segment_s=2 * STEP * TOKEN_S)
    scheduler, engines, _ = cluster(1, settings=settings)
    scheduler.submit(prompt(1, 400), 0.0)
    (first,) = scheduler.poll(0.0)
    scheduler.submit(prompt(2, 800, 0.1), 0.1)
    just_before_its_end = first.estimate.prefill_s - WHOLE.ahead_s / 2
    (second,) = scheduler.poll(just_before_its_end)
    assert (second.request.ident, second.estimate.cached * BLOCK) == (1, first.end)
    assert engines[0].prefills == 2
    scheduler.computed(engines[0], 1, first.estimate.prefill_s)
    assert engines[0].prefills == 1
    assert scheduler.poll(first.estimate.prefill_s) == []


def test_the_rest_of_a_prompt_is_expected_while_it_runs_and_no_longer() -> None:
    settings = Settings(queue=SJF, segment_s=2 * STEP * TOKEN_S)
    scheduler, engines, index = cluster(1, settings=settings)
    scheduler.submit(prompt(1, 800), 0.0)
    (first,) = scheduler.poll(0.0)
    keys, done = first.request.keys, first.end // BLOCK
    expected = index.match(keys, 0.0)
    assert (expected.lengths, expected.of("").coming) == ({"gpu:0": done}, len(keys))
    assert expected.of("").ready_at == pytest.approx(800 * TOKEN_S)
    scheduler.submit(prompt(2, 50, 0.1), 0.1)
    assert idents(scheduler.poll(first.estimate.prefill_s - WHOLE.ahead_s / 2)) == [2]
    scheduler.computed(engines[0], 1, first.estimate.prefill_s)
    assert index.match(keys, first.estimate.prefill_s).of("").coming == done


def test_what_is_being_computed_is_waited_for() -> None:
    scheduler, engines, index = cluster(2)
    first = prompt(1, 1600)
    scheduler.submit(first, 0.0)
    (order,) = scheduler.poll(0.0)
    again = Request(2, [*first.keys, (2, 0)], 1616, 10, 15.0)
    scheduler.submit(again, 15.0)  # a second before the first one is done
    assert scheduler.poll(15.0) == []
    index.add(f"dram:{order.estimate.engine.name}", first.keys)
    scheduler.computed(order.estimate.engine, 1, 16.0)
    (second,) = scheduler.poll(16.0)
    assert second.estimate.cached == 100
    assert engines[0].prefills + engines[1].prefills == 1


def test_without_memory_to_decode_in_a_prompt_is_not_begun() -> None:
    settings = replace(WHOLE, decode=DecodeRule(ahead=0.0))
    scheduler, engines, _ = cluster(2, 1, capacity=250, settings=settings)
    scheduler.submit(prompt(1, 100), 0.0)
    scheduler.submit(prompt(2, 150), 0.0)
    (order,) = scheduler.poll(0.0)
    assert order.decode is engines[2]
    assert engines[2].context_tokens == 110
    scheduler.computed(order.estimate.engine, 1, 1.0)
    (decode,) = scheduler.poll(1.0)
    assert (decode.request.ident, decode.engine) == (1, engines[2])
    scheduler.finished(1)
    assert idents(scheduler.poll(1.5)) == [2]


def test_what_cannot_be_in_time_is_refused_with_a_reason() -> None:
    settings = Settings(queue=FIFO, segment_s=0.0, ttft_slo_s=2.5, queue_max=3)
    scheduler, _, _ = cluster(1, settings=settings)
    assert scheduler.submit(prompt(1, 200), 0.0) is None
    refused = scheduler.submit(prompt(2, 100, 0.1), 0.1)
    assert refused is not None
    assert "too late" in refused.reason
    assert refused.retry_after_s == pytest.approx(0.5)
    assert scheduler.submit(prompt(3, 40, 0.1), 0.1) is None
    assert scheduler.submit(prompt(4, 1, 0.1), 0.1) is None
    full = scheduler.submit(prompt(5, 1, 0.1), 0.1)
    assert full is not None
    assert "full" in full.reason


def test_tokens_that_would_come_too_slowly_are_refused() -> None:
    settings = Settings(queue=FIFO, segment_s=0.0, tpot_slo_s=0.0125)
    scheduler, _, _ = cluster(1, 1, settings=settings, policy="least-loaded")
    assert scheduler.submit(prompt(1, 100), 0.0) is None
    assert scheduler.submit(prompt(2, 100), 0.0) is None
    scheduler.poll(0.0)
    refused = scheduler.submit(prompt(3, 100), 0.0)
    assert refused is not None
    assert "slowly" in refused.reason
    assert refused.retry_after_s == pytest.approx(10 * (0.01 + 3 * 0.001))


def test_what_was_computed_and_is_gone_is_not_computed_in_segments_for_ever() -> None:
    settings = Settings(queue=SJF, segment_s=2 * STEP * TOKEN_S)
    scheduler, engines, index = cluster(1, settings=settings)
    scheduler.submit(prompt(1, 1000), 0.0)
    (first,) = scheduler.poll(0.0)
    assert first.end == 2 * STEP
    for holder in ("gpu:0", "dram:0"):
        index.join(holder, pool=holder.startswith("dram"))
    scheduler.computed(engines[0], 1, 1.28)
    (second,) = scheduler.poll(1.28)
    assert (second.estimate.cached, second.end, second.last) == (0, 1000, True)


def test_what_fits_no_decode_engine_is_refused() -> None:
    scheduler, _, _ = cluster(1, 2, capacity=250)
    assert scheduler.submit(prompt(1, 240), 0.0) is None
    refused = scheduler.submit(prompt(2, 241), 0.0)
    assert refused is not None
    assert refused.retry_after_s == math.inf
    assert idents(scheduler.poll(0.0)) == [1]


def test_smaller_ones_do_not_take_the_memory_that_a_larger_one_waits_for() -> None:
    settings = Settings(queue=FIFO, segment_s=0.0, decode=DecodeRule(ahead=0.0))
    scheduler, _, _ = cluster(6, 2, capacity=250, settings=settings)
    for ident, tokens in enumerate((100, 110, 190, 100, 45)):
        scheduler.submit(prompt(ident, tokens), 0.0)
    orders = scheduler.poll(0.0)
    # 2 lacks memory on both, and keeps the one with more of it; 3 fits beside 1, and then 4 nowhere.
    assert idents(orders) == [0, 1, 3]
    kept = orders[0].decode
    assert [order.decode is kept for order in orders] == [True, False, False]
    assert kept is not None
    scheduler.computed(orders[0].estimate.engine, 0, 1.0)
    scheduler.finished(0)
    (order,) = scheduler.poll(1.0)
    assert (order.request.ident, order.decode) == (2, kept)


def test_the_next_look_is_early_enough_to_load_meanwhile() -> None:
    scheduler, _, index = cluster(1, load_bytes_s=1e5)
    scheduler.submit(prompt(1, 100), 0.0)
    scheduler.poll(0.0)
    loaded = prompt(2, 330)
    index.add("dram:0", loaded.keys[:18])  # 0.18 s to load, 0.42 s to compute the rest
    scheduler.submit(loaded, 0.0)
    now, orders = 0.0, scheduler.poll(0.0)
    for _ in range(3):
        if not orders:
            now = scheduler.wake_at()
            orders = scheduler.poll(now)
    assert idents(orders) == [2]
    assert now == pytest.approx(1.0 - 0.18 - WHOLE.ahead_s)


def test_until_the_blocks_are_there_that_one_waits_for_its_engine_computes_others() -> None:
    scheduler, engines, _ = cluster(2, settings=Settings(queue=FIFO, segment_s=0.0))
    first = prompt(1, 1600)
    scheduler.submit(first, 0.0)
    (order,) = scheduler.poll(0.0)
    busy = order.estimate.engine
    busy.free_at = 100.0
    scheduler.submit(Request(2, [*first.keys, (2, 0)], 1616, 10, 15.0), 15.0)
    for ident, tokens in ((3, 50), (4, 80), (5, 20)):
        scheduler.submit(prompt(ident, tokens, 15.0), 15.0)
    # There is 1 s until 2 can begin: not enough for 4 after 3.
    orders = [order for now in (15.0, 15.496) for order in scheduler.poll(now)]
    assert idents(orders) == [3, 5]
    assert {order.estimate.engine.name for order in orders} == {e.name for e in engines} - {
        busy.name
    }


def test_reports_about_what_is_no_more_are_passed_over() -> None:
    scheduler, engines, index = cluster(1)
    scheduler.submit(prompt(1, 100), 0.0)
    scheduler.poll(0.0)
    scheduler.abandoned(1, 0.5)
    scheduler.computed(engines[0], 1, 1.0)
    scheduler.finished(1)
    assert (engines[0].prefills, engines[0].queued_tokens) == (0, 0)
    index.leave("gpu:0")
    scheduler.submit(prompt(2, 100), 1.0)
    assert idents(scheduler.poll(1.0)) == [2]
    scheduler.computed(engines[0], 2, 2.0)


def test_an_engine_needs_no_tiers() -> None:
    scheduler, engines, _ = cluster(1, tiers=False, policy="mooncake-global")
    scheduler.submit(prompt(1, 100), 0.0)
    assert idents(scheduler.poll(0.0)) == [1]
    scheduler.computed(engines[0], 1, 1.0)
    assert engines[0].prefills == 0


def test_a_block_of_two_prompts_is_one_block() -> None:
    scheduler, engines, _ = cluster(1, policy="dynamo")
    first = prompt(1, 100)
    for ident in (1, 2):
        scheduler.submit(Request(ident, first.keys, 100, 10, 0.0), 0.0)
    scheduler.poll(0.0)
    assert engines[0].blocks == dict.fromkeys(first.keys, 2)
    scheduler.computed(engines[0], 1, 1.0)
    assert engines[0].blocks == dict.fromkeys(first.keys, 1)


def test_nothing_is_changed_by_asking() -> None:
    scheduler, engines, _ = cluster(2)
    before = [repr(engine) for engine in engines]
    assert len(scheduler.explain(prompt(1, 100), 0.0).candidates) == 1  # both are alike
    assert [repr(engine) for engine in engines] == before
    assert scheduler.poll(0.0) == []
