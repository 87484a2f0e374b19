"""The transport port: pull blocks from a peer's segment into local rows, and serve the reverse.

Ownership, for every transport:

- Rows to be written are reserved by the caller of `pull` and belong to the transport until `pull`
  returns. After that nothing writes to them, whatever happened: no late packet, no other thread. This
  allows the rules to reuse the rows.
- Slots to be read are on loan from the `Source`. The transport gives every token back exactly once, when
  nothing reads the slots any more on behalf of that token: the bytes have been taken, or the connection
  is dead.
- Segments are mapped in `Memory` and outlive the transport.

Threads: all methods may be called from any thread, several at a time; they block. `Source` is called
from the transport's own threads.

Time: every wait ends at the deadline of its request, or at a limit below. A peer that is
gone, slow, hostile or wrong makes a pull end early with `Pulled.error` set and status LATE for blocks that did
not arrive; it never makes one raise or hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvpool.errors import (
    ConfigError,
    Declined,
    InternalError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    Unavailable,
)
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.security.credentials import Credentials
from kvpool.security.failed_logins import Failures
from kvpool.transfer.memory import Memory
from kvpool.types import CHECKSUM_BYTES, KEY_BYTES, BlockStatus
from kvpool.wire.frame import KEYS_MAX, Bytes, Done
from kvpool.wire.peer import GROUP_BLOCKS_MAX, GROUP_BYTES, Corrupt, LongQuestion, Question
from kvpool.wire.worker import AskPeer, Loan, OpenLoan, PartRows, PullBlocks, Pulled

# Of a valid order: a peer's answers alone.
REFUSALS = (InternalError, InvalidRequest, LimitExceeded)

DEADLINE_S_MAX = 600.0  # no transfer is worth waiting longer for


@dataclass(frozen=True, slots=True)
class Identity:
    """This daemon's identity for its peers. Daemons of one cluster agree on `cluster`, and share a secret.

    secrets: shared by all daemons of the cluster and known to nobody else; at least 128 random bits each,
        because anyone who talks to a daemon gets material to test guesses on. None: no peers.
    tls: its certificates; None: no TLS. plaintext: it may listen to other machines without TLS.
    """

    cluster: str
    node: str
    incarnation: str
    secrets: ClusterSecrets = field(default_factory=ClusterSecrets.of, repr=False)
    tls: Credentials | None = field(default=None, repr=False)
    plaintext: bool = False


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Resource limits of a transport.

    connections_max: connections of authenticated peers at a time, inbound.
    inflight_bytes_max: bytes on loan to peers at a time.
    fetch_bytes_max: bytes requested of a peer at a time; a longer pull becomes several. Both sides
        of a connection enforce it, so daemons of one cluster run with the same value.
    hello_s: how long an inbound connection may take to authenticate.
    leave_s: how long a new connection waits for one that was ended in its favour.
    connect_s: how long to try to reach a peer.
    idle_s: how long an unused connection is kept.
    """

    connections_max: int = 256
    inflight_bytes_max: int = 1 << 30
    fetch_bytes_max: int = 64 << 20
    hello_s: float = 5.0
    leave_s: float = 1.0
    connect_s: float = 5.0
    idle_s: float = 60.0


class Owed(Protocol):
    """A pending answer. One thread; its owner closes it."""

    def fileno(self) -> int:
        """A descriptor that is readable once the answer is there."""
        ...

    def result(self) -> Bytes:
        """The answer, once it is there. Raises the answered `KvpoolError`."""
        ...

    def close(self) -> None:
        """Nobody waits for it any more. Never raises."""
        ...


class Source(Protocol):
    """Where a transport gets the slots that peers request: the rules, seen from a transfer worker."""

    def open_loan(self, request: OpenLoan) -> Loan:
        """Lease the wanted blocks that are present until `give_back`.

        Returns within the request's deadline. Raises `KvpoolError` if nothing is on loan.
        """
        ...

    def give_back(self, token: str) -> None:
        """The slots of this token are not read any more. Never raises."""
        ...

    def asked(self, question: Question) -> Done | Bytes:
        """The answer defined by `wire`. An `Offer`'s or a `Discard`'s may take until its deadline.

        Raises `KvpoolError` when there is none.
        """
        ...

    def answer_later(self, question: LongQuestion) -> Owed:
        """The same for a request that may have to wait, until `wait_s` is over. Does not block itself."""
        ...

    def logins_failed(self, failures: Failures) -> None:
        """Peers that could not prove who they are. Never raises."""
        ...

    def request_failed(self, name: str) -> None:
        """A peer's request of this name met an unexpected error. Never raises."""
        ...

    def corrupt(self, report: Corrupt) -> None:
        """A peer got blocks from here that do not match their checksums. Never raises."""
        ...


class Transport(Protocol):
    """One transport of bytes between daemons."""

    def listen(self, url: str) -> str:
        """Serve peers at `url`; returns it with the actual port.

        Raises `ConfigError` if the address is not available, or is open to other machines without a
        cluster secret, or without TLS unless that was waived (`Identity.plaintext`).
        """
        ...

    def pull(self, order: PullBlocks, stop: Stop) -> Pulled:
        """Bring blocks here, verified, or report for each why not. Returns before the deadline.

        When it returns, nothing writes to the order's rows any more. `stop` ends it early.

        Raises `InvalidRequest` for an order that could never work (nothing was touched); a peer's
        faults are in the result.
        """
        ...

    def ask(self, order: AskPeer, stop: Stop) -> Done | Bytes:
        """A peer's answer to a request. Returns, or raises `KvpoolError`, by the deadline."""
        ...

    def close(self) -> None:
        """End all serving and pulling and wait until all threads of the transport have ended. Idempotent."""
        ...


class TransportFactory(Protocol):
    """The constructor of every transport."""

    def __call__(
        self, memory: Memory, source: Source, identity: Identity, limits: TransferLimits
    ) -> Transport: ...


class Deadline:
    """A deadline on the monotonic clock."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = max(0.0, min(seconds, DEADLINE_S_MAX))
        self.at = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left. Raises `Unavailable` when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise Unavailable(f"not finished within its {self.seconds:g} s")
        return left

    def sooner(self, seconds: float) -> Deadline:
        """This one, or `seconds` from now if that is earlier."""
        other = Deadline(seconds)
        return other if other.at < self.at else self


class Stop:
    """Ends one pull from another thread. Thread-safe.

    The pull registers how it can be interrupted (a socket to shut down); `set` runs that at once, or
    when it is registered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closers: list[Callable[[], None]] = []
        self.is_set = False

    def set(self) -> None:
        """Interrupt the pull. Idempotent; the closers must not block."""
        with self._lock:
            self.is_set = True
            closers, self._closers = self._closers, []
        for closer in closers:
            closer()

    def register(self, closer: Callable[[], None]) -> None:
        """Have `closer` called by `set`. Raises `Unavailable` if that has been called before."""
        with self._lock:
            if self.is_set:
                raise Unavailable("the transfer was cancelled")
            self._closers.append(closer)

    def unregister(self, closer: Callable[[], None]) -> None:
        with self._lock:
            if closer in self._closers:
                self._closers.remove(closer)


class Outcome:
    """The state of a pull so far, key by key, and its conversion to a `Pulled`.

    Not thread-safe: the threads of one pull write to different keys, and only one of them finishes it.
    """

    def __init__(self, keys: int) -> None:
        self.status = bytearray([BlockStatus.LATE]) * keys
        self.checksums = bytearray(CHECKSUM_BYTES * keys)
        self._started = time.monotonic()

    def begin(self, first: int, present: bytes) -> None:
        """An owner reported which of the blocks from `first` on it has; none of them is here yet.

        Also after an attempt that failed half-way: its blocks are about to be written again.
        """
        end = first + len(present)
        # Absent is 0 in both.
        self.status[first:end] = present.replace(b"\x01", bytes([BlockStatus.LATE]))
        self.checksums[first * CHECKSUM_BYTES : end * CHECKSUM_BYTES] = bytes(
            CHECKSUM_BYTES * len(present)
        )

    def arrived(self, first: int, checksums: bytes) -> None:
        """Blocks from `first` on, one for each of the checksums, are here and have been verified."""
        count = len(checksums) // CHECKSUM_BYTES
        at = first * CHECKSUM_BYTES
        self.checksums[at : at + len(checksums)] = checksums
        self.status[first : first + count] = bytes([BlockStatus.PRESENT]) * count

    def finish(
        self,
        error: KvpoolError | None = None,
        refusals: tuple[type[KvpoolError], ...] = (*REFUSALS, Declined),
    ) -> Pulled:
        """refusals: errors that are the peer's own answer, and do not discredit the path."""
        return Pulled(
            bytes(self.status),
            bytes(self.checksums),
            time.monotonic() - self._started,
            "" if error is None else str(error),
            isinstance(error, refusals),
        )


def check_secrets(us: Identity, url: str) -> None:
    """Raises `ConfigError` for a daemon without a secret: it has no peers, so it cannot listen for them."""
    if not us.secrets.current():
        raise ConfigError(
            f"listening on {url} needs a cluster secret: set cluster_secret_file, or KVPOOL_CLUSTER_SECRET"
        )


def check_order(order: PullBlocks, memory: Memory) -> int:
    """The number of blocks of a valid order; else raises `InvalidRequest`."""
    total = 0
    for part in order.parts:
        count, rest = divmod(len(part.keys), KEY_BYTES)
        total += count
        if rest or total > KEYS_MAX:
            raise InvalidRequest(
                f"{len(part.keys)} bytes of keys: must be {KEY_BYTES} bytes each, at most {KEYS_MAX} keys"
            )
        if len(part.rows) != 4 * count:
            raise InvalidRequest(f"{count} keys but {len(part.rows) // 4} rows")
        memory.check(order.segment, part.stride, part.nbytes, part.rows)
    return total


class Run(NamedTuple):
    """Blocks `first` to `end` of one part of an order. at: the place of the first one in the order's `Outcome`."""

    part: PartRows
    first: int
    end: int
    at: int

    @property
    def keys(self) -> bytes:
        return self.part.keys[self.first * KEY_BYTES : self.end * KEY_BYTES]

    @property
    def rows(self) -> bytes:
        return self.part.rows[4 * self.first : 4 * self.end]


def cut(order: PullBlocks, most: int, slices: int = 1) -> Iterator[list[Run]]:
    """All blocks of an order, in order, as requests to its owner.

    Each has at most `most` bytes, or is one block. There are no more than `slices`, of about the same size, unless
    `most` forces it.
    """
    even = -(-order.nbytes // slices)
    runs: list[Run] = []
    taken = at = 0
    for part in order.parts:
        count, first = len(part.rows) // 4, 0
        while first < count:
            # The last one may go beyond the even share, or the rest would be one more request.
            fit = min(-(-(even - taken) // part.nbytes), (most - taken) // part.nbytes)
            if fit <= 0 and runs:
                yield runs
                runs, taken = [], 0
                continue
            end = min(count, first + max(1, fit))
            runs.append(Run(part, first, end, at))
            taken += (end - first) * part.nbytes
            at += end - first
            first = end
    if runs:
        yield runs


def groups_of(nbytes: int, count: int) -> Iterator[tuple[int, int]]:
    """The groups in which this many blocks of one part are sent and received: (first, end) of each.

    They are hashed a group at a time: small enough to be still in cache, large enough that calls and wake-ups do not
    matter.
    """
    step = max(1, min(GROUP_BLOCKS_MAX, GROUP_BYTES // nbytes))
    for low in range(0, count, step):
        yield low, min(low + step, count)


def arrived_bytes(order: PullBlocks, pulled: Pulled) -> int:
    """Of the blocks that have arrived."""
    total = at = 0
    for part in order.parts:
        count = len(part.rows) // 4
        total += pulled.status.count(BlockStatus.PRESENT, at, at + count) * part.nbytes
        at += count
    return total


class LoanRows(NamedTuple):
    """The blocks of one part that are on loan."""

    nbytes: int
    stride: int
    rows: bytes


def check_loan(lent: Loan, request: OpenLoan, memory: Memory) -> tuple[bytes, list[LoanRows]]:
    """(present, the rows of the present ones by part) of a valid loan; else raises `InvalidRequest`.

    The rules are this node's own and trusted; this catches a disagreement between processes before it becomes
    another block's bytes on the network.
    """
    counts = [len(part.keys) // KEY_BYTES for part in request.parts]
    if len(lent.rows) != 4 * sum(counts):
        raise InvalidRequest(f"{len(lent.rows) // 4} rows were loaned for {sum(counts)} keys")
    if len(lent.strides) != len(counts):
        raise InvalidRequest(f"{len(lent.strides)} strides were loaned for {len(counts)} parts")
    present: list[bytes] = []
    found: list[LoanRows] = []
    at = 0
    for part, stride, count in zip(request.parts, lent.strides, counts, strict=True):
        here, rows = memory.present_rows(lent.rows[4 * at : 4 * (at + count)])
        at += count
        present.append(here)
        if rows:
            memory.check(lent.segment, stride, part.nbytes, rows)
        found.append(LoanRows(part.nbytes, stride, rows))
    all_present = b"".join(present)
    if len(lent.checksums) != CHECKSUM_BYTES * all_present.count(1):
        raise InvalidRequest(
            f"{len(lent.checksums)} bytes of checksums for {all_present.count(1)} blocks"
        )
    return all_present, found
