"""Looking for blocks, and leasing them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.client.namespaces import Requests
from kvpool.client.slots import Lease, lease_of
from kvpool.decoding import finite
from kvpool.errors import Unavailable
from kvpool.types import KEY_BYTES, Namespace
from kvpool.wire import client as client_wire

if TYPE_CHECKING:
    from kvpool.client.device_memory import DeviceMemory


class Reads:
    """Thread-safe. An unreachable daemon has no blocks."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def present(
        self,
        namespaces: Sequence[Namespace],
        packed: bytes,
        part: int,
        wait_s: float | None,
        *,
        first: bool = False,
        beside: bytes = b"",
    ) -> tuple[bytes, bytes]:
        """Return a `Presence` for each namespace and key, and one for each key beside. wait_s: None: only in memory."""
        n = len(packed) // KEY_BYTES * len(namespaces)
        data = bytes(n + len(beside) // KEY_BYTES)
        if namespaces and data:
            rest = part, packed, wait_s, first, beside
            try:
                data = self._requests.ask_in_all(
                    namespaces, client_wire.Present, *rest, wait_s=wait_s or 0.0
                )
            except Unavailable:
                pass
        return data[:n], data[n:]

    def acquire_each(
        self,
        ns: Namespace,
        packed: bytes,
        part: int,
        lease_s: float,
        wait_s: float,
        request: str,
        nbytes: int = 0,
    ) -> Lease | None:
        """A lease on one part of each of these blocks that is here. nbytes: of the answer's blocks, if they are copied."""
        # By position: keywords cost a third of a microsecond here.
        fields = packed, [part], finite(lease_s, "lease_s"), finite(wait_s, "wait_s"), True
        return self.acquire(ns, (*fields, None, 0, "", ns.verify, request), wait_s, nbytes=nbytes)

    def acquire(
        self,
        ns: Namespace,
        fields: tuple[Any, ...],
        wait_s: float,
        *,
        nbytes: int = 0,
        device: DeviceMemory | None = None,
        life: int = 0,
    ) -> Lease | None:
        """fields: of the request, after the namespace's number."""
        connections = self._requests.connections
        try:
            with connections.request() as connection:
                sent = 0.0

                def ask(number: int) -> Any:
                    nonlocal sent
                    sent = time.monotonic()
                    connection.be_patient(nbytes)
                    message = client_wire.Acquire(number, *fields)
                    return connection.ask(message, connections.timeout_s + wait_s)

                answer = self._requests.namespaces.with_number(connection, ns, ask)
                return lease_of(connections, connection, answer, sent, device, life)
        except Unavailable:
            return None
