"""What is refused, with which code, and when it may come again."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.values import Rejection, Role

Make = Callable[..., Any]
P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
PLAIN = Settings(queue=FIFO, segment_s=0.0)


def refused(rules: Any, tokens: int = 100, now: float = 0.0, **more: Any) -> Rejection:
    """Of a request that is not taken; the same is said by asking, and nothing is kept of it."""
    waiting = rules.scheduler.waiting
    request = rules.request(tokens, now, **more)
    found = rules.scheduler.submit(request, now)
    assert isinstance(found, Rejection)
    assert rules.scheduler.explain(request, now) == found
    assert rules.scheduler.waiting == waiting
    return found


@pytest.mark.parametrize("engines", [{}, {"p": P}, {"d": D}])
def test_without_engines(make: Make, engines: dict[str, Role]) -> None:
    found = refused(make(engines))
    assert (found.code, found.retry_after_s) == ("no_engine", 5.0)


def test_without_engines_of_its_kind_or_in_service(make: Make) -> None:
    rules = make({"p": P, "d": D})
    assert refused(rules, kinds=frozenset("l")).code == "no_engine"
    rules.scheduler.drain("d", 0.0)
    assert refused(rules).code == "no_engine"
    rules.scheduler.join(rules.engine("b", BOTH, kind="l"), 0.0)
    rules.submit(kinds=frozenset("l"))
    assert refused(rules, kinds=frozenset("k")).code == "no_engine"


def test_what_is_too_long_need_not_come_again(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D})
    rules.engines["e"].capacity_tokens = 500
    rules.submit(990)
    found = refused(rules, 991)
    assert (found.code, found.retry_after_s) == ("too_long", math.inf)
    rules.scheduler.leave("d", 0.0)
    assert refused(rules, 500).code == "too_long"


def test_a_full_queue(make: Make) -> None:
    rules = make({"p": P, "q": P, "d": D}, replace(PLAIN, queue_max=3))
    for _ in range(3):
        rules.submit(200)
    found = refused(rules)
    assert found.code == "queue_full"
    assert found.retry_after_s == pytest.approx(3 * 2.0 / 2)  # what waits, over two engines


def test_one_tenant_cannot_fill_the_queue_for_others(make: Make) -> None:
    rules = make({"p": P, "d": D}, replace(PLAIN, queue_max=6))
    for _ in range(6):
        rules.submit(tenant="a")
    assert refused(rules, tenant="a").code == "queue_full"
    for _ in range(3):
        rules.submit(tenant="b")
    assert refused(rules, tenant="b").code == "tenant_share"
    assert refused(rules, tenant="a").code == "tenant_share"
    for _ in range(2):
        rules.submit(tenant="c")
    rules.submit(tenant="d")
    assert refused(rules, tenant="e").code == "queue_full"  # twice as long as it may be


def test_a_deadline_that_cannot_be_met(make: Make) -> None:
    rules = make({"p": P, "d": D})
    rules.submit(300)
    assert refused(rules, 100, deadline_s=3.9).code == "deadline"
    assert refused(rules, 100, deadline_s=3.9).retry_after_s == pytest.approx(0.1)
    rules.submit(100, deadline_s=4.1)


def test_objectives(make: Make) -> None:
    rules = make({"p": P, "d": D}, replace(PLAIN, ttft_slo_s=3.0, tpot_slo_s=0.0125))
    rules.submit(200)
    late = refused(rules, 200)
    assert (late.code, late.retry_after_s) == ("ttft", pytest.approx(1.0))
    rules.engines["d"].decodes = 2
    slow = refused(rules)
    assert (slow.code, slow.retry_after_s) == ("tpot", pytest.approx(10 * 0.013))
    rules.engines["d"].context_tokens = 900
    assert refused(rules).code == "decode_full"
