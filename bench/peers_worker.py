"""One contestant of bench/peers.py in a process of its own: it moves batches of blocks and times each.

    python bench/peers_worker.py KIND PAYLOAD_FD PAYLOAD_BYTES OPTIONS

Any environment's Python that has what the contestant imports. Commands come as lines of JSON on standard
input, one answer a line goes to standard output; what libraries print goes to standard error.

What is moved comes from the payload, random bytes that all contestants have mapped: block i of batch b is
the same for all. A batch that was read is compared with it outside the clock; a wrong byte ends the race.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
BATCHES_MAX = 64
CHUNK_BYTES = 128 << 10
KILLED_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
_CPUCLOCK_SCHED = 2


class WrongBytesError(Exception):
    """A contestant gave back something else than was put, or not all of it."""


def cpu_seconds(pids: Sequence[int]) -> float:
    """What these processes have used so far, all their threads, to the nanosecond."""
    return sum(time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED) for pid in pids)


def batch_count(payload_bytes: int, nbytes: int, n: int) -> int:
    return min(BATCHES_MAX, payload_bytes // (nbytes * n))


def same(got: Bytes, wanted: Bytes, what: str) -> None:
    """Raises `WrongBytesError` and says how much of it is wrong."""
    if got.shape != wanted.shape:
        raise WrongBytesError(f"{what}: {got.shape} instead of {wanted.shape}")
    wrong = int((got != wanted).any(axis=1).sum())
    if wrong:
        raise WrongBytesError(f"{what}: {wrong} of {len(wanted)} blocks are wrong")


class Contestant:
    """One store, or one way to move bytes. A batch is named by whatever `names` made for it.

    `payload` is (batches, n, block bytes), `out` is (n, block bytes), both the same until `open` again.
    """

    ops: tuple[str, ...] = ("put", "get", "exists")
    payload: Bytes
    out: Bytes

    def open(self, payload: Bytes, out: Bytes) -> None:
        self.payload, self.out = payload, out

    def names(self, serial: int) -> Any:
        """Of a batch that was never named before."""
        raise NotImplementedError

    def put(self, names: Any, batch: int) -> None:
        """Store `payload[batch]`. What is not stored is an error."""
        raise NotImplementedError

    def get(self, names: Any) -> None:
        """Fill `out`. What is not found is an error."""
        raise NotImplementedError

    def result(self) -> Bytes:
        """What the last `get` brought; not timed."""
        return self.out

    def exists(self, names: Any) -> int:
        raise NotImplementedError

    def remove(self, names: Any) -> None:
        """Make room; not timed."""
        raise NotImplementedError

    def forget_copies(self, names: Any) -> None:
        """Before a timed read: what an earlier one left nearer than the source; not timed."""

    def wake(self) -> None:
        """Its turn begins."""

    def rest(self) -> None:
        """Its turn ends: helpers that would poll all the time may not."""

    def audit(self) -> None:
        """After each turn: did it go the way that it is said to go? Raises `RuntimeError`."""

    def pids(self) -> list[int]:
        """Further processes that work for it and were started here."""
        return []

    def close(self) -> None:
        pass


# ---- limits ------------------------------------------------------------------------------------------


class Memcpy(Contestant):
    """numpy, one call a batch, into and out of random slots of a table."""

    ops = ("put", "get")

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)

    def open(self, payload: Bytes, out: Bytes) -> None:
        super().open(payload, out)
        batches, n, nbytes = payload.shape
        slots = 2 * batches * n  # what is resident, and what a turn puts
        self._table = np.zeros((slots, nbytes), dtype=np.uint8)
        self._free = self._random.permutation(slots)

    def names(self, serial: int) -> Any:
        # Slots in turns, so that a put meets the ones used longest ago, as a store's would.
        n = len(self.out)
        rows, self._free = self._free[:n], self._free[n:]
        return rows

    def put(self, names: Any, batch: int) -> None:
        self._table[names] = self.payload[batch]

    def get(self, names: Any) -> None:
        np.take(self._table, names, axis=0, out=self.out, mode="clip")

    def remove(self, names: Any) -> None:
        self._free = np.concatenate([self._free, names])


STREAM_SENDER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
chunk = memoryview(bytes(int(sys.argv[1])))
while question := peer.recv(8, socket.MSG_WAITALL):
    left = int.from_bytes(question, "big")
    while left:
        left -= peer.send(chunk[: min(left, len(chunk))])
"""


class Streams(Contestant):
    """Plain TCP connections from another process each, `send` to `recv_into`, as iperf3 does it.

    What goes over them is zeros and lands in one small buffer: the most that such connections carry.
    """

    ops = ("pull",)

    def __init__(self, count: int) -> None:
        self._senders = [
            subprocess.Popen(
                [sys.executable, "-c", STREAM_SENDER, str(CHUNK_BYTES)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        self._sockets = []
        for sender in self._senders:
            assert sender.stdout is not None
            address = ("127.0.0.1", int(sender.stdout.readline()))
            self._sockets.append(socket.create_connection(address))

    def names(self, serial: int) -> Any:
        return serial

    def put(self, names: Any, batch: int) -> None:
        pass  # nothing is kept

    def pull(self, names: Any) -> None:
        share = self.out.nbytes // len(self._sockets)
        threads = [
            threading.Thread(target=self._receive, args=(sock, share)) for sock in self._sockets[1:]
        ]
        for thread in threads:
            thread.start()
        self._receive(self._sockets[0], share)
        for thread in threads:
            thread.join()

    def _receive(self, sock: socket.socket, left: int) -> None:
        buffer = bytearray(CHUNK_BYTES)
        sock.sendall(left.to_bytes(8, "big"))
        while left:
            got = sock.recv_into(buffer, min(left, len(buffer)))
            if not got:
                raise WrongBytesError("the stream ended early")
            left -= got

    def remove(self, names: Any) -> None:
        pass

    def pids(self) -> list[int]:
        return [sender.pid for sender in self._senders]

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        for sender in self._senders:
            assert sender.stdout is not None
            sender.stdout.close()
            sender.wait(timeout=10)


# ---- kvpool ------------------------------------------------------------------------------------------


class Kvpool(Contestant):
    """This project, on one node: what an engine does."""

    ops: tuple[str, ...] = ("put", "get", "exists", "match")

    def __init__(self, socket_path: str) -> None:
        from kvpool.client import OperatorClient

        self._client = OperatorClient(socket_path, connect=True)

    def open(self, payload: Bytes, out: Bytes) -> None:
        from kvpool.types import NamespaceRecord

        super().open(payload, out)
        _, n, nbytes = payload.shape
        name = f"{type(self).__name__}-{nbytes}-{n}"
        self._record = NamespaceRecord.simple(name, block_bytes=nbytes, block_tokens=16)
        self._ns = self._client.open(self._record)

    def names(self, serial: int) -> Any:
        return random_keys(serial, len(self.out))

    def put(self, names: Any, batch: int) -> None:
        stored = self._client.put(self._ns, names, self.payload[batch])
        if stored != len(self.out):
            raise WrongBytesError(f"put stored {stored} blocks of {len(self.out)}")

    def get(self, names: Any) -> None:
        found = self._client.get_into(self._ns, names, self.out)
        if not found.all():
            raise WrongBytesError(f"get found {found.sum()} blocks of {len(found)}")

    def exists(self, names: Any) -> int:
        return int(self._client.contains(self._ns, names).sum())

    def match(self, names: Any) -> int:
        return self._client.match(self._ns, names)

    def remove(self, names: Any) -> None:
        self._client.remove(self._ns, names)

    def close(self) -> None:
        self._client.close()


class KvpoolRemote(Kvpool):
    """This project, from another node: put there, acquired, copied out and released here."""

    ops: tuple[str, ...] = ("get", "pull")

    def __init__(self, socket_path: str, owner: str, over_nixl: bool = False) -> None:
        from kvpool.client import OperatorClient

        super().__init__(socket_path)
        self._owner = OperatorClient(owner, connect=True)
        self._over_nixl = over_nixl
        self._moved = 0  # blocks

    def open(self, payload: Bytes, out: Bytes) -> None:
        super().open(payload, out)
        self._there = self._owner.open(self._record)

    def put(self, names: Any, batch: int) -> None:
        stored = self._owner.put(self._there, names, self.payload[batch])
        if stored != len(self.out):
            raise WrongBytesError(f"put stored {stored} blocks of {len(self.out)}")
        # The directory is told of them in the background.
        self._wait(lambda: len(self._client.locate(names)) == len(self.out))

    def get(self, names: Any) -> None:
        lease = self._client.acquire(self._ns, names, wait_s=30.0)
        if lease is None or lease.blocks != len(self.out):
            raise WrongBytesError(f"acquired {lease and lease.blocks} of {len(self.out)} blocks")
        with lease:
            slots = lease.slots[0]
            np.take(slots.table, slots.rows, axis=0, out=self.out, mode="clip")
            lease.check()

    def pull(self, names: Any) -> None:
        pulled = self._client.pull(self._ns, names, wait_s=30.0)
        if pulled != len(self.out):
            raise WrongBytesError(f"pulled {pulled} blocks of {len(self.out)}")

    def forget_copies(self, names: Any) -> None:
        self._moved += len(self.out)  # what comes next is read from afar
        self._client.remove(self._ns, names)
        self._wait(self._told)

    def _told(self) -> bool:
        directory = self._client.stats().cluster.directory
        return directory is not None and not directory.queued

    def _wait(self, known: Callable[[], bool]) -> None:
        """Until the directory knows."""
        deadline = time.monotonic() + 30
        while not known():
            if time.monotonic() > deadline:
                raise RuntimeError("the directory was not told within 30 s")
            time.sleep(0.002)

    def audit(self) -> None:
        if not self._over_nixl:
            return
        nixl = self._client.stats().nixl
        if nixl is None or nixl.failed_over or nixl.rested or nixl.blocks < self._moved:
            raise RuntimeError(f"not all went over NIXL: {nixl}")

    def remove(self, names: Any) -> None:
        self._client.remove(self._ns, names)
        self._owner.remove(self._there, names)

    def close(self) -> None:
        super().close()
        self._owner.close()


# ---- peers -------------------------------------------------------------------------------------------


class Mooncake(Contestant):
    """Mooncake Store: its zero-copy batch calls on registered memory.

    This process has no segment, so blocks are in another one's, and each read and write crosses its TCP
    transport: what two engines of one host, or of two, do.
    """

    def __init__(self, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        if code:
            raise RuntimeError(f"setup: {code}")
        self._registered: list[int] = []

    def open(self, payload: Bytes, out: Bytes) -> None:
        super().open(payload, out)
        for address in self._registered:
            self._store.unregister_buffer(address)
        self._registered = []
        for memory in (payload, out):
            if code := self._store.register_buffer(memory.ctypes.data, memory.nbytes):
                raise RuntimeError(f"register_buffer: {code}")
            self._registered.append(memory.ctypes.data)
        _, n, nbytes = payload.shape
        self._sizes = [nbytes] * n
        self._sources = [[row.ctypes.data for row in batch] for batch in payload]
        self._targets = [row.ctypes.data for row in out]

    def names(self, serial: int) -> Any:
        n, nbytes = self.out.shape
        return [f"{nbytes}-{n}-{serial}-{i}" for i in range(n)]

    def put(self, names: Any, batch: int) -> None:
        codes = self._store.batch_put_from(names, self._sources[batch], self._sizes)
        if any(codes):
            raise WrongBytesError(f"put: {codes}")

    def get(self, names: Any) -> None:
        codes = self._store.batch_get_into(names, self._targets, self._sizes)
        if codes != self._sizes:
            raise WrongBytesError(f"get: {codes}")

    def exists(self, names: Any) -> int:
        return int(self._store.batch_is_exist(names).count(1))

    def remove(self, names: Any) -> None:
        codes = self._store.batch_remove(names, True)
        if any(codes):
            raise RuntimeError(f"remove: {codes}")

    def close(self) -> None:
        self._store.close()


class Redis(Contestant):
    """Redis through redis-py with hiredis: one pipeline of SETs or GETs a batch, one EXISTS of all keys.

    A read ends when the values are there as bytes objects; they are not copied any further.
    """

    def __init__(self, url: str) -> None:
        import redis

        self._redis = redis.Redis.from_url(url)
        self._redis.ping()
        self._values: list[bytes] = []

    def names(self, serial: int) -> Any:
        keys = random_keys(serial, len(self.out))
        return [keys[at : at + 16] for at in range(0, len(keys), 16)]

    def put(self, names: Any, batch: int) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for key, value in zip(names, self.payload[batch], strict=True):
            pipe.set(key, value.data)
        if not all(pipe.execute()):
            raise WrongBytesError("put: a SET failed")

    def get(self, names: Any) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for key in names:
            pipe.get(key)
        self._values = pipe.execute()

    def result(self) -> Bytes:
        missing = sum(value is None for value in self._values)
        if missing:
            raise WrongBytesError(f"get: {missing} of {len(self._values)} values are missing")
        return np.frombuffer(b"".join(self._values), dtype=np.uint8).reshape(self.out.shape)

    def exists(self, names: Any) -> int:
        return int(self._redis.exists(*names))

    def remove(self, names: Any) -> None:
        self._redis.unlink(*names)

    def close(self) -> None:
        self._redis.close()


class Nixl(Contestant):
    """NIXL itself, one-sided, with prepared descriptor lists and without its progress threads.

    The owner of the memory polls, which its lanes over TCP need; it is stopped while it has no turn.
    """

    ops = ("put", "get", "pull")

    def __init__(self) -> None:
        self._agent = nixl_agent_named("reader")
        self._owner: subprocess.Popen[str] | None = None
        self._registered: list[Any] = []

    def open(self, payload: Bytes, out: Bytes) -> None:
        super().open(payload, out)
        self._end_owner()
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered = [
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
            for memory in (payload, out)
        ]
        batches, n, nbytes = payload.shape
        slots = 2 * batches * n  # what is resident, and what a turn puts
        self._free = np.random.default_rng(5).permutation(slots).astype(np.int32)
        self._owner = subprocess.Popen(
            # A stopped process would outlive us.
            [*KILLED_WITH_PARENT, sys.executable, __file__, "nixl-owner", str(slots * nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._owner.stdout is not None
        told = json.loads(self._owner.stdout.readline())
        name = self._agent.add_remote_agent(bytes.fromhex(told["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name

        def prepared(agent: str, start: int, count: int) -> Any:
            listed = [(start + i * nbytes, nbytes, 0) for i in range(count)]
            return self._agent.prep_xfer_dlist(agent, listed, "DRAM")

        self._here = prepared("NIXL_INIT_AGENT", out.ctypes.data, n)
        self._sources = prepared("NIXL_INIT_AGENT", payload.ctypes.data, batches * n)
        self._there = prepared(self._peer, told["address"], slots)
        self._all = np.arange(n, dtype=np.int32)
        self.rest()

    def names(self, serial: int) -> Any:
        n = len(self.out)
        slots, self._free = self._free[:n], self._free[n:]
        return slots

    def _move(self, operation: str, local: Any, rows: Any, slots: Any) -> None:
        agent = self._agent
        handle = agent.make_prepped_xfer(operation, local, rows, self._there, slots)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise WrongBytesError(f"{operation} ended as {state}")

    def put(self, names: Any, batch: int) -> None:
        self._move("WRITE", self._sources, batch * len(self.out) + self._all, names)

    def get(self, names: Any) -> None:
        self._move("READ", self._here, self._all, names)

    pull = get

    def remove(self, names: Any) -> None:
        self._free = np.concatenate([self._free, names])

    def rest(self) -> None:
        if self._owner is not None:
            self._owner.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        if self._owner is not None:
            self._owner.send_signal(signal.SIGCONT)

    def pids(self) -> list[int]:
        return [self._owner.pid] if self._owner is not None else []

    def _end_owner(self) -> None:
        if self._owner is None:
            return
        for prepared in (self._here, self._sources, self._there):
            self._agent.release_dlist_handle(prepared)
        self._agent.remove_remote_agent(self._peer)
        assert self._owner.stdin is not None
        self.wake()
        self._owner.stdin.close()
        self._owner.wait(timeout=10)
        self._owner = None

    def close(self) -> None:
        self._end_owner()


def nixl_agent_named(name: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def own_nixl_memory(nbytes: int) -> None:
    """The other end: memory, and a loop that drives UCX until standard input ends."""
    answers = take_stdout()
    agent = nixl_agent_named("owner")
    memory = np.zeros(nbytes, dtype=np.uint8)
    agent.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    told = {"address": memory.ctypes.data, "metadata": agent.get_agent_metadata().hex()}
    print(json.dumps(told), file=answers, flush=True)
    reading = threading.Thread(target=sys.stdin.read, daemon=True)
    reading.start()
    while reading.is_alive():
        agent.get_new_notifs()


# ---- the race ----------------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., Contestant]] = {
    "kvpool": Kvpool,
    "kvpool-remote": KvpoolRemote,
    "memcpy": Memcpy,
    "mooncake": Mooncake,
    "nixl": Nixl,
    "redis": Redis,
    "streams": Streams,
}


def random_keys(serial: int, n: int) -> bytes:
    """n keys of 16 bytes, spread like hashes."""
    return np.random.default_rng([serial, n]).bytes(16 * n)


class Racer:
    """Keeps a contestant's resident batches, times it and looks at what it gives back."""

    def __init__(self, contestant: Contestant, payload: Bytes) -> None:
        self.contestant = contestant
        self._payload = payload
        self._serial = 0
        self._resident: list[Any] = []
        self._random = random.Random(7)

    def open(self, nbytes: int, n: int) -> None:
        """Drop what there is, put as many batches of this shape as the payload has, look at all of them."""
        for names in self._resident:
            self.contestant.remove(names)
        batches = batch_count(len(self._payload), nbytes, n)
        payload = self._payload[: batches * n * nbytes].reshape(batches, n, nbytes)
        self.contestant.open(payload, np.empty((n, nbytes), dtype=np.uint8))
        self._resident = []
        with turn(self.contestant):
            for batch in range(batches):
                self._resident.append(self._fresh())
                self.contestant.put(self._resident[-1], batch)
        self.verify(len(self._resident))

    def verify(self, batches: int) -> int:
        """Read so many of the resident batches and compare every byte; how many bytes that were."""
        chosen = self._random.sample(range(len(self._resident)), min(batches, len(self._resident)))
        return sum(self._look(self._resident[batch], batch) for batch in chosen)

    def _look(self, names: Any, batch: int) -> int:
        if "get" not in self.contestant.ops:
            return 0
        self.contestant.out[:] = 0
        with turn(self.contestant):
            self.contestant.get(names)
        same(self.contestant.result(), self.contestant.payload[batch], f"batch {batch}")
        return self.contestant.out.nbytes

    def burst(self, op: str, count: int, pids: Sequence[int]) -> dict[str, Any]:
        """Some batches one after the other: the seconds of each, and CPU seconds of all processes.

        The CPU's clock runs over the whole burst, so that what a contestant does after it has
        answered counts too, but for the last time.
        """
        contestant = self.contestant
        count = min(count, len(self._resident))
        batches = self._random.sample(range(len(self._resident)), count)
        if op == "put":
            names = [self._fresh() for _ in batches]
        else:
            names = [self._resident[batch] for batch in batches]
        if op in {"get", "pull"}:
            for each in names:
                contestant.forget_copies(each)
            contestant.out[:] = 0
        work = getattr(contestant, op)
        arguments = list(zip(names, batches, strict=True)) if op == "put" else [(x,) for x in names]
        everyone = [os.getpid(), *contestant.pids(), *pids]
        seconds, answers = [], []
        with turn(contestant):
            used = cpu_seconds(everyone)
            for each in arguments:
                start = time.perf_counter()
                answers.append(work(*each))
                seconds.append(time.perf_counter() - start)
            used = cpu_seconds(everyone) - used
        contestant.audit()
        if op == "get":
            same(contestant.result(), contestant.payload[batches[-1]], op)
        elif op == "pull":
            self._look(names[-1], batches[-1])
        elif op == "put":
            self._look(names[-1], batches[-1])
            for each in names:
                contestant.remove(each)
        elif any(answer != len(contestant.out) for answer in answers):
            raise WrongBytesError(f"{op}: {answers} instead of {len(contestant.out)}")
        return {"seconds": seconds, "cpu_s": used}

    def _fresh(self) -> Any:
        self._serial += 1
        return self.contestant.names(self._serial)


@contextmanager
def turn(contestant: Contestant) -> Iterator[None]:
    contestant.wake()
    try:
        yield
    finally:
        contestant.rest()


def take_stdout() -> Any:
    """Standard output, for us alone: what libraries print there goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    make: Callable[..., Contestant], payload_fd: int, payload_bytes: int, options: dict[str, Any]
) -> None:
    answers = take_stdout()
    payload = np.memmap(
        Path(f"/proc/self/fd/{payload_fd}"), dtype=np.uint8, mode="r+", shape=(payload_bytes,)
    ).view(np.ndarray)
    racer = None
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = None
        try:
            if racer is None:
                racer = Racer(make(**options), payload)
            if command == "ops":
                answer = racer.contestant.ops
            elif command == "open":
                racer.open(*arguments)
            elif command == "burst":
                answer = racer.burst(*arguments)
            elif command == "verify":
                answer = racer.verify(*arguments)
        except Exception as error:  # noqa: BLE001 the other end of the pipe decides what it means
            print(
                json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True
            )
            continue
        print(json.dumps({"answer": answer}), file=answers, flush=True)
    if racer is not None:
        racer.contestant.close()


if __name__ == "__main__":
    if sys.argv[1] == "nixl-owner":
        own_nixl_memory(int(sys.argv[2]))
    else:
        serve(KINDS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
