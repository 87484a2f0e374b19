"""Following a drain to its end."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvpool.cli.render.drain import PATIENCE_S, Ended, Lines, carry_out, follow, verdict
from kvpool.errors import ClusterUnavailable, Unavailable
from tests.unit.cli.answers import AWAY, DRAIN, LEFT, MARKED_GONE, OURSELVES, SERVING, draining


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def followed(*looks, timeout_s: float = 60.0) -> tuple[Ended, list[dict], float]:
    """The end of following host-2, all that was shown, and how long it took. The last look lasts."""
    left = list(looks)

    def look():
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    time, seen = Time(), []
    start = time.now
    ended = follow(look, "host-2", seen.append, timeout_s, clock=time.clock, sleep=time.sleep)
    return ended, seen, time.now - start


@pytest.mark.parametrize(
    ("looks", "how"),
    [
        ([SERVING, draining(), draining(phase="done"), LEFT], "drained"),
        ([draining(phase="done"), MARKED_GONE], "drained"),
        ([MARKED_GONE], "drained"),
        ([draining(phase="done"), draining(phase="done") | OURSELVES], "drained"),
        ([draining(), ClusterUnavailable("busy"), AWAY, draining(phase="done"), LEFT], "drained"),
        ([SERVING, LEFT], "vanished"),
        ([draining(), draining(phase="waiting"), LEFT], "drained"),
        ([draining(), draining(), LEFT], "vanished"),
        ([draining(), LEFT | OURSELVES], "vanished"),
        ([LEFT], "absent"),
        ([LEFT | OURSELVES], "absent"),
        ([SERVING, draining(), SERVING], "recalled"),
        ([draining(), draining() | {"drains": []}], "recalled"),
        ([SERVING], "late"),
        ([SERVING, draining()], "late"),
    ],
)
def test_the_ways_in_which_a_drain_ends(looks, how):
    ended, _, took = followed(*looks)
    assert ended.how == how
    assert took < 61
    assert (took >= 60) == (how == "late")


def test_progress_is_shown_and_the_last_word_is_kept():
    looks = [
        SERVING,
        draining(blocks=1),
        draining(blocks=2),
        draining(blocks=3, phase="done"),
        LEFT,
    ]
    ended, seen, _ = followed(*looks)
    assert [progress["blocks"] for progress in seen] == [1, 2, 3]
    assert ended.progress == seen[-1]


def test_a_daemon_that_stays_away_ends_the_wait():
    time = Time()

    def look():
        raise AWAY

    with pytest.raises(Unavailable, match="no answer"):
        follow(look, "host-2", print, 1e9, clock=time.clock, sleep=time.sleep)
    assert PATIENCE_S <= time.now - 1000 < PATIENCE_S + 1


@pytest.mark.parametrize(
    ("how", "progress", "good", "words"),
    [
        ("drained", {}, True, "120 blocks that only it held were copied to others, 1.5 GiB"),
        ("drained", {"copied": 1}, True, "1 block that only it held was copied"),
        ("drained", {"copied": 0}, True, "others hold whatever it held"),
        ("drained", {"left": 2}, True, "and 2 blocks stay on its disks for want of time"),
        ("drained", {"failed": 3}, False, "3 blocks that only it holds found no other place"),
        ("vanished", {}, False, "not seen to finish its drain (450 of 1,000 blocks looked at"),
        ("absent", None, True, "It stays out until"),
        ("recalled", {}, False, "was cancelled by another operator"),
        ("late", {}, False, "not drained after 60 s"),
        ("late", None, False, "it continues"),
    ],
)
def test_what_is_said_of_the_end(how, progress, good, words):
    last = None if progress is None else DRAIN | progress
    text, well = verdict("host-2", Ended(how, last), 60.0)
    assert well is good
    assert words in text
    assert "host-2" in text
    assert "\n" not in text
    if not good and how != "recalled":
        assert "`kvpool drain host-2 --cancel`" in text


def test_lines_for_a_log_are_few():
    time, out = Time(), io.StringIO()
    lines = Lines("host-2", Console(file=out, width=20), time.clock)
    for blocks in range(400):
        lines.show(DRAIN | {"blocks": blocks // 2})
        time.sleep(0.1)
    said = out.getvalue().splitlines()
    assert said[0].startswith("host-2: 0 of 1,000 blocks looked at")
    assert 15 <= len(said) <= 20, "40 seconds, a line every two"
    assert len(set(said)) == len(said)


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    looks = iter([draining(), draining(phase="waiting", leases=2), draining(phase="done"), LEFT])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kvpool.cli.render.drain.LOOK_S", 0.001)
    text, good = carry_out(SimpleNamespace(cluster=lambda: next(looks)), "host-2", 20.0)
    assert good and "is drained" in text
    shown_there = capsys.readouterr().err
    assert "host-2" in shown_there
    assert "━" in shown_there
    assert "45%" in shown_there
