"""How much of a prompt each node could provide, for routers.

This node's blocks are known, others' come from the directory, in one lookup for the whole prompt. A hint;
nothing is leased or pulled by it. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import Tenant, directory_digest
from kvpool.daemon.core.requests import parse_parts
from kvpool.errors import Unavailable
from kvpool.placement.directory.base import BATCH_MAX, TIERS, Entry
from kvpool.placement.prefix_lookup import reach, usable_by_masks
from kvpool.placement.records import epoch_digest
from kvpool.types import PartSpec

WAIT_S_MAX = 5.0
_IN_MEMORY = (TIERS["dram"], TIERS["device"])


async def prefixes(
    cluster: ClusterMember, tenant: Tenant, base: bytes, keys: Sequence[bytes], wait_s: float
) -> dict[str, tuple[int, int]]:
    """For each node by name the blocks that are usable from its memory, and from its memory and disks.

    base: digest of the namespace without its epoch; this node need not have it open. Nodes without any block
    are left out, and so are the others if the directory does not answer in time.
    """
    epochs = tenant.epochs.get(base)
    entry = cluster.view.namespaces.get((tenant.name, base.hex()))
    if epochs:
        digest, specs = epochs[-1].directory_digest, epochs[-1].parts
    elif entry is not None:
        digest = directory_digest(tenant.name, epoch_digest(base, entry.epoch))
        specs = tuple(parse_parts(base, entry.fields.encode(), list(entry.parts)))
    else:
        return {}
    found = {}
    if here := _here(cluster, digest, specs, keys):
        found[cluster.config.node] = here
    entries = await _elsewhere(cluster, digest, len(specs), keys, wait_s)
    living = cluster.living
    for incarnation, lengths in reach(specs, keys, entries).items():
        if incarnation in living:
            found[living[incarnation].record.node] = lengths
    return found


def _here(
    cluster: ClusterMember, digest: bytes, specs: Sequence[PartSpec], keys: Sequence[bytes]
) -> tuple[int, int] | None:
    """This node's own part, exactly; None: nothing."""
    memory = [0] * len(keys)
    disks = memory
    for tier, held in cluster.announcing.holdings.items():
        parts, masks = held.masks(digest, keys) if tier != TIERS["gpu"] else (0, [])
        if parts and tier in _IN_MEMORY:
            memory = [old | new for old, new in zip(memory, masks, strict=True)]
        elif parts:
            disks = [old | new for old, new in zip(disks, masks, strict=True)]
    both = [old | new for old, new in zip(memory, disks, strict=True)]
    lengths = usable_by_masks(specs, keys, memory), usable_by_masks(specs, keys, both)
    return lengths if lengths[1] else None


async def _elsewhere(
    cluster: ClusterMember, digest: bytes, parts: int, keys: Sequence[bytes], wait_s: float
) -> list[list[Entry]]:
    """The directory's entries of the first keys, up to the first one without any."""
    found: list[list[Entry]] = []
    directory = cluster.directory
    if directory is None or not cluster.living:
        return found
    try:
        async with asyncio.timeout(min(wait_s, WAIT_S_MAX)):
            for at in range(0, len(keys), BATCH_MAX):
                found += await directory.locate(digest, parts, keys[at : at + BATCH_MAX])
                if not found[-1]:
                    break
    except (Unavailable, TimeoutError):
        pass  # the part known until then is a prefix, too
    return found
