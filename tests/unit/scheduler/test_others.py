"""Memory that requests from elsewhere use counts, and keeps nobody waiting for ever."""

from __future__ import annotations

import pytest

from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.values import Engine, Role


def engine(others: int) -> Engine:
    made = Engine("e", "n", Role.BOTH, "k", "gpu:e", (), 1000)
    made.others_tokens = others
    return made


@pytest.mark.parametrize(
    ("held", "others", "needed", "room", "may_wait"),
    [
        (0, 0, 1000, True, True),
        (0, 0, 1001, False, False),
        (100, 0, 900, True, True),
        (100, 500, 400, True, True),
        (100, 500, 401, False, False),
        (0, 1000, 1000, False, True),  # the only one from here
        (0, 1000, 1001, False, False),
        (1, 1000, 1, False, False),
    ],
)
def test_room_for_one_more(held: int, others: int, needed: int, room: bool, may_wait: bool) -> None:
    assert engine(others).has_room(needed, held, 1000) == room
    assert engine(others).has_room(needed, held, 1000, waits=True) == may_wait


def test_promises_count_them_too() -> None:
    rule = DecodeRule(ahead=0.25)
    made = engine(600)
    assert rule.promises(made, 1000)
    made.context_tokens = 400
    assert rule.promises(made, 250)
    assert not rule.promises(made, 251)
