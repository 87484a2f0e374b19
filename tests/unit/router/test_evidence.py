"""What a failed call speaks against: an engine, or its request."""

import pytest

from kvpool.router.upstream.evidence import Evidence, another_may_differ, for_client
from kvpool.router.upstream.upstream import (
    CUT,
    GARBAGE,
    GONE,
    TOO_LARGE,
    UNREACHABLE,
    WRONG_RANK,
    EngineFailed,
)


def failure(engine: str, reason: str) -> EngineFailed:
    return EngineFailed(engine, reason, "")


@pytest.mark.parametrize("reason", [UNREACHABLE, WRONG_RANK])
@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_read_nothing_of_the_request_is_to_blame(reason: str, begun: bool) -> None:
    assert Evidence().failed(failure("a", reason), begun=begun) == {"a"}


@pytest.mark.parametrize("reason", [GARBAGE, TOO_LARGE, GONE])
@pytest.mark.parametrize("begun", [False, True])
def test_what_an_engine_has_answered_blames_nobody(reason: str, begun: bool) -> None:
    evidence = Evidence()
    assert not evidence.failed(failure("a", reason), begun=begun)
    assert not evidence.answered("b")


def test_a_lost_connection_is_the_engines_fault_once_another_one_answers() -> None:
    evidence = Evidence()
    for name in "abb":
        assert not evidence.failed(failure(name, CUT), begun=False)
    assert evidence.answered("c") == {"a", "b"}
    assert not evidence.answered("c"), "each is blamed once"


def test_who_answers_at_its_second_try_is_not_to_blame() -> None:
    evidence = Evidence()
    evidence.failed(failure("a", CUT), begun=False)
    assert not evidence.answered("a")


def test_an_answer_that_the_client_has_in_part_can_be_asked_of_nobody_else() -> None:
    assert Evidence().failed(failure("a", CUT), begun=True) == {"a"}


@pytest.mark.parametrize(
    ("status", "differs", "passed_on"),
    [
        *((status, False, True) for status in (400, 404, 409, 413, 422, 499)),
        *((status, True, True) for status in (408, 425, 429, 500, 501, 502, 503, 504, 599)),
        *((status, True, False) for status in (401, 403, 407, 200, 204, 301, 307)),
    ],
)
def test_which_answers_are_asked_for_again_and_which_are_the_clients(
    status: int, differs: bool, passed_on: bool
) -> None:
    assert another_may_differ(status) is differs
    assert for_client(status) is passed_on
