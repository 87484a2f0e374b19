"""What a tier's threads do with the pool: ask for chunks, put them and get them. Whatever fails is a miss.

A chunk of one of vLLM's cache groups is a block's part of that number; its key is the end of its hash.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.client import Presence
from kvpool.complaint import Complaint
from kvpool.engine_plugins.vllm.chunks.config import TierConfig
from kvpool.errors import KvpoolError
from kvpool.types import KEY_BYTES, Namespace, NamespaceRecord

if TYPE_CHECKING:
    from kvpool.client import Client

log = logging.getLogger("kvpool.vllm")

SLICE_BYTES = 32 << 20
"""How much is put or got in one go, so that a lease or a reservation does not last long."""
SLICE_KEYS = 4096


class Space:
    """One client in the namespace that the engine is in. Thread-safe."""

    def __init__(self, client: Client, verify: bool, complaint: Complaint) -> None:
        self.client = client
        self._verify = verify
        self._complaint = complaint
        self._lock = threading.Lock()
        self._record: NamespaceRecord | None = None
        self._ttl_s = 0.0
        self._opened: Namespace | None = None

    def enter(self, record: NamespaceRecord, ttl_s: float) -> None:
        """Use this namespace from now on; it is opened when it is first needed. Waits for an opening under way."""
        with self._lock:
            self._record, self._ttl_s, left = record, ttl_s, self._opened
            self._opened = None
        if left is not None:
            self.client.namespaces.close(left)

    def use(self, ask: Callable[[Namespace, int, int], Any], begin: int, end: int) -> Any:
        """The answer for some keys; None, with its cause logged, if there was none."""
        try:
            answer = ask(self._namespace(), begin, end)
        except KvpoolError as error:
            self._complaint.failed(str(error), error)
            return None
        if not self.client.available:  # for reads that is no error
            silent = f"the daemon at {self.client.socket_path} does not answer"
            self._complaint.failed(silent, silent)
            return None
        self._complaint.worked()
        return answer

    def _namespace(self) -> Namespace:
        with self._lock:
            if self._opened is None:
                assert self._record is not None, "a namespace is entered before anything is asked"
                self._opened = self.client.open(
                    self._record, ttl_s=self._ttl_s, verify=self._verify
                )
            return self._opened


class TierStore:
    """See the module. Thread-safe.

    lookups, transfers: clients of their own, with time-outs of their own. chunk_bytes: of a chunk.
    """

    def __init__(
        self, lookups: Client, transfers: Client, config: TierConfig, chunk_bytes: int
    ) -> None:
        complaint = Complaint(log, "vLLM's tier in the pool misses everything for now")
        self._lookups = Space(lookups, config.verify_loads, complaint)
        self._transfers = Space(transfers, config.verify_loads, complaint)
        self._lookup_wait_s = config.lookup_timeout_s / 2
        self._load_wait_s = config.load_wait_s
        self._slice = max(1, min(SLICE_KEYS, SLICE_BYTES // chunk_bytes))

    def enter(self, record: NamespaceRecord, ttl_s: float = 0.0) -> None:
        """See `Space.enter`. ttl_s: chunks that nobody uses for so long are dropped; 0: none."""
        self._lookups.enter(record, ttl_s)
        self._transfers.enter(record, ttl_s)

    def present(self, part: int, keys: Sequence[bytes]) -> list[bool]:
        """Which chunks can be loaded: from here, or, as far as is known, from elsewhere."""

        def ask(ns: Namespace, begin: int, end: int) -> Any:
            found = self._lookups.client.present(
                ns, keys[begin:end], part=part, wait_s=self._lookup_wait_s
            )
            return found != Presence.NOWHERE

        return _slices(self._lookups, len(keys), SLICE_KEYS, ask)

    def store(
        self, part: int, keys: Sequence[bytes], chunks: Sequence[Any], parents: bytes
    ) -> list[bool]:
        """Which chunks are in the pool afterwards. chunks: their bytes. parents: packed, of each key."""

        def put(ns: Namespace, begin: int, end: int) -> Any:
            before = parents[begin * KEY_BYTES : end * KEY_BYTES]
            return self._transfers.client.put_each(
                ns, keys[begin:end], chunks[begin:end], part=part, parents=before
            )

        return _slices(self._transfers, len(keys), self._slice, put)

    def load(self, part: int, keys: Sequence[bytes], chunks: Sequence[Any]) -> list[bool]:
        """Copy chunks into memory; which are whole. The memory of the others holds anything."""
        ends = time.monotonic() + self._load_wait_s

        def get(ns: Namespace, begin: int, end: int) -> Any:
            left = max(0.0, ends - time.monotonic())
            return self._transfers.client.get_into(
                ns, keys[begin:end], chunks[begin:end], part=part, wait_s=left
            )

        return _slices(self._transfers, len(keys), self._slice, get)

    def close(self) -> None:
        self._lookups.client.close()
        self._transfers.client.close()


def _slices(
    space: Space, count: int, most: int, ask: Callable[[Namespace, int, int], Any]
) -> list[bool]:
    """The answers for so many keys, some at a time; after one that failed, nothing more is asked."""
    found: list[bool] = []
    for begin in range(0, count, most):
        answer = space.use(ask, begin, min(count, begin + most))
        if answer is None:
            break
        found += answer.tolist()
    return found + [False] * (count - len(found))
