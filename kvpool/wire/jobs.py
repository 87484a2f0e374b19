"""What operators have done that takes a while: what they ask for, and how far it has come.

Each is asked for as JSON, with `kind` naming which. A job runs on one node; one that concerns a cluster has the same
name on each of its nodes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from kvpool.errors import InvalidRequest

JOB_KEYS_MAX = 1 << 16
"""Blocks that one job may name."""

Hex = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*$", max_length=64)]
Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$", description="A block's key, hex.")]
Keys = Annotated[list[Key], msgspec.Meta(max_length=JOB_KEYS_MAX)]
Digest = Annotated[
    str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?$", description="A namespace's digest, hex.")
]
NodeName = Annotated[str, msgspec.Meta(max_length=63, description="A node's name.")]
JobName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z-]{1,64}$")]
TierName = Literal["dram", "ssd", "device"]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10 * 365 * 86_400)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class EvictJob(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="evict"
):
    """Give blocks up. Without any limit: all of the tenant's on the node.

    namespace: only its blocks. keys: only these; with `chains`, and what follows them in their prefix chains. tiers:
    only there; none: in all. unused_s: only what nobody has used for so long. least_bytes: of all that, what is worth
    least, until so many bytes are free; not together with the others but `tiers`.
    """

    namespace: Digest = ""
    keys: Keys = []
    chains: bool = False
    tiers: list[TierName] = []
    unused_s: Seconds = 0.0
    least_bytes: Count = 0


class WarmJob(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="warm"
):
    """Have blocks in this node's memory, from wherever they are.

    keys: in prefix order; none: all that node `source` has of the namespace. move: `source` gives up what has come;
    where there is no room for more that nobody else's only replicas have, the job fails, and the rest stays there.
    """

    namespace: Digest
    keys: Keys = []
    source: NodeName = ""
    move: bool = False


class ScrubJob(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="scrub"
):
    """Read all blocks on this node's disks and drop those that do not match their checksums."""


JobSpec = EvictJob | WarmJob | ScrubJob


class JobState(StrEnum):
    """How far a job is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobView(msgspec.Struct, frozen=True):
    """How far a job has come on one node.

    seen, total: blocks looked at, and about how many there are to look at; 0: not known. blocks, nbytes: of what it
    was for (given up, brought, found broken), or with `dry_run` would be. kept: blocks that it would have been for,
    if they were not pinned. age_s: since it began; took_s: until it ended, or up to now.
    """

    job: str
    node: str
    kind: str
    state: JobState
    dry_run: bool
    tenant: str
    by: str
    seen: int
    total: int
    blocks: int
    nbytes: int
    kept: int
    age_s: float
    took_s: float
    error: str = ""


def parse_job(raw: bytes) -> JobSpec:
    """Raises `InvalidRequest`."""
    try:
        spec: JobSpec = msgspec.json.decode(raw, type=JobSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"this is no job: {error}") from None
    match spec:
        case EvictJob(least_bytes=least) if least and (
            spec.namespace or spec.keys or spec.unused_s
        ):
            raise InvalidRequest(
                "least_bytes chooses by worth alone: not with namespace, keys or unused_s"
            )
        case EvictJob(keys=[], chains=True):
            raise InvalidRequest("chains begin at keys: name some")
        case WarmJob(namespace=""):
            raise InvalidRequest("name the namespace whose blocks are wanted")
        case WarmJob(keys=[], source=""):
            raise InvalidRequest("name keys, or the node whose blocks are wanted (source)")
        case WarmJob(source="", move=True):
            raise InvalidRequest("to move blocks, name the node to move them from (source)")
    return spec
