"""An exception at any bytecode of a caller's thread: time-outs by signals, Ctrl-C in a notebook, debuggers.

Each case raises at every point of an operation in turn, where a tracer finds the points. After each of them the client
has to work, with right bytes, and the daemon's books have to be as before.
"""

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.client import Client
from kvpool.errors import KvpoolError
from kvpool.types import Namespace, NamespaceRecord
from tests.support.client_inside import connections_of
from tests.support.waiting import PATIENCE_S, until

FOLDER = kvpool.__path__[0]
NBYTES = 4096
RECORD = NamespaceRecord.simple("interrupted", block_bytes=NBYTES, block_tokens=16)
CONNECTIONS_MAX = 4


class Interruption(BaseException):
    """Nothing that kvpool raises."""


class Tracer:
    """Raises at the n-th point in the code of kvpool, once. opcodes: bytecodes are points too, besides lines, calls
    and returns.
    """

    def __init__(self, n: int, *, opcodes: bool) -> None:
        self.left = n
        self.opcodes = opcodes
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = self.opcodes
        if event != "exception":
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno} {event} {frame.f_lasti}"
                raise Interruption
        return self


def interrupted_everywhere(work: Callable[[], object], *, opcodes: bool = True) -> Iterator[str]:
    """Run the work again and again, interrupted one point further each time; gives each place."""
    for n in itertools.count(1):
        tracer = Tracer(n, opcodes=opcodes)
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            work()
        except Interruption:
            pass
        finally:
            sys.settrace(before)
        if not tracer.where:
            return  # that was all of it
        yield tracer.where


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int, nbytes: int = NBYTES) -> bytes:
    return number.to_bytes(8, "big") * (nbytes // 8)


class World:
    """A client with a block, and keys that were never used."""

    def __init__(self, client: Client, ns: Namespace, fresh: Iterator[int]) -> None:
        self.client, self.ns, self.fresh = client, ns, fresh
        self.known = next(fresh)
        client.put(ns, [key(self.known)], block(self.known))

    def check(self, where: str) -> None:
        """It works at once."""
        new = next(self.fresh)
        assert self.client.put(self.ns, [key(new)], block(new)) == 1, where
        assert self.client.match(self.ns, [key(new)]) == 1, where
        for number in (self.known, new):
            assert self.client.get(self.ns, [key(number)]) == [block(number)], where

    def put_new(self) -> None:
        new = next(self.fresh)
        self.client.put(self.ns, [key(new)], block(new))

    def put_known(self) -> None:
        self.client.put(self.ns, [key(self.known)], block(self.known))

    def get(self) -> None:
        assert self.client.get(self.ns, [key(self.known)]) == [block(self.known)]

    def match(self) -> None:
        self.client.match(self.ns, [key(self.known)])

    def acquire(self) -> None:
        lease = self.client.acquire(self.ns, [key(self.known)], lease_s=1.0)
        if lease is not None:
            lease.release()

    def commit(self) -> None:
        new = next(self.fresh)
        with self.client.reserve(self.ns, [key(new)]) as reservation:
            slots = reservation.slots
            slots.table[slots.rows, : slots.nbytes] = np.frombuffer(block(new), np.uint8)
            self.client.commit(reservation)

    def abort(self) -> None:
        self.client.reserve(self.ns, [key(next(self.fresh))]).abort()


@pytest.fixture(scope="module")
def node(start_one):
    with start_one("--memory", "64MiB") as daemon:
        yield daemon


@pytest.fixture
def world(node):
    fresh = itertools.count(int(np.random.default_rng().integers(1 << 60)))
    with Client(node.socket, timeout_s=PATIENCE_S, connections_max=CONNECTIONS_MAX) as client:
        yield World(client, client.open(RECORD), fresh)


def nothing_held(node) -> bool:
    """Whether no client but the one that asks is left, with what it might hold."""
    stats = node.stats()
    return (stats.clients, stats.leases, stats.tenants["default"].granted_bytes) == (1, 0, 0)


@pytest.mark.parametrize(
    ("name", "opcodes"),
    [
        *[(name, False) for name in ("get", "match", "acquire", "put_known")],
        *[(name, True) for name in ("put_new", "commit", "abort")],
    ],
)
def test_a_client_goes_on_after_an_exception_anywhere(node, world, name, opcodes):
    work = getattr(world, name)
    work()
    with Client(node.socket, timeout_s=PATIENCE_S) as observer:
        before = observer.stats().connections
        points = 0
        for where in interrupted_everywhere(work, opcodes=opcodes):
            world.check(where)
            assert observer.stats().connections <= before, where
            points += 1
    assert points > 100
    world.client.close()
    until(lambda: nothing_held(node), "what it held comes back")


def test_a_new_client_goes_on_after_an_exception_anywhere(node, world):
    """In its first request, and in its end."""
    made: list[Client] = []

    def work() -> None:
        made.append(Client(node.socket, timeout_s=PATIENCE_S))
        with made[0] as client:
            new = next(world.fresh)
            client.put(client.open(RECORD), [key(new)], block(new))

    for where in interrupted_everywhere(work, opcodes=False):
        client = made.pop() if made else Client(node.socket, timeout_s=PATIENCE_S)
        if not connections_of(client).closed:
            World(client, client.open(RECORD), world.fresh).check(where)
        client.close()
        world.check(where)
        made.clear()
    world.client.close()
    del client
    gc.collect()
    until(lambda: nothing_held(node), "what they held comes back")


def test_a_large_put_leaves_nobody_at_work_on_its_slots(node, world):
    """A second thread copies; nobody may write to slots that were given back."""
    nbytes = 1 << 20
    ns = world.client.open(NamespaceRecord.simple("large", block_bytes=nbytes, block_tokens=16))
    data = np.zeros((4, nbytes), np.uint8)
    numbers = [next(world.fresh) for _ in range(4)]
    others = [next(world.fresh) for _ in range(4)]
    keys, other_keys = [key(n) for n in numbers], [key(n) for n in others]

    def work() -> None:
        world.client.put(ns, keys, data)

    for where in interrupted_everywhere(work, opcodes=False):
        data[:] ^= 0xFF  # what is still copied is now wrong
        world.client.remove(ns, [*keys, *other_keys])
        whole = b"".join(block(n, nbytes) for n in others)
        assert world.client.put(ns, other_keys, whole) == 4, where
        assert b"".join(map(bytes, world.client.get(ns, other_keys))) == whole, where
        world.client.match(ns, other_keys)  # takes the release of the lease along
        data[:] = 0


def test_an_exception_is_no_failure_of_the_daemon(world):
    """No back-off: the very next request is sent."""
    for where in interrupted_everywhere(world.get, opcodes=False):
        assert world.client.available, where
        try:
            world.client.stats()
        except KvpoolError as error:
            pytest.fail(f"{where}: {error}")
