"""All tiers keep the contract: in a dict, on a disk, in device memory, in object storage."""

import asyncio
import importlib.util
from functools import partial
from pathlib import Path

import pytest

from kvpool.config import DaemonConfig, DeviceConfig, DiskConfig
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.tier import LocalTier, SharedTier
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.tiers.tier_state import ObjectTierState, TierState
from kvpool.placement.catalog.embedded import EmbeddedCatalog
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.wire.frame import PROTOCOL_VERSION
from tests.contract.suites.memory_tier import MemoryTier, SharedMemoryTier
from tests.contract.suites.tier import CAPACITY_BYTES, Memory, TierContract, make_node, until
from tests.support.numpy_device import NumpyDevice

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="device processes need torch"
)

needs_obstore = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None, reason="object storage needs obstore"
)


class TestMemory(TierContract):
    async def open(self, memory: Memory, folder: Path) -> LocalTier:
        return MemoryTier({0: memory.bytes}, CAPACITY_BYTES)


class TestSharedMemory(TierContract):
    async def open(self, memory: Memory, folder: Path) -> SharedTier:
        return SharedMemoryTier({0: memory.bytes}, CAPACITY_BYTES)


SECRET = b"a secret for the blocks at rest"


class OnDisk(TierContract):
    durable = True
    disks = 1
    encryption: tuple[bytes, ...] = ()

    async def open(self, memory: Memory, folder: Path) -> LocalTier:
        paths = [folder / f"disk{number}" for number in range(self.disks)]
        for path in paths:
            path.mkdir(exist_ok=True)
        size = CAPACITY_BYTES + (3 << 20) // self.disks  # files and their index take some of it
        config = DaemonConfig(
            socket="/kvpool.sock", ssd=tuple(DiskConfig(str(path), size) for path in paths)
        )

        async def adopt(record: TableRecord) -> NamespaceState | None:
            return memory.namespace if record.epoch == memory.namespace.epoch else None

        tier = SsdTier(
            *(config, memory.node, memory.clock, partial(make_node, packed=True), adopt),
            lambda: list(self.encryption),
        )
        await tier.start(memory.segments)

        async def serves() -> bool:
            return all(device.state is TierState.SERVING for device in tier.devices)

        await until(serves)  # a slow machine's disks open later than a daemon waits for
        tier.begin()
        return tier


class TestSsd(OnDisk):
    pass


class TestTwoDisks(OnDisk):
    disks = 2


class TestEncryptedSsd(OnDisk):
    encryption = (SECRET,)


class TestDevice(TierContract):
    async def open(self, memory: Memory, folder: Path) -> LocalTier:
        config = DeviceConfig("cpu", CAPACITY_BYTES)
        tier = DeviceTier(config, memory.node, memory.clock, make_node)
        tier.divide()
        tier.begin()
        tier.began(NumpyDevice({0: memory.bytes}, {0: CAPACITY_BYTES}))
        return tier


@pytest.mark.torch
@needs_torch
class TestDeviceProcess(TierContract):
    device = "cpu"

    async def open(self, memory: Memory, folder: Path) -> LocalTier:
        config = DeviceConfig(self.device, CAPACITY_BYTES)
        tier = DeviceTier(config, memory.node, memory.clock, make_node)
        tier.start(memory.segments)

        async def serves() -> bool:
            return tier.serving

        await until(serves)
        return tier


@needs_obstore
class TestObject(TierContract):
    durable = True
    encryption: tuple[bytes, ...] = ()

    async def open(self, memory: Memory, folder: Path) -> SharedTier:
        config = DaemonConfig(
            socket="/kvpool.sock",
            object_store=f"file://{folder}/objects",
            object_bytes_max=CAPACITY_BYTES,
        )
        membership = StaticMembership(StaticCluster(config.cluster), protocol=PROTOCOL_VERSION)
        tier = ObjectTier(
            *(config, memory.node, membership, EmbeddedCatalog(memory.clock), memory.clock),
            encryption=lambda: list(self.encryption),
        )
        await tier.start(memory.segments)

        async def serves() -> bool:
            stats = tier.stats()[0]
            return stats.state == ObjectTierState.SERVING and stats.stocked

        await until(serves)
        await asyncio.sleep(0)
        return tier


class TestEncryptedObject(TestObject):
    encryption = (SECRET,)


DECIDED_BEFORE = ("empty_tier", "storing_again", "gave_up_before", "new_epoch", "two_that_store")
"""What the control process decides without asking: tested above, where no process has to start, or one less."""

for name in [name for name in dir(TierContract) if name.startswith("test_")]:
    if any(word in name for word in DECIDED_BEFORE):
        for variant in (TestTwoDisks, TestDeviceProcess):
            setattr(variant, name, None)
