"""Engines on different nodes of one pool: a real etcd, a real Redis, daemons that die.

At most one engine lives in this process, so others are played by clients of its namespace.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.signals import send

Oracle = Callable[..., list[list[int]]]
# A quarter of the wait is for the directory's answer, which is late on a busy machine.
PULL_WAIT_S = 30.0
# What is computed is never taken for quicker: on a busy machine, or after a peer that was stopped, it would be.
PULLING = {"pull_wait_s": PULL_WAIT_S, "prefill_tokens_per_s": 1e-3}


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(7)


@pytest.fixture(scope="module")
def expected(oracle: Oracle, asked: list[list[int]]) -> list[list[int]]:
    return oracle("llama", asked)


@pytest.fixture
def cluster(kit: Any, tmp_path: Path, expected: list[list[int]]) -> Iterator[Any]:
    """Nodes a, b and c, and no engine yet."""
    with kit.run_cluster(tmp_path, 3) as nodes:
        yield nodes


def publish(kit: Any, engine: Any, node: Any) -> None:
    """Until the cluster knows what the engine has computed."""
    engine.drain()
    kit.until(node.settled, "the directory knows what the node holds")


def keys_of(kit: Any, engine: Any, prompt: list[int]) -> bytes:
    """Packed keys of a prompt's blocks, as the engine looks them up when only the pool may hit."""
    seen: list[bytes] = []
    engine.forget()
    with kit.lookups_seen(engine, lambda keys, _: seen.append(keys)):
        engine.generate([prompt], 1)
    engine.forget()
    return seen[-1]


def test_blocks_cross_nodes_and_an_ended_epoch_ends_them_everywhere(
    kit: Any, llama: Path, cluster: Any, asked: list[list[int]], expected: list[list[int]]
) -> None:
    a, b, _ = cluster
    hits = [kit.hit(len(each)) for each in asked]
    with kit.run_engine(llama, a) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [0, 0, 0]
        publish(kit, engine, a)

    with kit.run_engine(llama, b, PULLING) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == hits
        assert engine.metric("pulls") == len(asked)
        assert engine.metric("late_pulls") == 0
        whole = sum(len(each) // kit.BLOCK for each in asked)
        assert engine.metric("pulled_blocks") == whole
        assert b.counters().pulled_blocks == kit.SHARDS * whole
        # They are here now: no others are asked.
        engine.forget()
        assert [output.cached for output in engine.generate(asked)] == hits
        assert engine.metric("pulls") == len(asked)
        engine.assert_nothing_held(b)
        # Its weights stay the same.
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert [output.cached for output in engine.generate(asked)] == hits
        assert engine.metric("resets") == 1
        assert engine.metric("new_weights") == 0
        engine.assert_nothing_held(b)

    with kit.run_engine(llama, a, {**PULLING, "resave_s": 0}) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == hits
        keys = keys_of(kit, engine, asked[0])
        # Somebody else's reset, over on b, ends this one's epoch.
        record = engine.namespace.record
        other = b.client.open(record)
        b.client.namespaces.reset(other)
        kit.until(lambda: a.client.match(a.client.open(record), keys) == 0, "a has the new epoch")
        committed = a.counters().committed
        for _ in range(2):
            outputs = engine.generate(asked)
            assert [output.tokens for output in outputs] == expected
            assert [output.cached for output in outputs] == [0, 0, 0]
            engine.forget()
        assert a.counters().committed == committed
        assert engine.metric("shut_out") == 1
        assert engine.metric("failed_saves") > 0
        # Its own reset leads to where that one is.
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.generate(asked[:1])[0].cached == 0
        publish(kit, engine, a)
        assert b.client.pull(other, keys, wait_s=PULL_WAIT_S) == len(keys) // 16
        engine.assert_nothing_held(a)


class Killer:
    """Kills the first owner that is asked for blocks, while it is asked.

    All owners' transfer workers are stopped until then, so nothing can have come over.
    """

    def __init__(self, engine: Any, puller: Any, owners: list[Any]) -> None:
        self.killed: list[Any] = []
        self._puller = puller
        self._owners = {owner.client.stats().cluster.incarnation: owner for owner in owners}
        self._workers = {owner.pid: owner.workers for owner in owners}
        self._pulls = engine.pulls
        self._ended = self._pulls.ended

    def __enter__(self) -> Self:
        self._signal_all(signal.SIGSTOP)
        self._pulls.ended = self._look
        return self

    def __exit__(self, *_: object) -> None:
        self._signal_all(signal.SIGCONT)
        self._pulls.ended = self._ended

    def _signal_all(self, number: signal.Signals) -> None:
        dead = [owner.pid for owner in self.killed]
        for pid, workers in self._workers.items():
            for worker in workers if pid not in dead else ():
                send(worker, number)

    def _look(self, pull: Any) -> bool:
        """In the place of the engine's question whether the pull has ended."""
        for peer in self._puller.client.stats().fetch.peers:
            owner = self._owners.get(peer.incarnation)  # none for one that is dead already
            if peer.running and owner is not None and not self.killed:
                self.killed.append(owner)
                owner.kill()
                for worker in self._workers[owner.pid]:
                    os.kill(worker, signal.SIGKILL)
                self._signal_all(signal.SIGCONT)
        ended: bool = self._ended(pull)
        return ended


def test_an_owner_that_dies_during_a_pull(
    kit: Any, llama: Path, cluster: Any, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """First while another has the blocks too, then the only one left."""
    *owners, node = cluster
    with kit.run_engine(llama, node, PULLING) as engine:
        engine.generate(asked)
        keys = b"".join(keys_of(kit, engine, each) for each in asked)
        publish(kit, engine, node)
        namespace = engine.namespace
        for owner in owners:
            owner.client.open(namespace.record)
            for at in range(0, len(keys), 16):
                assert owner.client.pull(namespace, keys[at : at + 16], wait_s=PULL_WAIT_S) == 1
            kit.until(owner.settled, "the directory knows the copies")
        assert node.client.remove(namespace, keys) == len(keys) // 16
        kit.until(node.settled, "the directory knows that they are gone here")

        with Killer(engine, node, owners) as killer:
            (output,) = engine.generate(asked[:1])
        assert output.tokens == expected[0]
        assert output.cached == kit.hit(len(asked[0]))
        (dead,) = killer.killed

        owners.remove(dead)
        with Killer(engine, node, owners) as killer:
            (output,) = engine.generate(asked[1:2])
        assert killer.killed == owners
        assert output.tokens == expected[1]
        assert output.cached == 0
        # A step's time may be added to the wait, and the machine may be busy.
        assert engine.metric("pull_wait_seconds") < 2 * (PULL_WAIT_S + 5)
        assert engine.metric("pulls") == len(asked) + 2
        engine.assert_nothing_held(node)
