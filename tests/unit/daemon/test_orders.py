"""What one source should deliver becomes transfers: few, and none too large."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.fetch.plan import ORDER_BYTES, TOGETHER_BYTES, orders
from kvpool.wire.frame import KEYS_MAX

WANTED = st.lists(
    st.tuples(st.sampled_from([64, 4096, 1 << 20, 100 << 20]), st.integers(1, 100), st.booleans()),
    max_size=6,
)


def tables(drawn: list[tuple[int, int, bool]]) -> list[tuple[Any, list[bytes]]]:
    """Some of one namespace and some of another."""
    return [
        (
            Table(nbytes, "one" if first else "other"),
            [bytes([number, at]) for at in range(count)],
        )
        for number, (nbytes, count, first) in enumerate(drawn)
    ]


class Table:
    """As far as a plan looks at one."""

    def __init__(self, nbytes: int, namespace: str) -> None:
        self.spec = SimpleNamespace(nbytes=nbytes)
        self.namespace = namespace


def size(order: dict[Any, Any]) -> int:
    return sum(table.spec.nbytes * len(keys) for table, keys in order.items())


@given(WANTED, st.booleans())
def test_all_blocks_are_ordered_once_and_within_the_limits(
    drawn: list[tuple[int, int, bool]], apart: bool
) -> None:
    wanted = tables(drawn)
    made = list(orders(wanted, apart=apart))
    for table, keys in wanted:
        ordered = [key for order in made for key in order.get(table, ())]
        assert ordered == keys
    for order in made:
        assert len({table.namespace for table in order}) == 1
        assert sum(map(len, order.values())) <= KEYS_MAX
        if len(order) > 1:
            assert not apart
            assert size(order) <= TOGETHER_BYTES
        else:
            assert size(order) <= ORDER_BYTES or sum(map(len, order.values())) == 1


def test_the_parts_of_a_prompt_go_together() -> None:
    wanted = tables([(64 << 10, 4, True)] * 8)
    assert [len(order) for order in orders(wanted, apart=False)] == [8]
    assert [len(order) for order in orders(wanted, apart=True)] == [1] * 8


def test_as_many_parts_go_together_as_fit() -> None:
    wanted = tables([(1 << 20, 6, True)] * 5)
    assert [len(order) for order in orders(wanted, apart=False)] == [2, 2, 1]


def test_more_keys_than_one_order_may_have() -> None:
    many = [(Table(1, "one"), [at.to_bytes(4) for at in range(KEYS_MAX - 1)]) for _ in range(3)]
    assert [len(order) for order in orders(many, apart=False)] == [1, 1, 1]
