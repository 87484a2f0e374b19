"""The values of `mooncake.store`: configurations, enumerations, descriptors and buffers, with its names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import NoneType

import numpy as np


class SoftPinAction(Enum):
    """What a put does to the soft pin of its object."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(Enum):
    """What an object is, as its writer says. Not interpreted."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(Enum):
    """Of a replica; one that is told of is `COMPLETE`."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class ReplicateConfig:
    """How an object is to be stored. `replica_num`, `with_hard_pin` and the soft pin are heeded; the preferred segments,
    the groups and the kinds of replica that the pool does not have are accepted and ignored.
    """

    __slots__ = (
        "data_type",
        "dfs_replica_num",
        "group_ids",
        "nof_replica_num",
        "prefer_alloc_in_same_node",
        "preferred_nof_segments",
        "preferred_segment",
        "preferred_segments",
        "replica_num",
        "soft_pin_action",
        "soft_pin_ttl_ms",
        "with_hard_pin",
    )

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms: int | None = None
        self.with_hard_pin = False
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []
        self.preferred_nof_segments: list[str] = []
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids: list[str] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Raises `TypeError` for another type, as programs expect."""
        wanted = _TYPES.get(name, object)
        good = isinstance(value, wanted) and (not isinstance(value, int) or 0 <= value < 1 << 64)
        if not good:
            raise TypeError(f"{name} cannot be {value!r}")
        super().__setattr__(name, value)

    def valid_for(self, keys: int) -> bool:
        """Whether it may be used for so many keys: a group each, or none; a time to live only with a soft pin."""
        if self.group_ids is not None and len(self.group_ids) != keys:
            return False
        if self.soft_pin_ttl_ms is not None and self.soft_pin_action is not SoftPinAction.ENABLE:
            return False
        return self.replica_num + self.nof_replica_num + self.dfs_replica_num > 0

    @property
    def pin(self) -> str:
        """The pool's kind of pin, or empty."""
        if self.with_hard_pin:
            return "hard"
        return "soft" if self.soft_pin_action is SoftPinAction.ENABLE else ""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {getattr(self, name)}" for name in self.__slots__)
        return f"ReplicateConfig: {{ {shown} }}"


_TYPES: dict[str, type | tuple[type, ...]] = {
    "replica_num": int,
    "nof_replica_num": int,
    "dfs_replica_num": int,
    "soft_pin_action": SoftPinAction,
    "soft_pin_ttl_ms": (int, NoneType),
    "with_hard_pin": int,
    "preferred_segment": str,
    "preferred_segments": list,
    "preferred_nof_segments": list,
    "prefer_alloc_in_same_node": int,
    "data_type": ObjectDataType,
    "group_ids": (list, tuple, NoneType),
}


class BufferHandle(bytearray):
    """An object's bytes, a copy that belongs to the caller. `memoryview`, numpy and torch take it."""

    def ptr(self) -> int:
        """The address of the first byte, valid while this lives."""
        return int(np.frombuffer(self, np.uint8).ctypes.data)

    def size(self) -> int:
        """In bytes."""
        return len(self)


class BufferDescriptor:
    """size: bytes of the object. transport_endpoint: the node. buffer_address: always 0, blocks have no fixed one."""

    __slots__ = ("buffer_address", "size", "transport_endpoint")

    def __init__(self, size: int, transport_endpoint: str) -> None:
        self.size = size
        self.transport_endpoint = transport_endpoint
        self.buffer_address = 0


class MemoryDescriptor:
    """Of a replica in memory."""

    __slots__ = ("buffer_descriptor",)

    def __init__(self, size: int, transport_endpoint: str) -> None:
        self.buffer_descriptor = BufferDescriptor(size, transport_endpoint)


class DiskDescriptor:
    """Of a replica on a disk of the node. file_path: empty, objects have no files of their own."""

    __slots__ = ("file_path", "object_size")

    def __init__(self, size: int) -> None:
        self.object_size = size
        self.file_path = ""


class ReplicaDescriptor:
    """Where the nearest replica of an object is: memory, here or on another node, or this node's disk."""

    __slots__ = ("_endpoint", "_on_disk", "_size", "status")

    def __init__(self, size: int, endpoint: str, *, on_disk: bool) -> None:
        self.status = ReplicaStatus.COMPLETE
        self._size = size
        self._endpoint = endpoint
        self._on_disk = on_disk

    def is_memory_replica(self) -> bool:
        return not self._on_disk

    def is_disk_replica(self) -> bool:
        """Of a shared file system: the pool has none."""
        return False

    def is_local_disk_replica(self) -> bool:
        return self._on_disk

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(self._size, self._endpoint)

    def get_disk_descriptor(self) -> DiskDescriptor:
        return DiskDescriptor(self._size)


def as_config(config: ReplicateConfig | None, keys: int) -> ReplicateConfig | None:
    """The configuration to use for so many keys; None: it cannot be used. Raises `TypeError` for other things."""
    if config is None:
        return DEFAULT_CONFIG
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
    return config if config.valid_for(keys) else None


DEFAULT_CONFIG = ReplicateConfig()


def all_of(code: int, keys: Sequence[object]) -> list[int]:
    """The same code for each key."""
    return [code] * len(keys)
