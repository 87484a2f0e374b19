"""The values of `mooncake.store`: configurations, enumerations, descriptors and buffers, with its names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType

import numpy as np

Keys = Sequence[str]
Ints = Sequence[int]
"""Addresses, sizes or offsets, one a key or a range."""
Lists = Sequence[Ints]
"""The same, several a key."""


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


@dataclass(slots=True, eq=False)
class ReplicateConfig:
    """How an object is to be stored. `replica_num`, `with_hard_pin` and the soft pin are heeded; the preferred segments,
    the groups and the kinds of replica that the pool does not have are accepted and ignored.
    """

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    preferred_nof_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: Sequence[str] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Raises `TypeError` for another type, as programs expect."""
        wanted = _TYPES.get(name, object)
        good = isinstance(value, wanted) and (not isinstance(value, int) or 0 <= value < 1 << 64)
        if not good:
            raise TypeError(f"{name} cannot be {value!r}")
        object.__setattr__(self, name, value)

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


Config = ReplicateConfig | None

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


@dataclass(frozen=True, slots=True)
class BufferDescriptor:
    """size: bytes of the object. transport_endpoint: the node. buffer_address: always 0, blocks have no fixed one."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """Of a replica in memory."""

    buffer_descriptor: BufferDescriptor


@dataclass(frozen=True, slots=True)
class DiskDescriptor:
    """Of a replica on a disk of the node. file_path: empty, objects have no files of their own."""

    object_size: int
    file_path: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """Where the nearest replica of an object is: memory, here or on another node, or this node's disk."""

    _size: int
    _endpoint: str
    _on_disk: bool
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return not self._on_disk

    def is_disk_replica(self) -> bool:
        """Of a shared file system: the pool has none."""
        return False

    def is_local_disk_replica(self) -> bool:
        return self._on_disk

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(BufferDescriptor(self._size, self._endpoint))

    def get_disk_descriptor(self) -> DiskDescriptor:
        return DiskDescriptor(self._size)


def as_config(config: Config, keys: int) -> Config:
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
