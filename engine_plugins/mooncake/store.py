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
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from kvpool.client import Client, Presence
from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.objects import OBJECT_BYTES_MAX, How, Limits, Objects
from kvpool.engine_plugins.mooncake.pieces import BadAddressError, Made, Memory, Pieces, View
from kvpool.engine_plugins.mooncake.values import (
    BufferHandle,
    ReplicaDescriptor,
    ReplicateConfig,
    all_of,
    as_config,
)
from kvpool.errors import KvpoolError
from kvpool.types import DEFAULT_TENANT

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
KEYS_TOGETHER = 8192
"""Larger batches are cut: a request has a limit of keys."""
PORTS = range(12_300, 14_301)
"""Those that Mooncake's clients listen at."""
SESSIONS_MAX = 65_536
ADDRESSES_END = 1 << 62
"""Beyond all addresses of a process, and sums with sizes are still numbers of 64 bits."""
BUFFER_BYTES_MAX = 1 << 40
SESSION_BYTES_MAX = 4 << 30


@dataclass
class _PutSession:
    """An object that is written in pieces before it is put."""

    data: bytearray
    config: ReplicateConfig


@dataclass
class _GetSession:
    """An object that is read in pieces. checksum: of the version of which the first piece was, then."""

    size: int
    checksum: bytes = b""


class MooncakeDistributedStore:
    """The pool under the interface of `mooncake.store`. All methods may be called from any thread.

    Not for use in a forked child: set up a new one there.
    """

    def __init__(self) -> None:
        self._objects: Objects | None = None
        self._client: Client | None = None
        self._memory = Memory()
        self._hostname = ""
        self._lock = threading.Lock()
        self._pool: list[Any] = []
        self._pool_left = 0
        self._reads: dict[str, _GetSession] = {}
        self._writes: dict[str, _PutSession] = {}
        self._writing_bytes = 0

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
        client = None
        try:
            client = Client(
                found.get("kvpool_socket") or None,
                tenant=found.get("kvpool_tenant")
                or os.environ.get("KVPOOL_TENANT")
                or DEFAULT_TENANT,
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
            return codes.UNAVAILABLE
        self.close()
        host, _, port = local_hostname.rpartition(":")
        if not port.isdigit():
            host, port = local_hostname or "localhost", str(PORTS[os.getpid() % len(PORTS)])
        with self._lock:
            self._client, self._objects = client, objects
            self._hostname = f"{host}:{port}"
        return codes.OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """As `setup`: each process talks to the daemon by itself. mem_pool_size: for `alloc_from_mem_pool`."""
        code = self.setup("")
        if code == codes.OK:
            self._pool_left = mem_pool_size
        return code

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 0) -> int:
        return self.setup("")

    def close(self) -> int:
        """Objects stay in the pool. Registered buffers stay registered."""
        with self._lock:
            client, self._client, self._objects = self._client, None, None
            self._reads.clear()
            self._writes.clear()
            self._writing_bytes = 0
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
        with self._lock:
            if not 0 < size <= self._pool_left:
                return 0
            self._pool_left -= size
            self._pool.append(np.zeros(size, np.uint8))
            return int(self._pool[-1].ctypes.data)

    # ---- presence ------------------------------------------------------------------------------------

    def is_exist(self, key: str) -> int:
        """1, 0, or -1 when the daemon does not answer."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        objects = self._objects
        if objects is None:
            return all_of(codes.INTERNAL_ERROR, keys)
        codes_of: list[int] = []
        for some in _together(_encoded(keys)):
            found = objects.exist(some)
            codes_of += all_of(codes.INTERNAL_ERROR, some) if found is None else map(int, found)
        return codes_of

    def get_size(self, key: str) -> int:
        found = self._sizes([key])
        if found is None:
            return codes.UNAVAILABLE
        return found[0][0] if found[0][0] >= 0 else codes.NOT_FOUND

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The nearest replica; none: the object is not there."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Of those that are there."""
        found = self._sizes(keys) or []
        return {
            key: [
                ReplicaDescriptor(
                    size,
                    "" if near == Presence.ELSEWHERE else self._hostname,
                    on_disk=near == Presence.DISK,
                )
            ]
            for key, (size, near) in zip(keys, found, strict=False)
            if size >= 0
        }

    def _sizes(self, keys: Sequence[str]) -> list[tuple[int, int]] | None:
        objects = self._objects
        if objects is None:
            return None
        found: list[tuple[int, int]] = []
        for some in _together(_encoded(keys)):
            sizes = objects.sizes(some)
            if sizes is None:
                return None
            found += sizes
        return found

    # ---- bytes ---------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        return self._put_values([key], [value], config)[0]

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """0, or the first code that is another."""
        if len(keys) != len(values):
            return codes.INVALID
        return _worst(self._put_values(keys, values, config))

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Nothing is stored, and 0 the answer, where there are no bytes."""
        joined = b"".join([_view(part).data for part in parts])
        return self._put_values([key], [joined], config)[0] if joined else codes.OK

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        return self._put_values([key], [value], config, replace=True)[0]

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        if len(keys) != len(values):
            return codes.INVALID
        return _worst(self._put_values(keys, values, config, replace=True))

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        joined = b"".join([_view(part).data for part in parts])
        return self._put_values([key], [joined], config, replace=True)[0] if joined else codes.OK

    def get(self, key: str) -> bytes:
        """Empty if it is missing, or could not be read."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [b"" if data is None else data for data in self._read_new(keys, bytes)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        return self._read_new(keys, BufferHandle)

    def _put_values(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> list[int]:
        return self._put(keys, [View(_view(value)) for value in values], config, replace=replace)

    def _read_new(self, keys: Sequence[str], make: Callable[[Any], Any]) -> list[Any]:
        made = [Made(make) for _ in keys]
        got = self._read(keys, [0] * len(keys), lambda at, size: made[at].of(size))
        return [one.value if code >= 0 else None for one, code in zip(made, got, strict=True)]

    # ---- zero copy -----------------------------------------------------------------------------------

    def put_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        return self._put_from((keys, buffer_ptrs, sizes), _runs_valid, self._memory.runs, config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        columns = keys, all_buffer_ptrs, all_sizes
        return self._put_from(columns, _gathered_valid, self._memory.gathered, config)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """The metadata, then the bytes, as one object."""
        return self.batch_put_from_multi_buffers(
            [key], [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]], config
        )[0]

    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        columns = keys, buffer_ptrs, sizes
        return self._put_from(columns, _runs_valid, self._memory.runs, config, replace=True)

    def _put_from(
        self,
        columns: tuple[Sequence[str], Sequence[Any], Sequence[Any]],
        valid: Callable[[Sequence[Any], Sequence[Any]], list[bool]],
        pieces_of: Callable[[Sequence[Any], Sequence[Any]], list[Pieces]],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> list[int]:
        """columns: keys, addresses and sizes, of which `valid` tells whether they can be followed."""
        keys = columns[0]
        chosen = as_config(config, len(keys))
        if chosen is None:
            return all_of(codes.INVALID, keys)

        def put(some: Sequence[str], ptrs: Sequence[Any], sizes: Sequence[Any]) -> list[int]:
            return self._put(some, pieces_of(ptrs, sizes), chosen, replace=replace, checked=True)

        return _of_valid(columns, valid, put)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """For each key the object's bytes, or a code; -600 where the buffer is smaller than it."""

        def read(some: Sequence[str], ptrs: Sequence[int], lengths: Sequence[int]) -> list[int]:
            return self._read_into(some, self._memory.runs(ptrs, lengths))

        return _of_valid((keys, buffer_ptrs, sizes), _runs_valid, read)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        def read(some: Sequence[str], ptrs: Sequence[Any], sizes: Sequence[Any]) -> list[int]:
            return self._read_into(some, self._memory.gathered(ptrs, sizes))

        return _of_valid((keys, all_buffer_ptrs, all_sizes), _gathered_valid, read)

    def _read_into(self, keys: Sequence[str], buffers: Sequence[Pieces]) -> list[int]:
        def target(at: int, size: int) -> Pieces | int:
            pieces = buffers[at]
            return pieces if pieces.nbytes >= size else codes.INVALID

        return self._read(keys, [pieces.nbytes for pieces in buffers], target)

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Ranges of objects into buffers: for each buffer, key and range its bytes, or a code."""
        lengths = {
            len(buffer_ptrs),
            *map(len, (all_keys, all_dst_offsets, all_src_offsets, all_sizes)),
        }
        if len(lengths) != 1:
            return [[[codes.INVALID]] for _ in buffer_ptrs]
        return [
            self._ranges_of_buffer(*arguments)
            for arguments in zip(
                buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True
            )
        ]

    def _ranges_of_buffer(
        self,
        buffer_ptr: int,
        keys: Sequence[str],
        dst_offsets: Sequence[Sequence[int]],
        src_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        if not len(keys) == len(dst_offsets) == len(src_offsets) == len(sizes):
            return [[codes.INVALID] for _ in keys]
        end = self._memory.end_of(buffer_ptr) if _run_valid(buffer_ptr, 1) else None
        found = []
        for key, to, at, size in zip(keys, dst_offsets, src_offsets, sizes, strict=True):
            if not len(to) == len(at) == len(size):
                found.append([codes.INVALID] * max(len(to), len(at), len(size)))
                continue
            starts = [buffer_ptr + offset for offset in to]
            found.append(self._read_ranges(key, starts, at, size, end))
        return found

    def _read_ranges(
        self,
        key: str,
        ptrs: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        end: int | None = None,
        session: _GetSession | None = None,
    ) -> list[int]:
        """Ranges of one object, through a copy of it: a code each. end: of the memory that all must be in."""
        data = self.get_buffer(key)
        if data is None:
            return all_of(codes.NOT_FOUND, sizes)
        whole = np.frombuffer(data, np.uint8)
        if session is not None and not self._is_same(session, whole):
            return all_of(codes.NOT_FOUND, sizes)
        return [
            codes.INVALID
            if end is not None and ptr + size > end
            else self._copy_out(whole, ptr, offset, size)
            for ptr, offset, size in zip(ptrs, offsets, sizes, strict=True)
        ]

    def _is_same(self, session: _GetSession, data: Any) -> bool:
        """Whether it is the version that the session has read of, or its first one."""
        if data.size != session.size:
            return False
        checksum = xxhash.xxh3_128_digest(data.data)
        with self._lock:
            session.checksum = session.checksum or checksum
            return session.checksum == checksum

    def _copy_out(self, data: Any, ptr: int, offset: int, size: int) -> int:
        if offset < 0 or offset + size > data.size or not _run_valid(ptr, size):
            return codes.INVALID
        with _Staged(size) as (staged, fd):
            np.copyto(staged, data[offset : offset + size])
            try:
                self._memory.runs([ptr], [size])[0].read(staged, fd, 0)
            except BadAddressError:
                return codes.INVALID
        return size

    # ---- sessions ------------------------------------------------------------------------------------

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """0 for each object that is there and may now be read in ranges, or a code."""
        found = self._sizes(keys)
        if found is None:
            return all_of(codes.UNAVAILABLE, keys)
        started = []
        with self._lock:
            for key, (size, _) in zip(keys, found, strict=True):
                if size < 0:
                    started.append(codes.NOT_FOUND)
                elif len(self._reads) >= SESSIONS_MAX and key not in self._reads:
                    started.append(codes.NO_SPACE)
                else:
                    self._reads[key] = _GetSession(size)
                    started.append(codes.OK)
        return started

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        with self._lock:
            for key in keys:
                self._reads.pop(key, None)
        return codes.OK

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Ranges of objects whose session has started: for each key its bytes in all, or a code.

        -704: it is gone, or in its place is another version than the one of which a session's first ranges were.
        """
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return all_of(codes.INVALID, keys)
        found = []
        for key, ptrs, sizes, offsets in zip(
            keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True
        ):
            session = self._reads.get(key)
            if session is None or not _ranges_valid(ptrs, sizes, offsets, session.size):
                found.append(codes.INVALID)
                continue
            got = self._read_ranges(key, ptrs, offsets, sizes, session=session)
            found.append(sum(got) if min(got) > 0 else min(got))
        return found

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """0 for each object that may now be written in ranges; -705: it is there already, or being written."""
        chosen = as_config(config, len(keys))
        if len(keys) != len(sizes) or chosen is None:
            return all_of(codes.INVALID, keys)
        there = self.batch_is_exist(keys)
        return [
            self._start_writing(key, size, chosen, exists)
            for key, size, exists in zip(keys, sizes, there, strict=True)
        ]

    def _start_writing(self, key: str, size: int, config: ReplicateConfig, exists: int) -> int:
        if exists < 0:
            return codes.UNAVAILABLE
        if not _encoded_key(key) or size <= 0:
            return codes.INVALID
        with self._lock:
            if exists or key in self._writes:
                return codes.EXISTS
            if len(self._writes) >= SESSIONS_MAX or self._writing_bytes + size > SESSION_BYTES_MAX:
                return codes.NO_SPACE
            self._writes[key] = _PutSession(bytearray(size), config)
            self._writing_bytes += size
        return codes.OK

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write ranges of objects whose session has started: for each key its bytes in all, or a code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return all_of(codes.INVALID, keys)
        return [
            self._write_ranges(*arguments)
            for arguments in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True)
        ]

    def _write_ranges(
        self, key: str, ptrs: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        session = self._writes.get(key)
        if session is None or not _ranges_valid(ptrs, sizes, offsets, len(session.data)):
            return codes.INVALID
        whole = np.frombuffer(session.data, np.uint8)
        for ptr, size, offset in zip(ptrs, sizes, offsets, strict=True):
            with _Staged(size) as (staged, fd):
                try:
                    self._memory.runs([ptr], [size])[0].write(staged, fd, 0)
                except BadAddressError:
                    return codes.INVALID
                np.copyto(whole[offset : offset + size], staged)
        return sum(sizes)

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Store what was written: 0, or a code. Bytes that were not written are zero."""
        ended = []
        for key in keys:
            session = self._end_writing(key)
            if session is None:
                ended.append(codes.INVALID)
            else:
                view = View(np.frombuffer(session.data, np.uint8))
                ended.append(self._put([key], [view], session.config, checked=True)[0])
        return ended

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        return [codes.INVALID if self._end_writing(key) is None else codes.OK for key in keys]

    def _end_writing(self, key: str) -> _PutSession | None:
        with self._lock:
            session = self._writes.pop(key, None)
            if session is not None:
                self._writing_bytes -= len(session.data)
        return session

    # ---- removing ------------------------------------------------------------------------------------

    def remove(self, key: str, force: bool = False) -> int:
        """0, or -704; readers finish, so there is nothing to force."""
        objects = self._objects
        return codes.INVALID if objects is None else objects.remove([_encoded_key(key)])[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        objects = self._objects
        if objects is None:
            return all_of(codes.INVALID, keys)
        return [code for some in _together(_encoded(keys)) for code in objects.remove(some)]

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """-1012: the pool keeps hashes of keys and no list of them."""
        return codes.UNSUPPORTED

    def remove_all(self, force: bool = False) -> int:
        """How many objects this node had; they are gone from all nodes. Or a code."""
        objects = self._objects
        if objects is None:
            return codes.INVALID
        try:
            return objects.clear()
        except KvpoolError as error:
            logger.warning("the objects could not be removed: %s", error)
            return codes.code_of(error)

    # ---- inside --------------------------------------------------------------------------------------

    def _put(
        self,
        keys: Sequence[str],
        pieces: Sequence[Pieces],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
        checked: bool = False,
    ) -> list[int]:
        """checked: the configuration was, with the keys of another call."""
        chosen = config if checked else as_config(config, len(keys))
        objects = self._objects
        if objects is None or chosen is None:
            return all_of(codes.INVALID, keys)
        encoded = _encoded(keys)
        fit = [
            bool(key) and 0 < piece.nbytes <= OBJECT_BYTES_MAX
            for key, piece in zip(encoded, pieces, strict=True)
        ]
        if not all(fit):
            return all_of(codes.INVALID, keys)
        work = objects.replace if replace else objects.put
        how = How(chosen.replica_num if chosen.replica_num > 1 else 0, chosen.pin)
        found: list[int] = []
        for at in range(0, len(encoded), KEYS_TOGETHER):
            end = at + KEYS_TOGETHER
            found += work(encoded[at:end], pieces[at:end], how)
        return found

    def _read(
        self,
        keys: Sequence[str],
        hints: Sequence[int],
        target: Callable[[int, int], Pieces | int],
    ) -> list[int]:
        objects = self._objects
        if objects is None:
            return all_of(codes.INVALID, keys)
        encoded = _encoded(keys)
        if len(encoded) <= KEYS_TOGETHER:
            return objects.read(encoded, hints, target)
        found: list[int] = []
        for at in range(0, len(encoded), KEYS_TOGETHER):
            end = at + KEYS_TOGETHER

            def shifted(number: int, size: int, at: int = at) -> Pieces | int:
                return target(at + number, size)

            found += objects.read(encoded[at:end], hints[at:end], shifted)
        return found


class _Staged:
    """Memory of the kernel's and this process's, for one copy."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> tuple[Any, int]:
        self._fd = os.memfd_create("kvpool-staged", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self._size)
        return np.frombuffer(mmap.mmap(self._fd, self._size), np.uint8), self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _limits() -> Limits:
    text = os.environ.get("KVPOOL_MOONCAKE_WAIT_S", "")
    if not text:
        return Limits()
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"KVPOOL_MOONCAKE_WAIT_S is {text}: it must be a number of seconds")
    return Limits(read_s=seconds)


def _encoded(keys: Sequence[str]) -> list[bytes]:
    if isinstance(keys, (str, bytes)):
        raise TypeError("keys must be a list of str")
    return [_encoded_key(key) for key in keys]


def _encoded_key(key: str) -> bytes:
    """What is no text has no key: it is treated as the empty one, which no object has."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        return b""


def _together(keys: list[bytes]) -> list[list[bytes]]:
    return [keys[at : at + KEYS_TOGETHER] for at in range(0, len(keys), KEYS_TOGETHER)]


def _view(value: Any) -> Any:
    """The bytes of any buffer, in its own order. Raises `TypeError`."""
    if isinstance(value, str):
        raise TypeError("a value must be bytes or another buffer, not str")
    view = memoryview(value)
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)


def _worst(found: Sequence[int]) -> int:
    return next((code for code in found if code != codes.OK), codes.OK)


def _of_valid(
    columns: tuple[Sequence[str], Sequence[Any], Sequence[Any]],
    valid: Callable[[Sequence[Any], Sequence[Any]], list[bool]],
    work: Callable[..., list[int]],
) -> list[int]:
    """What `work` gives for the rows that have a key and are valid; -600 for the others, or where columns differ in length.

    columns: keys, addresses, sizes.
    """
    keys, ptrs, sizes = columns
    if not len(keys) == len(ptrs) == len(sizes):
        return all_of(codes.INVALID, keys)
    good = valid(ptrs, sizes)
    if all(good) and all(keys):
        return work(*columns)
    found = all_of(codes.INVALID, keys)
    some = [at for at, key in enumerate(keys) if key and good[at]]
    if some:
        done = work(*[[column[at] for at in some] for column in columns])
        for at, code in zip(some, done, strict=True):
            found[at] = code
    return found


def _run_valid(ptr: int, size: int) -> bool:
    return 0 < ptr < ADDRESSES_END and 0 < size <= BUFFER_BYTES_MAX


def _runs_valid(ptrs: Sequence[int], sizes: Sequence[int]) -> list[bool]:
    return list(map(_run_valid, ptrs, sizes))


def _gathered_valid(ptrs: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> list[bool]:
    return [
        len(some) == len(lengths) > 0 and all(map(_run_valid, some, lengths))
        for some, lengths in zip(ptrs, sizes, strict=True)
    ]


def _ranges_valid(
    ptrs: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], length: int
) -> bool:
    return (
        len(ptrs) == len(sizes) == len(offsets) > 0
        and all(map(_run_valid, ptrs, sizes))
        and all(
            offset >= 0 and offset + size <= length
            for offset, size in zip(offsets, sizes, strict=True)
        )
    )
