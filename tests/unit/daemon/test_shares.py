"""How a limit is divided among tenants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.shares import Shares
from kvpool.errors import LimitExceeded


def test_a_tenant_that_is_alone_has_it_all() -> None:
    shares = Shares(["a"])
    assert shares.room({"a": 9}, "a", 10)
    assert not shares.room({"a": 10}, "a", 10)


def test_none_can_take_what_is_kept_for_others() -> None:
    shares = Shares(["a", "b"])
    used = {"a": 0, "b": 0}
    while shares.room(used, "a", 1000):
        used["a"] += 1
    assert used["a"] == 750
    while shares.room(used, "b", 1000):
        used["b"] += 1
    assert used["b"] == 250
    with pytest.raises(
        LimitExceeded, match=r"1000 clients on this node, the limit \(clients_max\)"
    ):
        shares.check(used, "b", 1000, "clients", "clients_max")
    with pytest.raises(LimitExceeded, match="tenant a has 750 of the 1000 clients"):
        shares.check({"a": 750}, "a", 1000, "clients", "clients_max")


@given(
    tenants=st.integers(1, 6),
    limit=st.integers(1, 60),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=80),
)
def test_the_limit_holds_and_everybody_gets_his_part(
    tenants: int, limit: int, steps: list[tuple[int, int, bool]]
) -> None:
    names = [f"t{number}" for number in range(tenants)]
    shares = Shares(names)
    own = limit // (2 * tenants) if tenants > 1 else limit
    used = dict.fromkeys(names, 0)
    for which, more, gives in steps:
        name = names[which % tenants]
        if gives:
            used[name] = max(0, used[name] - more)
        elif shares.room(used, name, limit, more):
            used[name] += more
        else:
            assert used[name] + more > own, "its own part is always there"
        assert sum(used.values()) <= limit
