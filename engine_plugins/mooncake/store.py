"""`MooncakeDistributedStore` over the pool: the arguments, return codes and conventions of `mooncake.store`.

Where the daemon is, and as whom to talk to it, is this node's business and not in `setup`'s arguments:

    KVPOOL_SOCKET            the daemon's socket; else the user's default
    KVPOOL_TENANT            the pool's tenant, and KVPOOL_TOKEN its token; else the default tenant
    KVPOOL_MOONCAKE_WAIT_S   how long a read waits for what is on disks or other nodes; 5 s

`setup(dict)` may name them too: `kvpool_socket`, `kvpool_tenant`, `kvpool_token`. Segments, transports and master
addresses are accepted and not used: memory is the daemon's. `tenant_id` divides the keys of one pool tenant.

Nothing here raises for what happens to the pool. Wrong types raise `TypeError`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpool.client import Client, Presence
from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.batches import Batches
from kvpool.engine_plugins.mooncake.heads import Limits
from kvpool.engine_plugins.mooncake.objects import Objects
from kvpool.engine_plugins.mooncake.pieces import Memory, Pieces, View
from kvpool.engine_plugins.mooncake.ranges import Ranges, ReadSessions, WriteSessions
from kvpool.engine_plugins.mooncake.values import (
    BufferHandle,
    Config,
    Ints,
    Keys,
    Lists,
    ReplicaDescriptor,
    all_of,
    as_config,
)
from kvpool.errors import KvpoolError
from kvpool.types import DEFAULT_TENANT

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
PORTS = range(12_300, 14_301)
"""Those that Mooncake's clients listen at."""


class MooncakeDistributedStore:
    """The pool under the interface of `mooncake.store`. All methods may be called from any thread.

    Not for use in a forked child: set up a new one there. Its public methods are Mooncake's, however many there are.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._memory = Memory()
        self._batches = Batches()
        self._ranges = Ranges(self._memory, self._batches)
        self._reads = ReadSessions(self._batches, self._ranges)
        self._writes = WriteSessions(self._batches, self._memory)
        self._hostname = ""
        self._lock = threading.Lock()

    # ---- life ----------------------------------------------------------------------------------------

    def setup(
        self,
        local_hostname: str | Mapping[str, Any],
        metadata_server: str = "",
        global_segment_size: int = 0,
        local_buffer_size: int = 0,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Connect to this node's daemon: 0, or -900 when it does not answer or refuses. As often as wanted."""
        found: Mapping[str, Any] = {}
        if isinstance(local_hostname, Mapping):
            found = local_hostname
            local_hostname = str(found.get("local_hostname", ""))
            tenant_id = str(found.get("tenant_id", "") or "default")
        elif not isinstance(local_hostname, str):
            raise TypeError(
                "setup() takes the local hostname and the other settings, or one dict of them"
            )
        connected = _connect(found, tenant_id)
        if connected is None:
            return codes.UNAVAILABLE
        self.close()
        host, _, port = local_hostname.rpartition(":")
        if not port.isdigit():
            host, port = local_hostname or "localhost", str(PORTS[os.getpid() % len(PORTS)])
        with self._lock:
            self._client, self._batches.objects = connected
            self._hostname = f"{host}:{port}"
        return codes.OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """As `setup`: each process talks to the daemon by itself. mem_pool_size: for `alloc_from_mem_pool`."""
        code = self.setup("")
        if code == codes.OK:
            self._memory.pool_left = mem_pool_size
        return code

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 0) -> int:
        return self.setup("")

    def close(self) -> int:
        """Objects stay in the pool. Registered buffers stay registered."""
        with self._lock:
            client, self._client, self._batches.objects = self._client, None, None
            self._reads.end_all()
            self._writes.end_all()
        if client is not None:
            client.close()
        return codes.OK

    def health_check(self) -> int:
        """0: the daemon has answered last. 1: not set up. 2: the daemon does not answer."""
        client = self._client
        if client is None:
            return 1
        return 0 if client.available else 2

    def get_hostname(self) -> str:
        """Host and port as given to `setup`; a number stands for a missing port, and nobody listens there."""
        return self._hostname

    # ---- memory --------------------------------------------------------------------------------------

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0, or -600: empty, overlapping, or not host memory that this process may read and write."""
        return codes.OK if self._memory.register(int(buffer_ptr), int(size)) else codes.INVALID

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return codes.OK if self._memory.unregister(int(buffer_ptr)) else codes.INVALID

    def alloc_from_mem_pool(self, size: int) -> int:
        """The address of memory of this process, until the store is gone; 0: `setup_dummy` was told of less."""
        return self._memory.allocate(size)

    # ---- presence ------------------------------------------------------------------------------------

    def is_exist(self, key: str) -> int:
        """1, 0, or -1 when the daemon does not answer."""
        return self._batches.exist([key])[0]

    def batch_is_exist(self, keys: Keys) -> list[int]:
        return self._batches.exist(keys)

    def get_size(self, key: str) -> int:
        found = self._batches.sizes([key])
        if found is None:
            return codes.UNAVAILABLE
        return found[0][0] if found[0][0] >= 0 else codes.NOT_FOUND

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The nearest replica; none: the object is not there."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Keys) -> dict[str, list[ReplicaDescriptor]]:
        """Of those that are there."""
        found = self._batches.sizes(keys) or []
        return {
            key: [
                ReplicaDescriptor(
                    size,
                    "" if near == Presence.ELSEWHERE else self._hostname,
                    near == Presence.DISK,
                )
            ]
            for key, (size, near) in zip(keys, found, strict=False)
            if size >= 0
        }

    # ---- bytes ---------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, config: Config = None) -> int:
        return self._put_values([key], [value], config)

    def put_batch(self, keys: Keys, values: Sequence[Any], config: Config = None) -> int:
        """0, or the first code that is another."""
        return self._put_values(keys, values, config)

    def put_parts(self, key: str, *parts: Any, config: Config = None) -> int:
        """Nothing is stored, and 0 the answer, where there are no bytes."""
        joined = _joined(parts)
        return self._put_values([key], [joined], config) if joined else codes.OK

    def upsert(self, key: str, value: Any, config: Config = None) -> int:
        return self._put_values([key], [value], config, replace=True)

    def upsert_batch(self, keys: Keys, values: Sequence[Any], config: Config = None) -> int:
        return self._put_values(keys, values, config, replace=True)

    def upsert_parts(self, key: str, *parts: Any, config: Config = None) -> int:
        joined = _joined(parts)
        return self._put_values([key], [joined], config, replace=True) if joined else codes.OK

    def get(self, key: str) -> bytes:
        """Empty if it is missing, or could not be read."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Keys) -> list[bytes]:
        return [data or b"" for data in self._batches.read_new(keys, bytes)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Keys) -> list[BufferHandle | None]:
        return self._batches.read_new(keys, BufferHandle)

    def _put_values(
        self, keys: Keys, values: Sequence[Any], config: Config, *, replace: bool = False
    ) -> int:
        """0, or the first code that is another. All are refused where a key is empty."""
        if len(keys) != len(values):
            return codes.INVALID
        pieces = [View(_bytes_of(value)) for value in values]
        if not all(keys):
            return codes.INVALID
        found = self._put(keys, pieces, config, replace=replace)
        return next((code for code in found if code != codes.OK), codes.OK)

    # ---- zero copy -----------------------------------------------------------------------------------

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Config = None) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self, keys: Keys, buffer_ptrs: Ints, sizes: Ints, config: Config = None
    ) -> list[int]:
        return self._put(keys, self._memory.runs(buffer_ptrs, sizes), config)

    def batch_put_from_multi_buffers(
        self, keys: Keys, all_buffer_ptrs: Lists, all_sizes: Lists, config: Config = None
    ) -> list[int]:
        return self._put(keys, self._memory.gathered(all_buffer_ptrs, all_sizes), config)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Config = None,
    ) -> int:
        """The metadata, then the bytes, as one object."""
        ptrs, sizes = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        return self.batch_put_from_multi_buffers([key], [ptrs], [sizes], config)[0]

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Config = None) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self, keys: Keys, buffer_ptrs: Ints, sizes: Ints, config: Config = None
    ) -> list[int]:
        return self._put(keys, self._memory.runs(buffer_ptrs, sizes), config, replace=True)

    def _put(
        self, keys: Keys, pieces: Sequence[Pieces | None], config: Config, *, replace: bool = False
    ) -> list[int]:
        chosen = as_config(config, len(keys))
        if chosen is None:
            return all_of(codes.INVALID, keys)
        return self._batches.put(keys, pieces, chosen, replace=replace)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: Keys, buffer_ptrs: Ints, sizes: Ints) -> list[int]:
        """For each key the object's bytes, or a code; -600 where the buffer is smaller than it."""
        return self._batches.read(keys, self._memory.runs(buffer_ptrs, sizes))

    def batch_get_into_multi_buffers(
        self,
        keys: Keys,
        all_buffer_ptrs: Lists,
        all_sizes: Lists,
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        return self._batches.read(keys, self._memory.gathered(all_buffer_ptrs, all_sizes))

    def get_into_ranges(
        self,
        buffer_ptrs: Ints,
        all_keys: Sequence[Keys],
        all_dst_offsets: Sequence[Lists],
        all_src_offsets: Sequence[Lists],
        all_sizes: Sequence[Lists],
    ) -> list[list[list[int]]]:
        """Ranges of objects into buffers: for each buffer, key and range its bytes, or a code."""
        columns = buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes
        if len(set(map(len, columns))) != 1:
            return [[[codes.INVALID]] for _ in buffer_ptrs]
        return list(map(self._ranges.of_objects, *columns))

    # ---- sessions ------------------------------------------------------------------------------------

    def batch_get_session_start(self, keys: Keys) -> list[int]:
        """0 for each object that is there and may now be read in ranges, or a code."""
        return self._reads.start(keys)

    def batch_get_session_end(self, keys: Keys) -> int:
        self._reads.end(keys)
        return codes.OK

    def batch_get_into_multi_buffer_ranges(
        self, keys: Keys, all_buffer_ptrs: Lists, all_sizes: Lists, all_src_offsets: Lists
    ) -> list[int]:
        """Ranges of objects whose session has started: for each key its bytes in all, or a code.

        -704: it is gone, or in its place is another version than the one of which a session's first ranges were.
        """
        columns = keys, all_buffer_ptrs, all_sizes, all_src_offsets
        if len(set(map(len, columns))) != 1:
            return all_of(codes.INVALID, keys)
        return list(map(self._reads.read, *columns))

    def batch_put_session_start(self, keys: Keys, sizes: Ints, config: Config = None) -> list[int]:
        """0 for each object that may now be written in ranges; -705: it is there already, or being written."""
        return self._writes.start(keys, sizes, config)

    def batch_put_from_multi_buffer_ranges(
        self, keys: Keys, all_buffer_ptrs: Lists, all_sizes: Lists, all_dst_offsets: Lists
    ) -> list[int]:
        """Write ranges of objects whose session has started: for each key its bytes in all, or a code."""
        columns = keys, all_buffer_ptrs, all_sizes, all_dst_offsets
        if len(set(map(len, columns))) != 1:
            return all_of(codes.INVALID, keys)
        return list(map(self._writes.write, *columns))

    def batch_put_session_end(self, keys: Keys) -> list[int]:
        """Store what was written: 0, or a code. Bytes that were not written are zero."""
        return self._writes.end(keys)

    def batch_put_session_revoke(self, keys: Keys) -> list[int]:
        return self._writes.revoke(keys)

    # ---- removing ------------------------------------------------------------------------------------

    def remove(self, key: str, force: bool = False) -> int:
        """0, or -704; readers finish, so there is nothing to force."""
        return self._batches.remove([key])[0]

    def batch_remove(self, keys: Keys, force: bool = False) -> list[int]:
        return self._batches.remove(keys)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """-1012: the pool keeps hashes of keys and no list of them."""
        return codes.UNSUPPORTED

    def remove_all(self, force: bool = False) -> int:
        """How many objects this node had; they are gone from all nodes. Or a code."""
        return self._batches.clear()


def _connect(found: Mapping[str, Any], tenant_id: str) -> tuple[Client, Objects] | None:
    """Connect to the daemon of the settings, else of the environment; None: it does not answer or refuses."""
    client = None
    try:
        client = Client(
            found.get("kvpool_socket") or None,
            tenant=found.get("kvpool_tenant") or os.environ.get("KVPOOL_TENANT") or DEFAULT_TENANT,
            token=found.get("kvpool_token") or os.environ.get("KVPOOL_TOKEN") or None,
            timeout_s=TIMEOUT_S,
            connect=True,
        )
        objects = Objects(client, tenant_id, _limits())
        objects.spaces.look()
    except KvpoolError as error:
        logger.warning("mooncake.store over kvpool: setup failed: %s", error)
        if client is not None:
            client.close()
        return None
    return client, objects


def _limits() -> Limits:
    text = os.environ.get("KVPOOL_MOONCAKE_WAIT_S", "")
    if not text:
        return Limits()
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"KVPOOL_MOONCAKE_WAIT_S is {text}: it must be a number of seconds")
    return Limits(read_s=seconds)


def _joined(parts: Sequence[Any]) -> bytes:
    return b"".join([_bytes_of(part).data for part in parts])


def _bytes_of(value: Any) -> Any:
    """The bytes of any buffer, in its own order. Raises `TypeError`."""
    if isinstance(value, str):
        raise TypeError("a value must be bytes or another buffer, not str")
    view = memoryview(value)
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)
