"""Lookups of very many blocks, beside the engine's steps: the scheduler's thread only packs a slice of keys a step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from kvpool.errors import KvpoolError
from kvpool.types import Namespace, NamespaceRecord

if TYPE_CHECKING:
    from kvpool.client import Client, Lease


class Ahead:
    """client: for its thread only; it may wait longer than the scheduling thread's. lease_s: of the leases."""

    PARTS_AT_ONCE = 5000
    """Parts of blocks that a lookup asks for on the spot, at most: a few milliseconds."""
    SLICE_BLOCKS = 8192
    """Keys that are packed at a time: about a millisecond."""

    def __init__(self, client: Client, lease_s: float) -> None:
        self._client = client
        self._lease_s = lease_s
        self._thread = ThreadPoolExecutor(1, "kvpool-lookup")
        self._entered = False

    def enter(self, record: NamespaceRecord, generation: int) -> None:
        """Look up in this namespace from now on, with the generation of weights that the engine has it with; -1: it is not
        known yet, and nothing is found.
        """
        self._thread.submit(self._enter, record, generation)

    def _enter(self, record: NamespaceRecord, generation: int) -> None:
        self._entered = False
        if generation < 0:
            return
        try:
            self._client.open(record, generation=generation)
        except KvpoolError:
            return
        self._entered = True

    def submit(
        self, ns: Namespace, keys: bytes, life: int, trace: str, request: str
    ) -> Future[Lease | Literal[False] | None]:
        """The lease on what there is of them. False: the daemon refused. One after the other."""
        return self._thread.submit(self._acquire, ns, keys, life, trace, request)

    def _acquire(
        self, ns: Namespace, keys: bytes, life: int, trace: str, request: str
    ) -> Lease | Literal[False] | None:
        if not self._entered:
            return False
        try:
            return self._client.acquire(
                ns,
                keys,
                lease_s=self._lease_s,
                life=life,
                trace=trace,
                request=request,
                for_others=True,
            )
        except KvpoolError:
            return False

    def close_namespace(self, ns: Namespace) -> None:
        self._thread.submit(self._client.namespaces.close, ns)

    def close(self) -> None:
        """Waits for the lookup that is under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._client.close()
