"""What a peer answers is told from what keeps it from answering."""

from __future__ import annotations

import pytest

from kvpool.errors import Declined, LimitExceeded, StaleEpoch, Unavailable, from_code
from kvpool.transfer.base import REFUSALS, Outcome
from kvpool.transfer.requester import Refused
from kvpool.wire import frame


def test_an_answer_that_a_peer_cannot_is_another_error_than_none() -> None:
    answered = Refused(frame.error_message(Unavailable("not a member"))).error
    assert isinstance(answered, Declined)
    assert str(answered) == "not a member"
    told = frame.error_message(answered)  # from the transfer worker to the control process
    assert isinstance(from_code(told.code, told.message), Declined)
    assert type(Refused(frame.error_message(LimitExceeded("full"))).error) is LimitExceeded


@pytest.mark.parametrize(
    ("error", "refused", "over_nixl"),
    [
        (Declined("not a member"), True, False),
        (LimitExceeded("lends 5 bytes already"), True, True),
        (StaleEpoch("reset"), True, True),
        (Unavailable("no route"), False, False),
        (None, False, False),
    ],
)
def test_which_errors_say_nothing_against_the_way(error, refused, over_nixl) -> None:
    pulled = Outcome(1).finish(error)
    assert (pulled.refused, pulled.error) == (refused, str(error or ""))
    assert Outcome(1).finish(error, REFUSALS).refused is over_nixl
