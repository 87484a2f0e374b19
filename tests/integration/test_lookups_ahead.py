"""Lookups beside an engine's steps see what the engine's own would: blocks of its weights, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.client import Client
from kvpool.engine_plugins.vllm.scheduler.ahead import Ahead
from kvpool.types import Namespace, NamespaceRecord, PartSpec
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord(fields={"model": "m"}, parts=(PartSpec(nbytes=4096),))
KEYS = b"".join(bytes([number]) * 16 for number in (1, 2, 3))


@pytest.fixture
def daemon(start_one: Any) -> Iterator[Any]:
    with start_one("--memory", "8MiB") as daemon:
        yield daemon


def put(client: Client, ns: Namespace) -> None:
    client.put(ns, KEYS, bytes(3 * 4096))


def found(ahead: Ahead, ns: Namespace) -> int:
    lease = ahead.submit(ns, KEYS, 0, "", "r").result(PATIENCE_S)
    return lease.blocks if lease else 0


def test_a_lookup_ahead_has_the_weights_of_its_engine(daemon: Any) -> None:
    with daemon.client(connect=True) as engine, daemon.client(connect=True) as other:
        ahead = Ahead(daemon.client(), 10.0)
        ns = engine.open(RECORD)
        ahead.enter(RECORD, engine.namespaces.generation(ns))
        put(engine, ns)
        assert found(ahead, ns) == 3
        # Another one ends the epoch and stores its blocks: they are of other weights.
        theirs = other.open(RECORD)
        other.namespaces.reset(theirs)
        put(other, theirs)
        assert engine.acquire(ns, KEYS) is None
        assert found(ahead, ns) == 0
        # The engine has been reset, too.
        ns = engine.open(RECORD)
        ahead.enter(RECORD, engine.namespaces.generation(ns))
        assert found(ahead, ns) == 3
        ahead.close()


def test_a_first_lookup_ahead_joins_no_later_epoch(daemon: Any) -> None:
    with daemon.client(connect=True) as engine, daemon.client(connect=True) as other:
        ns = engine.open(RECORD)
        generation = engine.namespaces.generation(ns)
        theirs = other.open(RECORD)
        other.namespaces.reset(theirs)
        put(other, theirs)
        ahead = Ahead(daemon.client(), 10.0)
        ahead.enter(RECORD, generation)
        assert found(ahead, ns) == 0
        # What is not known yet is not guessed.
        ahead.enter(RECORD, -1)
        assert found(ahead, ns) == 0
        ahead.close()
