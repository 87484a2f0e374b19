"""Whose connection goes when there is room for no more."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.errors import Declined
from kvpool.transfer.admission import PeerSlots


def filled(limit: int, nodes: str) -> PeerSlots[str]:
    """Connections `a0`, `b1`, ..., in this order, all idle."""
    places: PeerSlots[str] = PeerSlots(limit)
    for number, node in enumerate(nodes):
        assert places.admit(f"{node}{number}", node) is None
        places.busy(f"{node}{number}")
        places.idle(f"{node}{number}")
    return places


def test_the_longest_idle_one_goes() -> None:
    places = filled(3, "abc")
    places.busy("a0")
    places.idle("a0")
    assert places.admit("d3", "d") == "b1"


def test_one_with_a_request_stays() -> None:
    places = filled(3, "abc")
    places.busy("a0")
    assert places.admit("d3", "d") == "b1"
    places.idle("b1")  # it has lost its place, and does not come back
    places.busy("c2")
    places.busy("d3")
    with pytest.raises(Declined, match=r"3 connections .* 0 are e's"):
        places.admit("e4", "e")


def test_the_peer_with_most_gives_first() -> None:
    assert filled(4, "abbb").admit("c4", "c") == "b1"


def test_a_peer_with_many_takes_nobodys_only_one() -> None:
    places = filled(4, "abbb")
    for connection in ("b1", "b2"):
        places.busy(connection)
    assert places.admit("b4", "b") == "b3", "its own"
    places.busy("b4")
    with pytest.raises(Declined):
        places.admit("b5", "b")
    assert places.admit("c6", "c") == "a0", "but who has none gets one"


def test_what_was_opened_for_the_same_work_is_not_taken_from_it() -> None:
    places = filled(3, "a")
    places.busy("a0")
    places.admit("b1", "b")
    places.admit("b2", "b")
    with pytest.raises(Declined):
        places.admit("b3", "b")
    assert places.admit("c3", "c") == "b1", "but who has none gets one"


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["come", "busy", "idle", "leave"]), st.integers(0, 40))),
)
def test_places_are_never_more_nor_shared_out_unfairly(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    places: PeerSlots[str] = PeerSlots(limit)
    idle: dict[str, bool] = {}
    asked: set[str] = set()
    for number, (what, which) in enumerate(steps):
        if what == "come":
            node = "abcd"[which % 4]
            before = Counter(each[0] for each in idle)
            try:
                gone = places.admit(f"{node}{number}", node)
            except Declined:
                assert len(idle) == limit
                assert not any(
                    free and (each in asked if each[0] == node else before[each[0]] > before[node])
                    for each, free in idle.items()
                )
                continue
            idle[f"{node}{number}"] = True
            assert (gone is not None) == (len(idle) > limit)
            if gone is not None:
                assert idle.pop(gone), "it had no request"
                assert gone in asked if gone[0] == node else before[gone[0]] > before[node]
        elif idle:
            connection = list(idle)[which % len(idle)]
            if what == "leave":
                places.leave(connection)
                del idle[connection]
            else:
                getattr(places, what)(connection)
                idle[connection] = what == "idle"
                asked.add(connection)
    assert len(idle) <= limit
