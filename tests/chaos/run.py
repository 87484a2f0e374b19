"""One run: a world, clients, the plan of a seed, and the history that comes of it."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import faults, history, plan
from tests.chaos.world import Clients, World
from tests.support import refusing

PROMPTS = 600
"""That clients use: 150 MiB, three times the nodes' memory, and less than their disks."""
WITNESSES = 64
"""Prompts that are read at once while a node dies."""
WITNESS_BLOCKS = 2
WITNESSES_FROM = 1 << 20
"""Their numbers, which nobody else uses."""
FAULT_THREADS = 32
ENDS_S = 300.0


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is. processes: of clients, at each node; threads: clients in each."""

    seconds: float = 600.0
    nodes: int = 3
    processes: int = 2
    threads: int = 5


def run(
    folder: Path,
    seed: int,
    size: Size,
    say: Callable[[str], None],
    kinds: Sequence[plan.Kind] = plan.KINDS,
) -> list[history.Record]:
    """Run a seed in a folder, which keeps the history and what all processes wrote. kinds: the faults that may happen."""
    names = {kind.name for kind in kinds}
    if "read-only-disk" in names and (reason := refusing.unavailable()):
        say(f"no read-only-disk: {reason}")
        names.remove("read-only-disk")
    possible = [kind for kind in kinds if kind.name in names]
    with World(
        folder,
        seed,
        size.nodes,
        sentinel=plan.has_sentinel(seed),
        refusing="read-only-disk" in names,
    ) as world:
        world.write(
            history.Run(at=time.monotonic(), seed=seed, seconds=size.seconds, nodes=world.nodes)
        )
        world.measure(quiet=False)
        _Course(world, seed, size, say, possible).run()
        say("all is quiet: what is left?")
        world.measure(quiet=True)
    return history.read(folder.glob("*.jsonl"))


class _Course:
    """A run's way through its plan."""

    def __init__(
        self,
        world: World,
        seed: int,
        size: Size,
        say: Callable[[str], None],
        kinds: Sequence[plan.Kind],
    ) -> None:
        self._world = world
        self._say = say
        self._size = size
        self._seed = seed
        self._plan = plan.make(seed, size.seconds, self._targets(), kinds)
        self._healed = threading.Event()
        self._under_way: list[Future[None]] = []
        self._begun_at = 0.0

    def _targets(self) -> dict[plan.TargetKind, list[str]]:
        nodes = self._world.nodes
        pairs = [f"{one}-{other}" for one, other in itertools.combinations(nodes, 2)]
        return {
            "node": nodes,
            "worker": nodes,
            "disk": nodes,
            "peer": nodes,
            "pair": pairs,
            "client": self._seats(),
            "etcd": ["etcd"],
            "redis": ["redis"],
            "sentinel": ["sentinel"] if plan.has_sentinel(self._seed) else [],
        }

    def _seats(self) -> list[str]:
        """The names of the places of clients, which begin with their nodes'."""
        return [f"{node}/{n}" for node in self._world.nodes for n in range(self._size.processes)]

    def run(self) -> None:
        world, size = self._world, self._size
        for name in self._seats():
            world.add_seat(name, name.split("/")[0], size.threads, PROMPTS)
        load = world.seats.values()
        witnesses = {node: world.add_clients(node, 0, 0) for node in world.nodes}
        for clients in list(world.clients.values()):
            clients.wait_ready()
        for seat in load:
            seat.clients.say("work")
        self._begun_at = time.monotonic()
        todo: list[plan.Fault | plan.Death] = [*self._plan.faults, *self._plan.deaths]
        with ThreadPoolExecutor(FAULT_THREADS, thread_name_prefix="chaos-fault") as threads:
            for one in sorted(todo, key=lambda one: one.at_s):
                self._wait_until(one.at_s)
                if isinstance(one, plan.Fault):
                    self._say(f"{one.at_s:6.1f} s  {one.what} {one.target} for {one.lasts_s:.1f} s")
                    done = threads.submit(faults.breaking, world, one, self._healed)
                    self._under_way.append(done)
                else:
                    self._heal()
                    self._die(one, witnesses)
            self._wait_until(size.seconds)
            self._heal()
        for seat in load:
            seat.clients.say("rest")
        for name in list(world.clients):
            world.end_clients(name)

    def _wait_until(self, at_s: float) -> None:
        """If what came before has taken longer, all that follows is later by as much: faults keep their distances."""
        left_s = self._begun_at + at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        else:
            self._begun_at -= left_s

    def _heal(self) -> None:
        """End all faults. Raises what one of them did."""
        self._healed.set()
        done, open_ = concurrent.futures.wait(self._under_way, ENDS_S)
        assert not open_, "a fault does not end"
        for one in done:
            one.result()
        self._under_way = []
        self._healed.clear()
        self._world.until_well()

    def _die(self, death: plan.Death, witnesses: dict[str, Clients]) -> None:
        """A node dies while many prompts are read, which another one has too."""
        world = self._world
        self._say(f"{death.at_s:6.1f} s  {death.how} {death.victim}: {WITNESSES} prompts are read")
        first = WITNESSES_FROM + death.number * WITNESSES
        words = f"{first} {WITNESSES} {WITNESS_BLOCKS}"
        holders = [witnesses[death.victim], witnesses[death.holder]]
        _all_say(list(witnesses.values()), "ready")
        for word in ("put", "announced", "held"):
            _all_say(holders, f"{word} {words}")
        reader = witnesses[death.reader]
        reader.say(f"connect {WITNESSES}")
        reader.tell(f"read {words}")
        number = -1 - death.number
        with faults.FAULTS[death.how](world, death.victim, number):
            reader.hear()
        witnesses[death.holder].say(f"held {words}")
        _all_say(holders, f"unpin {words}")
        world.until_well()


def _all_say(clients: Sequence[Clients], line: str) -> None:
    """At a time."""
    for one in clients:
        one.tell(line)
    for one in clients:
        one.hear()
