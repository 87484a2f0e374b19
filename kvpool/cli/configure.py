"""`kvpool configure`: changes settings of a namespace."""

from __future__ import annotations

from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, Digest, Session, asks, option
from kvpool.errors import InvalidRequest


@asks(panel=OPERATORS)
def configure(
    at: Session,
    digest: Digest,
    replicas: Annotated[
        int | None, option("Number of nodes that should hold each block.", min=1, metavar="N")
    ] = None,
    write: Annotated[
        str | None,
        option(
            "When blocks are written to SSD: through (after the put), back (before eviction), none; or "
            "default: as each node is configured.",
            metavar="MODE",
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        option(
            "Drop blocks that were not used for this long: 30s, 15m, 12h, 7d; 0: never.",
            metavar="TIME",
        ),
    ] = None,
    ssd_codec: Annotated[
        str | None, option("Compression of blocks on SSD: blosc2, none.", metavar="CODEC")
    ] = None,
    write_remote: Annotated[
        str | None,
        option(
            "When blocks are written to object storage: back (before eviction), none.",
            metavar="MODE",
        ),
    ] = None,
    quota: Annotated[
        str | None,
        option(
            "Quota on each node, by tier: dram=20%,ssd=50GiB, of the tenant's part; none: no quota.",
            metavar="TIER=SIZE[,...]",
        ),
    ] = None,
) -> None:
    """Change settings of a namespace, on all nodes. Settings that are not given stay unchanged.

    Example: kvpool configure 3fa9 --replicas 2 --write through --ttl 12h
    """
    from kvpool.cli.naming import period, quotas

    if all(given is None for given in (replicas, write, ttl, ssd_codec, quota, write_remote)):
        raise InvalidRequest(
            "name at least one setting: --replicas, --write, --ttl, --ssd-codec, --write-remote or --quota"
        )
    of_tiers = {} if quota is None else quotas(quota)
    ttl_s = None if ttl is None else period(ttl)
    chosen = at.resolve(digest)
    with base.in_doubt("namespaces"):
        at.client.configure(
            chosen,
            replicas=replicas,
            write="" if write == "default" else write,
            ttl_s=ttl_s,
            ssd_codec="" if ssd_codec == "none" else ssd_codec,
            dram_quota=of_tiers.get("dram"),
            ssd_quota=of_tiers.get("ssd"),
            write_remote=write_remote,
        )
    text = f"changed the settings of namespace {chosen.hex()} of tenant {at.tenant} on all nodes; see `kvpool namespaces`"
    if replicas is not None and replicas > 1:
        text += "\nnew blocks are replicated at once, existing blocks in the background"
    at.show({"namespace": chosen.hex(), "configured": True}, text)
