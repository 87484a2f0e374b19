"""The pages of one host pool in the pool: misses in place of errors, whose causes are said once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client import NO_ROW, Client, Presence
from kvpool.complaint import Complaint
from kvpool.engine_plugins.sglang.facts import key_of, packed_keys
from kvpool.engine_plugins.sglang.pages import HostPages, Numbers
from kvpool.errors import KvpoolError
from kvpool.types import KEY_BYTES, NO_PARENT, Namespace, NamespaceRecord

logger = logging.getLogger(__name__)

REOPEN_S = 5.0
"""Between two attempts to register a namespace that the daemon refuses."""
CLEAR_S = 3.0
"""How long the cluster may take to empty a namespace."""
KEPT_MAX = 4096
GIB = 1 << 30
Present = npt.NDArray[np.bool_]


class Transfers:
    """Pages and speeds of the latest transfers, for SGLang's metrics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: deque[tuple[int, float]] = deque(maxlen=KEPT_MAX)
        self._wrote: deque[tuple[int, float]] = deque(maxlen=KEPT_MAX)

    def read(self, pages: int, nbytes: int, seconds: float) -> None:
        self._add(self._read, pages, nbytes, seconds)

    def wrote(self, pages: int, nbytes: int, seconds: float) -> None:
        self._add(self._wrote, pages, nbytes, seconds)

    def _add(self, to: deque[tuple[int, float]], pages: int, nbytes: int, seconds: float) -> None:
        if pages:
            with self._lock:
                to.append((pages, pages * nbytes / GIB / max(seconds, 1e-9)))

    def take(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Those since the last call, read and written: pages, and GiB/s."""
        with self._lock:
            taken = list(self._read), list(self._wrote)
            self._read.clear()
            self._wrote.clear()
        return taken


class PageStore:
    """One host pool's pages, in a namespace of their own. Thread-safe; never raises for what the pool does.

    name: of the host pool, in the log. writes: whether this rank stores pages; where another rank stores the same bytes, it reports them as stored.
    request_s: the client's time-out for a request, of the time that a call is given.
    """

    def __init__(
        self,
        client: Client,
        record: NamespaceRecord,
        name: str,
        transfers: Transfers,
        *,
        writes: bool,
        verify: bool,
        request_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nbytes = record.parts[0].nbytes
        self.record = record
        self.transfers = transfers
        self._client = client
        daemon = f"pool {name}: the kvpool daemon at {client.socket_path}"
        self._outage = Complaint(
            logger, f"{daemon} is not used, pages are computed", f"{daemon} is used again"
        )
        self._full = Complaint(logger, f"{daemon} has no space", f"{daemon} has space again")
        self._writes = writes
        self._verify = verify
        self._request_s = request_s
        self._clock = clock
        self._namespace: Namespace | None = None
        self._open_at = -np.inf
        self._opening = threading.Lock()
        self.open()

    def open(self) -> Namespace | None:
        """The namespace; None while the daemon refuses it."""
        if self._namespace is not None:
            return self._namespace
        with self._opening:
            if self._clock() >= self._open_at:
                self._open_at = self._clock() + REOPEN_S
                try:
                    self._namespace = self._client.open(self.record, verify=self._verify)
                except KvpoolError as error:
                    self._outage.failed(type(error).__name__, error)
                else:
                    self._heard()
        return self._namespace

    def present(self, hashes: Sequence[str]) -> Present:
        """For each page, whether it can be read: from this node's memory, its disks or other nodes."""
        namespace = self.open()
        found: Present = np.zeros(len(hashes), np.bool_)
        if namespace is not None and len(hashes):
            try:
                found = self._client.present(namespace, packed_keys(hashes)) > Presence.NOWHERE
            except KvpoolError as error:
                self._outage.failed(type(error).__name__, error)
            else:
                self._heard()
        return found

    def read(
        self, hashes: Sequence[str], pages: HostPages, numbers: Numbers, limit_s: float
    ) -> list[bool]:
        """Copy pages out of the pool into those with these numbers; True for each that is complete.

        The others are undefined. limit_s: returns by then.
        """
        if self._verify:  # by the copies, which nobody writes to
            return self.read_into(hashes, pages.views(numbers), limit_s)
        return self._read(
            hashes, limit_s, lambda ns, keys, wait_s: self._copy(ns, keys, pages, numbers, wait_s)
        )

    def read_into(self, hashes: Sequence[str], into: Sequence[Any], limit_s: float) -> list[bool]:
        """The same into buffers. into: for each page one, or the list of its pieces."""
        return self._read(
            hashes,
            limit_s,
            lambda ns, keys, wait_s: self._client.get_into(ns, keys, list(into), wait_s=wait_s),
        )

    def _read(
        self,
        hashes: Sequence[str],
        limit_s: float,
        copy: Callable[[Namespace, bytes, float], Present],
    ) -> list[bool]:
        namespace = self.open()
        here = [False] * len(hashes)
        if namespace is None or not hashes:
            return here
        begun = self._clock()
        try:
            found = copy(namespace, packed_keys(hashes), max(0.0, limit_s - self._request_s))
        except KvpoolError as error:
            self._outage.failed(type(error).__name__, error)
            return here
        self._heard()
        here = [bool(each) for each in found]
        self.transfers.read(sum(here), self.nbytes, self._clock() - begun)
        return here

    def _copy(
        self, namespace: Namespace, keys: bytes, pages: HostPages, numbers: Numbers, wait_s: float
    ) -> Present:
        nothing: Present = np.zeros(len(numbers), np.bool_)
        lease = self._client.acquire_each(namespace, keys, wait_s=wait_s)
        if lease is None:
            return nothing
        with lease:
            slots = lease.slots[0]
            here: Present = slots.rows != NO_ROW
            pages.fill(numbers[here], slots.table, slots.rows[here])
            return here if lease.valid else nothing

    def write(
        self, hashes: Sequence[str], blocks: Sequence[Any], before: str | None = None
    ) -> list[bool]:
        """Store pages that follow each other; True for each that is stored afterwards.

        blocks: as `into` of `read_into`. before: the page before the first one, where that is known.
        """
        if not self._writes:
            return [True] * len(hashes)
        namespace = self.open()
        if namespace is None or not hashes:
            return [False] * len(hashes)
        keys = packed_keys(hashes)
        parents = (key_of(before) if before else NO_PARENT) + keys[:-KEY_BYTES]
        begun = self._clock()
        try:
            stored = self._client.put_each(namespace, keys, list(blocks), parents=parents)
        except KvpoolError as error:
            self._outage.failed(type(error).__name__, error)
            return [False] * len(hashes)
        self._heard()
        self.transfers.wrote(int(stored.sum()), self.nbytes, self._clock() - begun)
        if stored.all():
            self._full.worked()
        else:
            self._full.failed("full", "pages are not stored")
        return [bool(each) for each in stored]

    def clear(self) -> bool:
        """Empty the namespace, for the whole cluster. Whether that was done, by the rank that writes."""
        if not self._writes:
            return True
        namespace = self.open()
        if namespace is None:
            return False
        try:
            self._client.namespaces.clear(namespace, wait_s=CLEAR_S)
        except KvpoolError as error:
            self._outage.failed(type(error).__name__, error)
            return False
        return True

    def _heard(self) -> None:
        """After a call that did not fail: reads find nothing, without an error, where the daemon is away."""
        if self._client.available:
            self._outage.worked()
        else:
            self._outage.failed("Unavailable", "it cannot be reached")
