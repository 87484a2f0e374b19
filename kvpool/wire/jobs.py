"""Operators' long-running jobs: their specifications and progress.

Each is requested as JSON, with `kind` naming which. A job runs on one node; one that concerns a cluster has the
same name on each of its nodes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from kvpool.decoding import Finite, JsonDecoder
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.wire.frame import Count

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


class EvictJob(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="evict"
):
    """Evict blocks. everything: all of the tenant's on the node; without it something has to limit what goes.

    namespace: only its blocks. keys: only these; with `chains`, also the blocks behind them in their prefix
    chains. tiers: only there; none: in all. unused_s: only blocks not used for this long. least_bytes: the least
    valuable of these, until this many bytes are free. `tiers` alone limits nothing: it goes
    together with `everything` or `least_bytes` too.
    """

    namespace: Digest = ""
    keys: Keys = []
    chains: bool = False
    tiers: list[TierName] = []
    unused_s: Seconds = 0.0
    least_bytes: Count = 0
    everything: bool = False


class WarmJob(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="warm"
):
    """Bring blocks into this node's memory, from any tier or node.

    keys: in prefix order; none: all that node `source` has of the namespace. move: `source` drops the blocks that
    have arrived; if there is room only by dropping other blocks' sole replicas, the job fails, and the rest stays
    there.
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


def job_name(verb: str, number: int) -> str:
    """A job's name, the same from the command line and the REST interface. number: chosen at random, 32 bits."""
    return f"{verb}-{number:08x}"


def verb_of(spec: JobSpec) -> str:
    """What an operator calls it: the command's name. Moving is warming that takes the blocks away from their source."""
    if isinstance(spec, WarmJob) and spec.move:
        return "move"
    return str(spec.__struct_config__.tag)


class JobState(StrEnum):
    """The state of a job."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobView(msgspec.Struct, frozen=True):
    """A job's progress on one node.

    seen, total: blocks examined, and about how many there are to examine; 0: not known. blocks, nbytes: processed
    (evicted, brought, found damaged), or with `dry_run` would be. kept: blocks left out
    because they are pinned. age_s: since its start; took_s: until its end, or up to now.
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
    age_s: Finite
    took_s: Finite
    error: str = ""


_decode_job: JsonDecoder[JobSpec] = JsonDecoder(JobSpec, "a valid job")


def parse_job(raw: bytes) -> JobSpec:
    """Raises `InvalidRequest`."""
    try:
        spec = _decode_job(raw)
    except ProtocolError as error:
        raise InvalidRequest(str(error)) from None
    match spec:
        case EvictJob(least_bytes=least) if least and (
            spec.namespace or spec.keys or spec.unused_s
        ):
            raise InvalidRequest(
                "least_bytes selects by value alone: do not combine it with namespace, keys or unused_s"
            )
        case EvictJob(everything=True) if (
            spec.namespace or spec.keys or spec.unused_s or spec.least_bytes
        ):
            raise InvalidRequest(
                "everything is all of the tenant: do not combine it with namespace, keys, unused_s or least_bytes"
            )
        case EvictJob(keys=[], chains=True):
            raise InvalidRequest("chains need keys: name at least one")
        case EvictJob(everything=False) if not (
            spec.namespace or spec.keys or spec.unused_s or spec.least_bytes
        ):
            raise InvalidRequest(
                "name the blocks to evict (namespace, keys, unused_s or least_bytes), or say that all of the tenant's "
                "are meant (everything)"
            )
        case WarmJob(namespace=""):
            raise InvalidRequest("name the namespace of the blocks")
        case WarmJob(keys=[], source=""):
            raise InvalidRequest("name keys, or the node to copy the blocks from (source)")
        case WarmJob(source="", move=True):
            raise InvalidRequest("to move blocks, name the node to move them from (source)")
    return spec
