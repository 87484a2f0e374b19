"""NIXL in this process: one agent, owned by one thread, which sleeps while there is nothing to move.

NIXL's agent is not made for several threads, and its own progress thread busy-waits. So everything is
done by one thread here: it runs other threads' requests, and while a read is under way, or peers read from
here, it drives UCX. (A peer's read needs that on lanes without RDMA, and when it connects.)

Threads: all methods may be called from any thread.
"""

from __future__ import annotations

import importlib
import os
import queue
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError, KvpoolError, ProtocolError, Unavailable
from kvpool.extras import install
from kvpool.transfer.base import Deadline
from kvpool.transfer.memory import Memory

T = TypeVar("T")

MODULE = "nixl_cu12"
METADATA_BYTES_MAX = 64 << 10  # of a peer; one segment takes 300 bytes, each further one 50
PEERS_MAX = 256  # remembered; the oldest is forgotten, and added again when needed
SCRATCH_BYTES = 4096
START_S = 30.0
TRIAL_S = 3.0  # for the first byte of a peer
SPIN_S = 0.005  # after activity the next is likely soon
PAUSE_S_MAX = 0.001
PAUSE_SHARE = 0.001  # of the idle time

# Set unless the operator has: an operator's own UCX_* take precedence.
UCX_SETTINGS = {
    # A crash is for the process and its parent to handle; UCX would print and could hang.
    "UCX_ERROR_SIGNALS": "",
    # Reads over TCP use pieces of this size: 3.7 GB/s, against 1.1 with the default of 8 KiB.
    "UCX_TCP_TX_SEG_SIZE": "1m",
    "UCX_TCP_RX_SEG_SIZE": "1m",
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # such as these two, without that lane
    # Not to stdout, which is the daemon's own.
    "UCX_LOG_FILE": "stderr",
    "NIXL_LOG_LEVEL": "WARN",
}
# UCX's TCP lane checks no key: anyone who reaches its port can read and write this process's memory. So
# it listens on loopback alone, and is left out if peers are on other machines.
ON_LOOPBACK = {"UCX_NET_DEVICES": "lo"}
OFF_LOOPBACK = {"UCX_TLS": "^tcp"}

Pieces = npt.NDArray[np.uint64]  # [pieces, 3]: address, bytes, 0


@dataclass(eq=False, repr=False, slots=True)
class Read:
    """One read under way."""

    number: int
    peer: str
    local: Pieces
    remote: Pieces
    ended: Callable[[Read], None]
    """Called once, in the agent's thread, when it is over."""
    handle: Any = None
    error: str = ""  # the reason; empty: the bytes are here
    started: bool = False
    """Whether it may have written anything: then an error is no proof that it does not still write."""


class _Call(Generic[T]):
    """A request to the agent's thread, and its answer."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._answer: queue.SimpleQueue[tuple[T] | KvpoolError] = queue.SimpleQueue()

    def run(self, failures: tuple[type[Exception], ...]) -> None:
        try:
            self._answer.put((self._work(),))
        except KvpoolError as error:
            self._answer.put(error)
        except failures as error:
            self._answer.put(Unavailable(f"NIXL: {error}"))

    def wait(self, seconds: float) -> T:
        try:
            answer = self._answer.get(timeout=seconds)
        except queue.Empty:
            raise Unavailable(f"NIXL did not answer within {seconds:g} s") from None
        if isinstance(answer, KvpoolError):
            raise answer
        return answer[0]


class Agent:
    """See the module. Nothing is loaded before `start`."""

    def __init__(self, node: str, memory: Memory) -> None:
        # Another name in each life: a peer must not mistake the memory of one for that of the next.
        self.name = f"{node}/{secrets.token_hex(8)}"
        self._memory = memory
        self._changed = threading.Condition()
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._unusable = ""  # why there is no agent, if there is none
        self._jobs: deque[Callable[[], None]] = deque()
        self._served = 0  # peers that may be reading from here
        self._closing = False
        self._bases: dict[int, int] = {}
        self._known: OrderedDict[str, int] = OrderedDict()
        self._scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        # Used by the agent's thread only:
        self._nixl: Any = None
        self._failures: tuple[type[Exception], ...] = ()
        self._reads: list[Read] = []
        self._last = 0.0

    @property
    def version(self) -> int:
        """Grows with every segment that peers may read."""
        return len(self._bases)

    def start(self, *, loopback: bool) -> None:
        """Load NIXL, once. loopback: whether all peers are on this machine.

        Raises `ConfigError` if NIXL is missing, or finds no usable device.
        """
        with self._starting:
            if self._unusable:
                raise ConfigError(self._unusable)
            if self._thread is not None:
                return
            lanes = ON_LOOPBACK if loopback else OFF_LOOPBACK
            for name, value in (UCX_SETTINGS | lanes).items():
                os.environ.setdefault(name, value)
            make = _Call(self._make)
            self._do(lambda: make.run(self._failures))
            self._thread = threading.Thread(target=self._run, name="kvpool-nixl", daemon=True)
            self._thread.start()
            try:
                make.wait(START_S)
            except KvpoolError as error:
                self._unusable = (
                    str(error)
                    if isinstance(error, ConfigError)
                    else f"NIXL cannot be used here ({error}): off loopback it needs an RDMA device, which "
                    f"`kvpool doctor` looks for; or leave nixl:// out of listen"
                )
                self.close()
                raise ConfigError(self._unusable) from None

    def _make(self) -> None:
        try:
            api = importlib.import_module(f"{MODULE}._api")
            bindings = importlib.import_module(f"{MODULE}._bindings")
        except ImportError as error:
            raise ConfigError(
                f"nixl:// needs NIXL, which is not installed ({error}): {install('nixl')}"
            ) from None
        # They have no base of their own.
        self._failures = tuple(
            kind
            for name, kind in vars(bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        )
        try:
            self._nixl = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False))
            self._nixl.register_memory(
                [(self._scratch.ctypes.data, self._scratch.size, 0, "")], "DRAM"
            )
        except self._failures as error:
            raise Unavailable(str(error)) from None

    def place(self, segment: int, deadline: Deadline) -> int:
        """The address of a segment, which NIXL may read and write from now on."""
        base = self._bases.get(segment)
        if base is None:
            base = self._ask(lambda: self._register(segment), deadline)
        return base

    def _register(self, segment: int) -> int:
        if segment not in self._bases:
            table = self._memory.table(segment, 1)
            base = int(table.ctypes.data)
            try:
                self._nixl.register_memory([(base, table.size, 0, "")], "DRAM")
            except self._failures as error:
                raise Unavailable(
                    f"{table.size} bytes of memory cannot be registered for RDMA ({error}): "
                    f"raise the limit of locked memory (LimitMEMLOCK=infinity, ulimit -l unlimited)"
                ) from None
            self._bases[segment] = base
        return self._bases[segment]

    def describe(self, deadline: Deadline) -> bytes:
        """The metadata that a peer needs to read from here. Not for unauthenticated peers."""
        return self._ask(lambda: bytes(self._nixl.get_agent_metadata()), deadline)

    def knows(self, peer: str, version: int) -> bool:
        return self._known.get(peer, -1) >= version

    def meet(
        self, peer: str, version: int, metadata: bytes, address: int, deadline: Deadline
    ) -> None:
        """A peer has sent its description; a byte at this address can be read.

        One byte of a new peer is read into scratch memory: a missing path is then found
        before any real row may be written to. Raises `Unavailable` if there is none, and
        `ProtocolError` for an invalid description.
        """
        if len(metadata) > METADATA_BYTES_MAX:
            raise ProtocolError(
                f"a peer's memory description has {len(metadata)} bytes; the limit is {METADATA_BYTES_MAX}"
            )
        self._ask(lambda: self._meet(peer, metadata), deadline)
        if not self.knows(peer, 0):
            self._try_out(peer, address, deadline.sooner(TRIAL_S))
        self._ask(lambda: self._remember(peer, version), deadline)

    def _try_out(self, peer: str, address: int, deadline: Deadline) -> None:
        ended: queue.SimpleQueue[Read] = queue.SimpleQueue()
        local, remote = (
            np.array([[at, 1, 0]], dtype=np.uint64) for at in (self._scratch.ctypes.data, address)
        )
        read = Read(0, peer, local, remote, ended.put)
        self.read(read)
        try:
            error = ended.get(timeout=deadline.left()).error
        except queue.Empty:
            error = f"NIXL finds no way to {peer}: are both on the same RDMA network?"
        if error:
            self._do(lambda: self._give_up(read))
            raise Unavailable(error)

    def _give_up(self, read: Read) -> None:
        """It may still write: only for reads into scratch memory."""
        if read in self._reads:
            self._reads.remove(read)
            try:
                self._nixl.release_xfer_handle(read.handle)
            except self._failures:
                pass  # it goes with its peer
        self._forget_later(read.peer)

    def _meet(self, peer: str, metadata: bytes) -> None:
        try:
            name = self._nixl.add_remote_agent(metadata)
        except self._failures as error:
            raise ProtocolError(f"a peer's memory description is invalid: {error}") from None
        if name not in {peer, peer.encode()}:
            raise ProtocolError(f"peer {peer!r} sent the memory description of {name!r}")

    def _remember(self, peer: str, version: int) -> None:
        self._known[peer] = version
        busy = Counter(read.peer for read in self._reads)
        for other in list(self._known):
            if len(self._known) <= PEERS_MAX:
                break
            if not busy[other] and other != peer:
                self._forget(other)

    def _forget(self, peer: str) -> None:
        self._known.pop(peer, None)
        try:
            self._nixl.remove_remote_agent(peer)
        except self._failures:
            pass  # it is unknown already, as wanted

    def read(self, read: Read) -> None:
        """Start it. Afterwards its memory is NIXL's until it has ended."""
        self._do(lambda: self._begin(read))

    def _begin(self, read: Read) -> None:
        nixl = self._nixl
        try:
            local = nixl.get_xfer_descs(read.local, "DRAM")
            remote = nixl.get_xfer_descs(read.remote, "DRAM")
            read.handle = nixl.initialize_xfer("READ", local, remote, read.peer)
        except self._failures as error:
            self._forget_later(read.peer)
            read.error = f"NIXL cannot read from {read.peer}: {error}"
            read.ended(read)
            return
        self._reads.append(read)
        read.started = True
        try:
            state = nixl.transfer(read.handle)
        except self._failures as error:
            self._finish(read, str(error))
            return
        self._look(read, state)  # some lanes copy at once: others may begin to verify

    def _forget_later(self, peer: str) -> None:
        """It must send its description again; NIXL keeps it while it reads from it."""
        self._known.pop(peer, None)
        if all(read.peer != peer for read in self._reads):
            self._forget(peer)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A peer may read from here meanwhile."""
        with self._changed:
            self._served += 1
            self._last = time.monotonic()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._served -= 1

    def close(self) -> None:
        """Wait for the thread, which ends when no read is under way. Idempotent."""
        with self._starting:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()

    # ---- the thread ----------------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        with self._changed:
            if self._closing:
                raise Unavailable("NIXL is closing on this node")
            self._jobs.append(job)
            self._changed.notify_all()

    def _ask(self, work: Callable[[], T], deadline: Deadline) -> T:
        call = _Call(work)
        self._do(lambda: call.run(self._failures))
        return call.wait(deadline.left())

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._reads or self._served or self._closing):
                    self._changed.wait()
                if self._closing and not self._jobs and not self._reads:
                    break
                jobs, self._jobs = self._jobs, deque()
            for job in jobs:
                job()
                self._last = time.monotonic()
            self._drive()
        self._nixl = None  # closes it

    def _drive(self) -> None:
        """Have UCX move bytes, and wait a little if nothing has happened for a while."""
        if self._nixl is None:
            return
        self._nixl.get_new_notifs()
        for read in list(self._reads):
            try:
                state = self._nixl.check_xfer_state(read.handle)
            except self._failures as error:
                self._finish(read, str(error))
                continue
            self._look(read, state)
        idle = time.monotonic() - self._last
        time.sleep(0 if idle < SPIN_S else min(idle * PAUSE_SHARE, PAUSE_S_MAX))

    def _look(self, read: Read, state: str) -> None:
        if state != "PROC":
            self._finish(read, "" if state == "DONE" else f"NIXL says {state}")

    def _finish(self, read: Read, error: str) -> None:
        self._reads.remove(read)
        self._last = time.monotonic()
        read.error = f"reading from {read.peer} failed: {error}" if error else ""
        if not error:
            self._nixl.release_xfer_handle(read.handle)
        read.ended(read)
