"""A short run of the fuzzing: the same inputs each time. `make fuzz` does more of it."""

import importlib.util
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvpool.wire import peer
from tests.fuzz import plain, targets
from tests.fuzz.mutation import join_frames, mutate, split_frames
from tests.fuzz.runs import guided_run

COUNT = 1500
SEEDS = 1, 2, 3  # how far one of them comes is chance


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """What is refused is logged in real life."""
    before = logging.root.manager.disable
    logging.disable()
    yield
    logging.disable(before)


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
def test_bytes_from_outside_raise_nothing_but_our_errors(name: str) -> None:
    findings = plain.fuzz(name, COUNT, seed=1)
    assert not findings, f"{findings[0].data!r}\n{findings[0].trace}"


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
def test_seeds_are_what_real_senders_send(name: str) -> None:
    """At least one is taken for right: otherwise nothing behind the first check is reached."""
    target = targets.TARGETS[name]
    assert any(plain.accepted(target, seed) for seed in target.seeds)
    if name == "rest":
        assert all(plain.accepted(target, seed) for seed in target.seeds)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("handshake_listens", ["admitted"]),
        ("handshake_connects", ["greeted"]),
        ("peer_requests", ["Ask", "Offer", "Await", "Operate", "loan", "Corrupt"]),
    ],
)
def test_changed_inputs_come_as_far_as_right_ones(name: str, inner: list[str]) -> None:
    targets.REACHED.clear()
    for seed in SEEDS:
        assert not plain.fuzz(name, COUNT, seed=seed)
    least = len(SEEDS) * COUNT // 150
    rare = {each: targets.REACHED[each] for each in inner if targets.REACHED[each] < least}
    assert not rare


def test_frames_are_found_again() -> None:
    parts = [(1, b""), (7, b"x" * 300), (2, b"yy")]
    data = join_frames(parts)
    assert split_frames(data, -1) == (parts, b"")
    assert split_frames(data + b"tail", 2) == (parts[:2], join_frames(parts[2:]) + b"tail")
    assert split_frames(data[:-1], -1) == (parts[:2], data[-10:-1])
    assert split_frames(b"", -1) == ([], b"")


def test_a_decoder_that_raises_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fragile(data: bytes) -> None:
        found = peer.decode_peer(data)
        if isinstance(found, peer.Ask) and len(found.keys) % 16:
            raise ValueError("half a key")

    seeds = [msgspec.msgpack.encode(peer.Ask("default", bytes(16), [0], bytes(32)))]
    monkeypatch.setitem(targets.TARGETS, "fragile", targets.Target(fragile, seeds))
    findings = plain.fuzz("fragile", 3000, seed=1)
    assert findings
    assert "half a key" in findings[0].trace


def test_mutations_are_many_and_come_from_the_seed() -> None:
    data = msgspec.msgpack.encode(peer.Ask("default", bytes(16), [0], bytes(32)))
    made = [mutate(data, random.Random(number)) for number in range(500)]
    assert made == [mutate(data, random.Random(number)) for number in range(500)]
    assert len(set(made)) > 300


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_the_guided_run_runs(tmp_path: Path) -> None:
    assert guided_run("peer", 2000, 1, tmp_path) == ("peer", "")
    assert list(tmp_path.iterdir()) == []
