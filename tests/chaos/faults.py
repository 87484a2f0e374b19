"""What the kinds of `plan.KINDS` are: each is begun, lasts, and is healed."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tests.chaos.history import FaultBegan, FaultEnded
from tests.chaos.plan import Fault
from tests.chaos.world import World
from tests.support.proxy import BOTH
from tests.support.proxy import Fault as Broken

Breaking = contextlib.AbstractContextManager[None]


def breaking(world: World, fault: Fault, lasts: threading.Event) -> None:
    """Do a fault, wait until it has lasted or the event is set, and heal it. Any thread."""
    with FAULTS[fault.what](world, fault.target, fault.number):
        lasts.wait(fault.lasts_s)


@contextlib.contextmanager
def noted(world: World, number: int, what: str, target: str) -> Iterator[None]:
    """In the history."""
    world.write(FaultBegan(at=time.monotonic(), fault=number, what=what, target=target))
    try:
        yield
    finally:
        world.write(FaultEnded(at=time.monotonic(), fault=number))


@contextlib.contextmanager
def killed(world: World, target: str, number: int) -> Iterator[None]:
    """A daemon is killed, and started again."""
    with world.having(target) as node, noted(world, number, "kill", target):
        world.kill(node)
        yield
        world.start(node)


@contextlib.contextmanager
def stopped(world: World, target: str, number: int) -> Iterator[None]:
    """A daemon and its workers hang."""
    with world.having(target) as node, noted(world, number, "stop", target):
        world.order(node, signal.SIGSTOP, workers=True)
        try:
            yield
        finally:
            world.order(node, signal.SIGCONT, workers=True)


@contextlib.contextmanager
def cut_one_way(world: World, target: str, number: int) -> Iterator[None]:
    """Peers do not reach a node; it reaches them."""
    with _proxied(world, "one-way", target, number, Broken(silent=True, hold=BOTH)):
        yield


@contextlib.contextmanager
def _proxied(world: World, what: str, target: str, number: int, broken: Broken) -> Iterator[None]:
    proxy = world.proxies[target]
    with noted(world, number, what, target):
        proxy.set(broken)
        try:
            yield
        finally:
            proxy.set()
            # What was connected to nobody is not connected to anybody by that.
            proxy.cut()


FAULTS: dict[str, Callable[[World, str, int], Breaking]] = {
    "kill": killed,
    "stop": stopped,
    "one-way": cut_one_way,
}
