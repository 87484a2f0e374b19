"""Daemons between which little goes a second: what an engine computes sooner is not waited for."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.errors import InvalidRequest
from kvpool.types import NamespaceRecord, Recompute
from tests.support.proxy import Fault, Proxy
from tests.support.waiting import PATIENCE_S

NBYTES = 64 << 10
LINK_BYTES_S = 2 << 20
RECORD = NamespaceRecord.simple("worth", block_bytes=NBYTES, block_tokens=16)
BLOCKS = 64
FAST, SLOW = Recompute(1e-4), Recompute(5.0)  # engines; the link takes 30 ms a block


def keys_of(numbers: range) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def block(number: int) -> bytes:
    return np.random.default_rng(number).bytes(NBYTES)


class Pair:
    """Node a, which has all blocks, and node b, behind a slow link."""

    def __init__(self, start, proxy: Proxy, a) -> None:
        self.proxy = proxy
        self.b = start("--peer", proxy.url, name="b")
        self.at_a: Client = a.client(connect=True)
        self.at_b: Client = self.b.client(connect=True)
        self.ns = self.at_b.open(RECORD)
        numbers = range(BLOCKS)
        self.at_a.put(self.at_a.open(RECORD), keys_of(numbers), [block(n) for n in numbers])

    @property
    def remote(self):
        return self.at_b.stats().fetch

    @property
    def declined(self) -> int:
        (peer,) = self.remote.peers
        assert peer.declined == self.remote.declined
        return peer.declined

    def pull(self, end: int, recompute: Recompute | None = None) -> int:
        return self.at_b.pull(self.ns, keys_of(range(end)), wait_s=PATIENCE_S, recompute=recompute)


@pytest.fixture
def pair(start) -> Iterator[Pair]:
    a = start("--listen", "tcp://127.0.0.1:0", name="a")
    url = urlsplit(a.ready.rsplit("peers at ", 1)[1].strip())
    with Proxy((url.hostname, url.port)) as proxy:
        proxy.set(Fault(bytes_s=LINK_BYTES_S))
        both = Pair(start, proxy, a)
        # It has to be seen to be slow; an engine of unknown speed loads all there is.
        assert both.pull(16) == 16
        assert both.declined == 0
        yield both
        both.at_a.close()
        both.at_b.close()


def test_a_fast_engine_gets_what_is_here_and_a_slow_one_what_is_there(pair):
    assert pair.pull(40, FAST) == 16
    assert pair.declined == 24
    with pair.at_b.acquire(
        pair.ns, keys_of(range(40)), wait_s=PATIENCE_S, recompute=Recompute(1e-5, 1e-6)
    ) as lease:
        assert lease.blocks == 16
    assert pair.declined == 48
    assert pair.pull(40, SLOW) == 40
    with pair.at_b.acquire(
        pair.ns, keys_of(range(50)), wait_s=PATIENCE_S, recompute=Recompute(0.001, 0.1)
    ) as lease:
        assert lease.blocks == 50, "deep blocks take long to compute"
    assert pair.declined == 48
    assert pair.at_b.get(pair.ns, keys_of(range(50))) == [block(n) for n in range(50)]


def test_a_little_is_loaded_all_the_same_after_a_while_for_nobody_to_wait_for(pair, until):
    assert pair.pull(40, FAST) == 16
    until(lambda: pair.pull(40, FAST) == 32)
    assert pair.remote.trials == 1
    assert pair.at_b.get(pair.ns, keys_of(range(40)))[:32] == [block(n) for n in range(32)]


def test_a_price_that_is_none_is_refused(pair):
    price = Recompute(1.0)
    object.__setattr__(price, "block_s", -1.0)
    with pytest.raises(InvalidRequest):
        pair.pull(BLOCKS, price)
    assert pair.pull(40, SLOW) == 40, "the connection is well"
