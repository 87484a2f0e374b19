"""A process with clients at one node, in threads: `python -m tests.chaos.clients SETTINGS`, a JSON object.

It writes its history to a file of its own, and does what it is told on stdin, a word a line:

    work                      read and write as engines do, until the next line
    rest                      stop that
    put FIRST COUNT BLOCKS    put so many prompts, and pin them
    ready                     wait until the daemon answers: it may be another one than before
    announced FIRST COUNT BLOCKS  wait until the directory knows that the node holds them
    held FIRST COUNT BLOCKS   say which of them the node holds
    connect COUNT             have so many more clients, connected as engines are
    read FIRST COUNT BLOCKS   read all of them at once, each by one of these
    unpin FIRST COUNT BLOCKS  undo the pins of `put`

and answers each with a line once that is done, `work` once it has begun. The end of stdin ends it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kvpool.client import Client, Lease, OperatorClient
from kvpool.errors import (
    ClusterUnavailable,
    KvpoolError,
    LeaseLost,
    LimitExceeded,
    PoolFull,
    Unavailable,
    UnknownReservation,
)
from kvpool.types import Namespace, NamespaceRecord, PartSpec
from tests.chaos import blocks, starving
from tests.chaos.history import Begin, End, Held, Starved, Writer
from tests.support.waiting import until

TIMEOUT_S = 1.0
WAITS_S = (0.0, 0.2, 1.0, 3.0)
READ_WAIT_S = 10.0
"""Of prompts that are to be found within a second: so that one which is found late is seen to be found."""
PAUSE_S = (0.005, 0.05)
HELD_S = (0.0, 0.0, 0.0, 0.05, 0.5)
"""How long a lease is kept before its slots are read: meanwhile they are not to be reused."""
RECORD = NamespaceRecord({"model": "chaos"}, (PartSpec(blocks.PART_BYTES),) * blocks.PARTS)
EXPECTED = (Unavailable, PoolFull, LimitExceeded, UnknownReservation, LeaseLost)
"""What a client may be told while something is away or full. UnknownReservation: the daemon is another one by now."""


class Settings(msgspec.Struct, frozen=True):
    """prompts: numbers of those that `work` uses, from 0."""

    name: str
    node: str
    socket: str
    history: str
    seed: int
    threads: int
    prompts: int


class Worker:
    """The clients of this process. One thread calls its methods."""

    def __init__(self, settings: Settings, write: Writer) -> None:
        self._settings = settings
        self._write = write
        self._numbers = itertools.count()
        self._rest = threading.Event()
        self._threads: list[threading.Thread] = []
        self._readers: list[tuple[Client, Namespace]] = []
        self._client = OperatorClient(settings.socket, timeout_s=TIMEOUT_S, connections_max=128)
        self._ns = self._open(self._client)

    def close(self) -> None:
        self.rest()
        self._client.close()

    # ---- what it is told -----------------------------------------------------------------------------

    def work(self) -> None:
        """As engines do: read a prompt, compute what is missing, put that."""
        self._rest.clear()
        for number in range(self._settings.threads):
            seed = f"{self._settings.seed}/{self._settings.name}/{number}/{next(self._numbers)}"
            self._begin(self._work, random.Random(seed))

    def rest(self) -> None:
        """Returns when nothing is under way any more."""
        self._rest.set()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def ready(self) -> None:
        """An idle client finds out by its next request that its daemon has ended."""
        _until(lambda: bool(self._client.stats()), "the daemon answers")

    def put(self, prompts: Iterable[int], count: int) -> None:
        """Until each is stored: this is no test of the put."""
        for prompt in prompts:

            def stored(prompt: int = prompt) -> bool:
                self._put(self._client, self._ns, prompt, range(count))
                self._client.pin(self._ns, blocks.keys(prompt, count), "hard")
                return self._holds(prompt, count)

            _until(stored, f"prompt {prompt} is stored")

    def unpin(self, prompts: Iterable[int], count: int) -> None:
        """They may be evicted again."""
        for prompt in prompts:
            with contextlib.suppress(Unavailable):  # then no pins are left either
                self._client.pin(self._ns, blocks.keys(prompt, count), "none")

    def announced(self, prompts: Iterable[int], count: int) -> None:
        """Wait until the directory says that this node has all parts of them."""
        keys = [key for prompt in prompts for key in blocks.keys(prompt, count)]

        def located() -> bool:
            found = self._client.locate(keys, digest=self._ns.digest)
            here = {
                entry.key
                for entry in found
                for replica in entry.replicas
                if replica.node == self._settings.node and replica.parts == entry.parts
            }
            return len(here) == len(keys)

        _until(located, "the prompts are announced")

    def held(self, prompts: Iterable[int], count: int) -> None:
        """In memory, all parts, by the node's word."""
        for prompt in prompts:
            with contextlib.suppress(Unavailable):  # then it is not known
                if self._holds(prompt, count):
                    at = time.monotonic()
                    node = self._settings.node
                    self._write(Held(at=at, node=node, prompt=prompt, blocks=count))

    def connect(self, count: int) -> None:
        """For `read`: how long that takes is not what is measured."""
        for _ in range(count):
            client = Client(self._settings.socket, timeout_s=TIMEOUT_S)
            self._readers.append((client, self._open(client)))

    def read(self, prompts: Iterable[int], count: int) -> None:
        """All at once, each by a client of its own."""
        listed = list(prompts)
        together = threading.Barrier(len(listed))

        def one(prompt: int, client: Client, ns: Namespace) -> None:
            together.wait()
            self._read(client, ns, prompt, count, READ_WAIT_S)

        threads = [
            threading.Thread(target=one, args=(prompt, *reader))
            for prompt, reader in zip(listed, self._readers, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client, _ in self._readers:
            client.close()
        self._readers = []

    # ---- one operation -------------------------------------------------------------------------------

    def _work(self, chance: random.Random) -> None:
        with Client(self._settings.socket, timeout_s=TIMEOUT_S) as client:
            ns = self._open(client)
            while not self._rest.is_set():
                self._turn(client, ns, chance)
                self._rest.wait(chance.uniform(*PAUSE_S))

    def _open(self, client: Client) -> Namespace:
        while True:
            try:
                return client.open(RECORD)
            except Unavailable:
                time.sleep(PAUSE_S[1])  # its daemon is away, and will be started again

    def _turn(self, client: Client, ns: Namespace, chance: random.Random) -> None:
        # Some prompts are read all the time, most now and then.
        prompt = min(int(chance.paretovariate(0.6)) - 1, self._settings.prompts - 1)
        if chance.random() < 0.5:
            prompt = chance.randrange(self._settings.prompts)
        count = chance.randint(1, blocks.PROMPT_BLOCKS)
        found = self._read(client, ns, prompt, count, chance.choice(WAITS_S), chance.choice(HELD_S))
        if found < count:
            self._put(client, ns, prompt, range(found, count))

    def _read(
        self,
        client: Client,
        ns: Namespace,
        prompt: int,
        count: int,
        wait_s: float,
        held_s: float = 0.0,
    ) -> int:
        keys = blocks.keys(prompt, count)

        def acquire(end: Ending) -> None:
            lease = client.acquire(ns, keys, wait_s=wait_s)
            end.answered = time.monotonic()
            if lease is None:
                return
            try:
                if held_s:
                    time.sleep(held_s)
                seen = _copied(lease)
                lease.check()
                end.blocks, end.seen = lease.blocks, seen
            finally:
                lease.release()

        return self._operate("read", prompt, count, TIMEOUT_S + wait_s, acquire)[0]

    def _put(self, client: Client, ns: Namespace, prompt: int, indices: range) -> int:
        keys = [blocks.key(prompt, index) for index in indices]
        stored = 0
        for part in range(blocks.PARTS):
            data = [blocks.contents(key, part) for key in keys]

            def put(end: Ending, part: int = part, data: list[bytes] = data) -> None:
                end.blocks = client.put(ns, keys, data, part=part)

            stored, failed = self._operate("put", prompt, len(keys), TIMEOUT_S, put)
            if failed:
                break  # as an engine does: without this part the others are of no use
        return stored

    def _holds(self, prompt: int, count: int) -> bool:
        keys = blocks.keys(prompt, count)
        return all(
            self._client.contains(self._ns, keys, part=part).all() for part in range(blocks.PARTS)
        )

    def _operate(
        self, does: str, prompt: int, count: int, seconds: float, do: Callable[[Ending], None]
    ) -> tuple[int, bool]:
        """Record an operation; returns its blocks, and whether it failed."""
        name = f"{self._settings.name}-{next(self._numbers)}"
        end = Ending()
        starved = starving.thread_s()
        now = time.monotonic()
        self._write(
            Begin(
                at=now,
                operation=name,
                client=self._settings.name,
                node=self._settings.node,
                does=does,
                deadline=now + seconds,
                prompt=prompt,
                blocks=count,
            )
        )
        error, expected = "", True
        try:
            do(end)
        except KvpoolError as raised:
            error, expected = f"{type(raised).__name__}: {raised}", isinstance(raised, EXPECTED)
        except Exception as raised:  # noqa: BLE001 - whatever it is, the history has it and the checker refuses it
            error, expected = f"{type(raised).__name__}: {raised}", False
        now = time.monotonic()
        self._write(
            End(
                at=now,
                operation=name,
                answered=end.answered or now,
                blocks=end.blocks,
                error=error,
                expected=expected,
                seen=end.seen,
                starved_s=starving.thread_s() - starved,
            )
        )
        return end.blocks, bool(error)

    def _begin(self, target: Callable[[random.Random], None], chance: random.Random) -> None:
        thread = threading.Thread(target=target, args=(chance,))
        self._threads.append(thread)
        thread.start()


class Ending:
    """What an operation came to, noted while it is under way."""

    def __init__(self) -> None:
        self.answered = 0.0
        self.blocks = 0
        self.seen: list[tuple[int, int, str]] = []


def _until(condition: Callable[[], bool], what: str) -> None:
    """Wait until it is so; on a busy machine daemon and directory may be late to say."""

    def so() -> bool:
        try:
            return condition()
        except (ClusterUnavailable, Unavailable):
            return False

    until(so, what)


def _copied(lease: Lease) -> list[tuple[int, int, str]]:
    """The digests of what the slots hold now."""
    return [
        (part, slots.first + at, blocks.digest(bytes(slots.view(at))))
        for part, slots in lease.slots.items()
        for at in range(len(slots))
    ]


def main(arguments: list[str]) -> int:
    """See the module."""
    settings = msgspec.json.decode(arguments[0], type=Settings)
    write = Writer(Path(settings.history))

    def starved(total_s: float) -> None:
        write(Starved(at=time.monotonic(), who=settings.name, total_s=total_s))

    with starving.Lateness(starved):
        worker = Worker(settings, write)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            word, *numbers = line.split()
            if word in {"work", "rest", "ready"}:
                getattr(worker, word)()
            elif word == "connect":
                worker.connect(int(numbers[0]))
            else:
                first, count, length = map(int, numbers)
                getattr(worker, word)(range(first, first + count), length)
            sys.stdout.write("done\n")
            sys.stdout.flush()
        worker.close()
    write.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
