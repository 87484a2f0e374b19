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
from tests.fuzz.mutation import mutate
from tests.fuzz.runs import guided_run

COUNT = 1500


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
    if name.startswith(("handshake", "peer_requests")):
        return  # these end with the last frame, whatever it was
    target = targets.TARGETS[name]
    assert any(plain.accepted(target, seed) for seed in target.seeds)


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
