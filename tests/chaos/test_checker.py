"""The checker refuses what must not happen, and nothing else: made-up histories, each with one thing wrong."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos import blocks, checker, history
from tests.chaos.history import (
    Begin,
    End,
    Exited,
    FaultBegan,
    FaultEnded,
    Held,
    Measured,
    Ordered,
    Record,
    Run,
    Said,
    Serving,
    Started,
    Starved,
)

RUN = Run(at=0.0, seed=1, seconds=60.0, nodes=["a", "b", "c"])


def operation(
    name: str = "x",
    at: float = 10.0,
    took: float = 0.1,
    *,
    wait_s: float = 1.0,
    does: str = "read",
    node: str = "c",
    prompt: int = 7,
    asked: int = 2,
    found: int = 2,
    wrong: bool = False,
    error: str = "",
    expected: bool = True,
    starved_s: float = 0.0,
) -> list[Record]:
    seen = [(0, index, blocks.right(prompt, index, 0)) for index in range(found)]
    if wrong:
        seen[-1] = (0, found - 1, blocks.digest(b"something else"))
    return [
        Begin(
            at=at,
            operation=name,
            client=f"{node}-clients",
            node=node,
            does=does,
            deadline=at + wait_s,
            prompt=prompt,
            blocks=asked,
        ),
        End(
            at=at + took + 0.01,
            operation=name,
            answered=at + took,
            blocks=found,
            seen=seen if does == "read" else [],
            error=error,
            expected=expected,
            starved_s=starved_s,
        ),
    ]


def starved(who: str, *samples: tuple[float, float]) -> list[Record]:
    return [Starved(at=at, who=who, total_s=total_s) for at, total_s in samples]


def death(at: float, *, what: str = "kill", until: float = 12.0) -> list[Record]:
    return [
        FaultBegan(at=at, fault=1, what=what, target="a"),
        FaultEnded(at=until, fault=1),
        Held(at=9.0, node="b", prompt=7, blocks=2),
        Held(at=20.0, node="b", prompt=7, blocks=2),
    ]


def refused(*records: Record | list[Record]) -> list[str]:
    """The names of the rules that a history violates."""
    flat = [one for some in records for one in (some if isinstance(some, list) else [some])]
    return [violation.rule for violation in checker.check([RUN, *flat])]


def test_a_good_history_passes():
    assert not refused(
        Started(at=1.0, pid=1, who="a", role="daemon"),
        Serving(at=2.0, pid=1, who="a"),
        operation(),
        operation("y", found=0, prompt=8),
        operation("z", does="put", error="Unavailable: away"),
        death(10.05),
        Ordered(at=30.0, pid=1, who="a", signal=signal.SIGTERM),
        Exited(at=31.0, pid=1, who="a", role="daemon", status=0),
    )


# ---- bytes ---------------------------------------------------------------------------------------------------


def test_a_wrong_byte_is_refused():
    assert refused(operation(wrong=True)) == ["no_wrong_byte"]


def test_bytes_of_another_part_of_the_same_block_are_wrong():
    begin, end = operation()
    assert isinstance(end, End)
    other = [(1, index, seen) for _, index, seen in end.seen]
    assert refused(begin, msgspec.structs.replace(end, seen=other)) == ["no_wrong_byte"] * 2


def test_more_blocks_than_were_asked_for_are_wrong():
    assert refused(operation(asked=1)) == ["no_wrong_byte"]


def test_the_contents_of_a_block_follow_from_its_key_alone():
    assert blocks.right(7, 1, 2) == blocks.digest(blocks.contents(blocks.key(7, 1), 2))
    some = {blocks.right(p, i, n) for p in range(3) for i in range(3) for n in range(3)}
    assert len(some) == 27
    assert len(blocks.contents(blocks.key(0, 0), 0)) == blocks.PART_BYTES


# ---- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("took", "late"), [(1.0, False), (1.99, False), (2.01, True), (30.0, True)]
)
def test_an_answer_more_than_a_second_after_its_deadline_is_refused(took, late):
    assert refused(operation(took=took)) == ["answered_in_time"] * late


def test_a_refusal_is_an_answer_and_has_the_same_deadline():
    assert refused(operation(took=3.0, error="Unavailable: no")) == ["answered_in_time"]


def test_an_operation_that_never_ends_is_refused():
    begin, _ = operation()
    assert not refused(begin, FaultBegan(at=11.9, fault=1, what="kill", target="b"))
    assert refused(begin, FaultBegan(at=12.1, fault=1, what="kill", target="b")) == [
        "answered_in_time"
    ]


def test_an_operation_of_a_client_that_was_killed_in_time_needs_no_end():
    begin, _ = operation()
    killed = [
        Ordered(at=11.0, pid=5, who="c-clients", signal=signal.SIGKILL),
        Exited(at=11.0, pid=5, who="c-clients", role="client", status=-9),
        FaultBegan(at=50.0, fault=1, what="kill", target="b"),
    ]
    assert not refused(begin, killed)


@pytest.mark.parametrize("who", ["c-clients", "c", "b", checker.HARNESS])
def test_what_the_machine_did_not_give_is_no_fault_of_the_pool(who):
    late = operation(took=4.0)
    assert refused(late) == ["answered_in_time"]
    assert not refused(late, starved(who, (9.9, 1.0), (12.0, 2.0), (14.1, 3.5)))


def test_starvation_before_and_after_excuses_nothing():
    late = operation(took=4.0)
    before = starved("c", (1.0, 0.0), (9.0, 8.0), (9.9, 8.0), (14.1, 8.1))
    after = starved("c", (9.9, 0.0), (14.0, 0.1), (20.0, 9.0))
    assert refused(late, before) == refused(late, after) == ["answered_in_time"]


def test_starvation_of_another_client_excuses_nothing():
    late = operation(took=4.0)
    assert refused(late, starved("c-others", (9.9, 0.0), (14.1, 4.0))) == ["answered_in_time"]


def test_the_client_s_own_thread_counts_what_it_waited_for_a_core():
    assert not refused(operation(took=4.0, starved_s=2.5))
    assert refused(operation(took=4.0, starved_s=1.5)) == ["answered_in_time"]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=30),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_starvation_is_never_more_than_all_and_never_less_than_inside(steps, one, other):
    start, end = sorted((one, other))
    times = sorted(at for at, _ in steps)
    totals = [sum(more for _, more in steps[: n + 1]) for n in range(len(times))]
    found = checker.History(
        [Starved(at=at, who="a", total_s=t) for at, t in zip(times, totals, strict=True)]
    ).starved_s("a", start, end)
    inside = [t for at, t in zip(times, totals, strict=True) if start < at < end]
    assert found <= (totals[-1] - totals[0] if totals else 0) + 1e-9
    assert found >= (inside[-1] - inside[0] if inside else 0) - 1e-9


def test_a_new_life_of_a_node_that_counts_from_nothing_takes_nothing_away():
    samples = starved("c", (9.9, 5.0), (11.0, 6.5), (12.0, 0.1), (14.1, 0.2))
    found = checker.History([RUN, *samples]).starved_s("c", 10.0, 14.0)
    assert found == pytest.approx(1.6)


# ---- deaths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_replica_on_a_living_node_that_is_not_found_is_refused(what):
    assert refused(operation(found=1), death(10.05, what=what)) == ["found_after_a_death"]


def test_a_read_in_vain_is_excused_only_by_a_machine_that_gave_nothing_all_the_time():
    def read(took: float) -> list[str]:
        some = starved("b", (9.0, 0.0), (16.0, 2.0))
        return refused(operation(found=1, took=took, wait_s=5.0), death(10.1), some)

    assert not read(1.9)
    assert read(2.1) == read(5.0) == ["found_after_a_death"]


def test_a_replica_that_is_found_later_than_a_second_after_the_death_is_refused():
    read = operation(took=1.5, wait_s=5.0)
    assert refused(read, death(10.1)) == ["found_after_a_death"]
    assert not refused(read, death(10.6))
    assert not refused(read, death(10.1), starved("b", (9.0, 0.0), (12.0, 0.5)))


def test_reads_that_began_soon_after_the_death_count_too():
    assert refused(operation(found=1), death(9.5)) == ["found_after_a_death"]
    assert not refused(operation(found=1), death(8.5)), "long after it nothing is promised"


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(death(10.05)[:2], id="nobody-holds-it"),
        pytest.param(death(10.05)[:3], id="not-held-to-the-end"),
        pytest.param([*death(10.05)[:2], *death(10.05)[3:]], id="not-held-from-the-beginning"),
        pytest.param(
            [*death(10.05), FaultBegan(at=9.5, fault=2, what="one-way", target="b")],
            id="something-else-is-broken",
        ),
        pytest.param(death(10.05, what="one-way"), id="nobody-died"),
        pytest.param(death(15.0), id="over-before"),
    ],
)
def test_nothing_is_promised_where_that_is_not_so(records):
    assert not refused(operation(found=0), records)


# ---- what is left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["leases", "granted_bytes", "used_bytes", "pinned_bytes", "transfers", "orders", "loans"],
)
def test_what_is_held_after_all_is_quiet_is_a_leak(name):
    def measured(amount: int) -> Measured:
        return Measured(at=9, who="a", role="node", pid=1, quiet=True, amounts={name: amount})

    assert refused(measured(1)) == ["nothing_leaked"]
    assert not refused(measured(0))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("descriptors", checker.DESCRIPTORS_MORE),
        ("memory_bytes", checker.MEMORY_MORE_BYTES),
    ],
)
def test_a_process_that_has_much_more_than_an_unused_one_leaks(name, more):
    def measured(amount: int, *, quiet: bool, pid: int = 1) -> Measured:
        return Measured(
            at=9 if quiet else 1,
            who=f"a/{pid}",
            role="control",
            pid=pid,
            quiet=quiet,
            amounts={name: amount},
        )

    fresh = measured(100, quiet=False)
    assert not refused(fresh, measured(100 + more, quiet=True))
    assert refused(fresh, measured(101 + more, quiet=True)) == ["nothing_leaked"]
    assert refused(fresh, measured(101 + more, quiet=True, pid=2)) == ["nothing_leaked"], (
        "one that was started later is compared with those of its role"
    )


# ---- ends ----------------------------------------------------------------------------------------------------


def exited(role: str = "daemon", who: str = "a", status: int = 70, at: float = 20.0) -> Exited:
    return Exited(at=at, pid=1, who=who, role=role, status=status)


@pytest.mark.parametrize("status", [0, 70, -6, -11])
@pytest.mark.parametrize("role", ["daemon", "worker", "client", "etcd", "redis"])
def test_an_end_that_nobody_ordered_is_refused(role, status):
    assert refused(Serving(at=1.0, pid=1, who="a"), exited(role, status=status)) == [
        "no_exit_unordered"
    ]


def test_an_end_before_its_order_was_not_ordered():
    order = Ordered(at=21.0, pid=1, who="a", signal=signal.SIGKILL)
    assert refused(order, exited(at=20.0)) == ["no_exit_unordered"]


def test_a_stop_is_no_order_to_end():
    order = Ordered(at=10.0, pid=1, who="a", signal=signal.SIGSTOP)
    assert refused(order, exited()) == ["no_exit_unordered"]


def test_a_daemon_that_is_asked_to_end_does_so_with_status_0_and_in_time():
    order = Ordered(at=10.0, pid=1, who="a", signal=signal.SIGTERM)
    assert not refused(order, exited(status=0))
    assert refused(order, exited(status=70)) == ["no_exit_unordered"]
    late = exited(status=0, at=10.0 + checker.STOPS_S + 1)
    assert refused(order, late) == ["no_exit_unordered"]


def test_a_daemon_may_refuse_to_start_without_etcd_and_may_not_end_without_it():
    away = FaultBegan(at=15.0, fault=1, what="stop", target="etcd")
    assert not refused(away, exited())
    assert refused(away, Serving(at=1.0, pid=1, who="a"), exited()) == ["no_exit_unordered"]
    assert refused(exited()) == ["no_exit_unordered"]


def test_a_daemon_without_memory_may_die_and_others_may_not():
    def cramped(node: str) -> FaultBegan:
        return FaultBegan(at=15.0, fault=1, what="memory", target=node)

    serving = Serving(at=1.0, pid=1, who="a")
    assert not refused(cramped("a"), serving, exited())
    assert refused(cramped("b"), serving, exited()) == ["no_exit_unordered"]


def test_a_daemon_ends_a_worker_only_where_something_is_broken():
    broken = FaultBegan(at=15.0, fault=1, what="stop-worker", target="a")
    assert not refused(broken, exited("worker", "a/1"))
    assert refused(broken, exited("worker", "b/1")) == ["no_exit_unordered"]


def test_workers_end_with_their_daemon():
    order = Ordered(at=15.0, pid=2, who="a", signal=signal.SIGTERM)
    assert not refused(order, exited("worker", "a/1"))
    assert refused(order, exited("worker", "b/1")) == ["no_exit_unordered"]
    assert refused(order, exited("worker", "a/1", at=10.0)) == ["no_exit_unordered"]


# ---- words ---------------------------------------------------------------------------------------------------


def test_an_error_that_says_nothing_of_failure_is_refused():
    assert refused(operation(error="KeyError: 7", expected=False)) == ["expected_errors"]


def test_a_traceback_is_refused():
    assert refused(Said(at=1.0, who="a", line="Traceback (most recent call last):")) == [
        "nothing_broken_said"
    ]


# ---- records -------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_in_order_without_a_line_that_was_cut(tmp_path: Path):
    begin, end = operation()
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    for path, records in ((one, [end, RUN]), (other, [begin])):
        write = history.Writer(path)
        for record in records:
            write(record)
        write.close()
    with other.open("ab") as file:
        file.write(b'{"kind": "End", "at": 1')
    assert history.read([one, other]) == [RUN, begin, end]


def test_a_summary_says_what_a_history_has_in_it():
    found = checker.summary([RUN, *operation(), *operation("y", found=0), *death(10.05)])
    assert found["operations"] == {"read, none": 1, "read, whole": 1}
    assert found["at deaths"] == {"reads": 2, "whole within a second": 1}
    assert found["faults"] == {"kill": 1}
