"""Engines that get only a share of what they could."""

import pytest

from kvpool.scheduler.fleet import Fleet
from kvpool.scheduler.values import Engine, Request, Role


def fleet(*names: str, role: Role = Role.PREFILL | Role.DECODE) -> Fleet:
    return Fleet(Engine(name, name, role, "kind", f"gpu:{name}", (), 1000) for name in names)


def requests(count: int) -> list[Request]:
    return [Request(f"request {number}", (), 10, 1, 0.0) for number in range(count)]


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_is_as_said_and_the_same_at_every_look(weight):
    some = fleet("a", "b", "c")
    some.weigh("b", weight)
    with_b = 0
    for request in requests(2000):
        names = [engine.name for engine in some.computing(request)]
        assert names == [engine.name for engine in some.decoding(request)]
        assert names == [engine.name for engine in some.computing(request)]
        assert {"a", "c"} <= set(names)
        with_b += "b" in names
    assert abs(with_b / 2000 - weight) < 0.04
    some.weigh("b", 1.0)
    assert all(len(some.computing(request)) == 3 for request in requests(10))


def test_where_there_is_no_other_it_gets_all():
    some = fleet("a")
    some.weigh("a", 0.0)
    assert all(len(some.computing(request)) == 1 for request in requests(10))


def test_one_that_comes_again_has_no_weight():
    some = fleet("a", "b")
    some.weigh("a", 0.0)
    some.join(some.leave("a"))
    assert all(len(some.computing(request)) == 2 for request in requests(10))
    with pytest.raises(KeyError):
        some.weigh("z", 0.5)
