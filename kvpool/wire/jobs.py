"""Operators' long-running jobs: their specifications and progress.

Each kind is declared once, as a struct of `JobSpec`. From it come what is requested as JSON, with `kind` naming which,
the body of `POST /v1/jobs` with its description, and `kvpool job start KIND` with its options and help. What a job does
is in `kvpool.daemon.ops.jobs`. A job runs on one node; one that concerns a cluster has the same name on each of its
nodes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from kvpool.decoding import Finite, JsonDecoder
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.wire.frame import Count

JOB_KEYS_MAX = 1 << 16
"""Blocks that one job may name."""

Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$", description="A block's key, hex.")]
Keys = Annotated[
    list[Key],
    msgspec.Meta(max_length=JOB_KEYS_MAX, extra={"typed": "keys"}, description="Block keys."),
]
Digest = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([0-9a-f]{32})?$",
        description="A namespace's digest, hex.",
        extra={"typed": "digest"},
    ),
]
NodeName = Annotated[str, msgspec.Meta(max_length=63, description="A node's name.")]
JobName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z-]{1,64}$")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10 * 365 * 86_400, extra={"typed": "time"})]
Size = Annotated[Count, msgspec.Meta(extra={"typed": "size"})]


class TierName(StrEnum):
    """A tier whose blocks a job may name."""

    DRAM = "dram"
    SSD = "ssd"
    DEVICE = "device"


def typed(option: str, description: str, metavar: str | None = None) -> msgspec.Meta:
    """The option of the command line that a field of a job is given by, and what it is."""
    return msgspec.Meta(description=description, extra={"option": option, "metavar": metavar})


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of the kinds of jobs."""


class EvictJob(Spec, frozen=True, tag="evict"):
    """Evict blocks on all nodes or some. Blocks with hard pins stay.

    What goes has to be limited, by a namespace, keys, a time without use or a size, unless all of the tenant's blocks are
    asked for. A tier alone limits nothing.
    """

    everywhere: ClassVar = True
    words: ClassVar = ("evicted", "would be evicted")
    examples: ClassVar = (
        "kvpool job start evict --namespace 3fa9 --unused-s 2h --node host-7 --dry-run",
        "kvpool job start evict 00112233445566778899aabbccddeeff --chain",
    )

    namespace: Annotated[Digest, typed("--namespace", "Only in this namespace.", "DIGEST")] = ""
    keys: Keys = []
    chains: Annotated[
        bool, typed("--chain", "Also evict the blocks after these in their prefix chains.")
    ] = False
    tiers: Annotated[
        list[TierName], typed("--tier", "Only from this tier; may be repeated.", "dram|ssd|device")
    ] = []
    unused_s: Annotated[
        Seconds, typed("--unused-s", "Only blocks not used for this long: 30m, 2h.", "TIME")
    ] = 0.0
    least_bytes: Annotated[
        Size,
        typed(
            "--least",
            "Evict the least valuable blocks until this much is freed on each node: 10GiB. With --tier only.",
            "SIZE",
        ),
    ] = 0
    everything: Annotated[bool, typed("--all", "All blocks of the tenant.")] = False


class WarmJob(Spec, frozen=True, tag="warm"):
    """Bring blocks into a node's memory, from any tier or node, before engines request them.

    A node that has room for moved blocks only by dropping other blocks' sole replicas fails; the rest stays at the
    source.
    """

    everywhere: ClassVar = False
    words: ClassVar = ("brought", "would be brought")
    examples: ClassVar = (
        "kvpool job start warm 3fa9 00112233445566778899aabbccddeeff --node host-7",
        "kvpool job start warm 3fa9 --from host-7 --move --node host-8",
    )

    namespace: Digest
    keys: Keys = []
    source: Annotated[
        NodeName, typed("--from", "Without keys: all blocks of the namespace on this node.", "NAME")
    ] = ""
    move: Annotated[
        bool, typed("--move", "Drop the blocks that have arrived at the node they came from.")
    ] = False


class ScrubJob(Spec, frozen=True, tag="scrub"):
    """Compare all blocks on a node's disks with their checksums. Exit status 1 if some were damaged.

    Damaged blocks are dropped; engines compute them again.
    """

    everywhere: ClassVar = False
    words: ClassVar = ("bad and dropped", "")
    examples: ClassVar = ("kvpool job start scrub --node host-7 --no-wait",)


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
    SILENT = "silent"
    """On a node that does not answer any more, for whoever follows the job."""


class Progress(msgspec.Struct, kw_only=True):
    """What a job has done."""

    seen: int = 0
    """Blocks examined."""
    total: int = 0
    """About how many there are to examine; 0: not known."""
    blocks: int = 0
    """Processed (evicted, brought, found damaged), or with `dry_run` would be."""
    nbytes: int = 0
    kept: int = 0
    """Blocks left out because they are pinned."""


class JobView(Progress, kw_only=True):
    """A job's progress on one node."""

    job: str
    node: str
    kind: str
    state: JobState = JobState.RUNNING
    dry_run: bool
    tenant: str
    by: str
    age_s: Finite = 0.0
    """Since its start."""
    took_s: Finite = 0.0
    """Until its end, or up to now."""
    error: str = ""


_decode_job: JsonDecoder[JobSpec] = JsonDecoder(JobSpec, "a valid job")


def parse_job(raw: bytes) -> JobSpec:
    """Raises `InvalidRequest`."""
    try:
        spec = _decode_job(raw)
    except ProtocolError as error:
        raise InvalidRequest(str(error)) from None
    if problem := _problem(spec):
        raise InvalidRequest(problem)
    return spec


def _problem(spec: JobSpec) -> str:
    """Why the fields of a job do not go together, or an empty text."""
    match spec:
        case EvictJob():
            chosen = bool(spec.namespace or spec.keys or spec.unused_s)
            if spec.least_bytes and chosen:
                return "`least_bytes` selects by value alone: do not combine it with `namespace`, keys or `unused_s`"
            if spec.everything and (chosen or spec.least_bytes):
                return "`everything` is all of the tenant: do not combine it with `namespace`, keys, `unused_s` or `least_bytes`"
            if spec.chains and not spec.keys:
                return "`chains` needs keys: name at least one"
            if not (chosen or spec.least_bytes or spec.everything):
                return "name the blocks to evict: keys, `namespace`, `unused_s` or `least_bytes`; or `everything` of the tenant"
        case WarmJob(namespace=""):
            return "name the namespace of the blocks"
        case WarmJob(keys=[], source=""):
            return "name keys, or the node to copy all blocks from: `source`"
        case WarmJob(source="", move=True):
            return "to `move` blocks, name the node that they are on: `source`"
    return ""
