"""What `import mooncake.store` gives when the facade is installed."""

from kvpool.engine_plugins.mooncake.store import MooncakeDistributedStore
from kvpool.engine_plugins.mooncake.values import (
    BufferDescriptor,
    BufferHandle,
    DiskDescriptor,
    MemoryDescriptor,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
)

__all__ = [
    "BufferDescriptor",
    "BufferHandle",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]
