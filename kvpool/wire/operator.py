"""Operators' requests to a daemon, over a client's connection or through `OnNode` to any node of the cluster.

Each is declared with `@command`: its answer, the least role of a token, and whose objects it concerns.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

import msgspec

from kvpool.decoding import Finite
from kvpool.types import Intent, IntentAnswer
from kvpool.wire import answers
from kvpool.wire.command import COMMANDS, Scope, command, in_json
from kvpool.wire.frame import AnyDigest, Count, Digest, Integer, Message, ReadOnly
from kvpool.wire.jobs import JobName, JobSpec, JobView

SessionName = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
AnySession = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{0,256}$")]
Changes = Annotated[dict[str, Any], msgspec.Meta(min_length=1, max_length=100)]


@command("viewer", Scope.SHOWN)
class Cluster(ReadOnly, tag=31):
    """What this node knows of the cluster: nodes, namespaces, directory."""


@command("viewer", answer=list[answers.Located])
class Locate(ReadOnly, tag=32):
    """Where these blocks are, by the directory. `digest`: of one namespace; empty: all of the tenant's."""

    keys: bytes
    digest: AnyDigest = b""


@command("operator", Scope.WHOLE, answer=int)
class Drain(Message, tag=33):
    """Have a node copy its sole replicas elsewhere and leave, or with `wanted` false, cancel that."""

    node: str
    wanted: bool = True


@command("admin", answer=int)
class Clear(Message, tag=34):
    """Start a new epoch of a namespace. Engines continue in it, with `fence` only once they reopen it."""

    digest: Digest
    fence: bool = False


@command("admin", answer=int)
class Configure(Message, tag=35):
    """Change settings of a namespace in the whole cluster; null: unchanged.

    `replicas`: how many of each block. `write`: when blocks are written to SSD: back, through, none, or empty:
    each node's default. `ttl_s`: a block that was not used for this long on a node is dropped there; 0: never.
    `ssd_codec`: blosc2, or empty for none. `write_remote`: when blocks are written to object storage: none, or
    back and empty, which are the same. `dram_quota`, `ssd_quota`: quota of each node's memory and disks: bytes,
    or (not whole) a share of the tenant's part; 0: no quota.
    """

    digest: Digest
    replicas: Integer | None = None
    write: str | None = None
    ttl_s: Finite | None = None
    ssd_codec: str | None = None
    dram_quota: Integer | Finite | None = None
    ssd_quota: Integer | Finite | None = None
    write_remote: str | None = None


# The command line evicts by jobs, which can be stopped.
@command(None, answer=int)
class Evict(Message, tag=37):
    """Evict blocks on this node. Leased blocks are dropped when their readers are done.

    `keys`: empty: all. `digest`: of one namespace; empty: all of the tenant's. `tier`: one, or empty: all.
    `masks`: for each key the parts that the node which takes it over has: a block with more parts here stays.
    Empty: no such node.
    """

    keys: bytes
    digest: AnyDigest = b""
    tier: str = ""
    masks: bytes = b""


@command("operator", answer=int, everywhere="POST /v1/pins")
class PinBlocks(Message, tag=38):
    """Set or remove pins of blocks. The answer is how many of the blocks a node has.

    `kind`: `soft` is evicted last, `hard` never, `none` as any other. `digest`: of one namespace; empty: all of the
    tenant's.
    """

    keys: bytes
    kind: Annotated[str, in_json(Literal["soft", "hard", "none"])]
    digest: AnyDigest = b""


# The gateway makes one of each request that it forwards.
@command(None, answer=msgspec.Raw)
class OnNode(Message, tag=100):
    """An operator's request, for any node of the cluster and any tenant. Requests do not block each other.

    `node`: its name; empty: the local one. `request`: the payload of a frame. `tenant`: whose namespaces it is
    about; empty: the connection's. `by`: on whose behalf, for the audit log. `wait_s`: for the other node's
    answer.
    """

    node: str
    request: bytes
    wait_s: Finite
    tenant: str = ""
    by: str = ""


@command("viewer", Scope.SHOWN)
class Inspect(ReadOnly, tag=101):
    """All statistics of this node, for all its tenants."""


@command("viewer", answer=answers.Blocks)
class ListBlocks(ReadOnly, tag=102):
    """Some of this node's blocks, from `cursor` on (empty: from the beginning).

    Fewer than `count` may come with a cursor. `tier`: dram, ssd or device. `digest`: of one namespace; empty:
    all of the tenant's.
    """

    tier: str
    cursor: str
    count: Count
    digest: AnyDigest = b""


@command("viewer", answer=list[answers.Block], everywhere="POST /v1/blocks")
class ShowBlocks(ReadOnly, tag=103):
    """Nodes' replicas of these blocks, tier by tier. Where blocks are by the directory: `POST /v1/operator/locate`.

    digest: empty for all namespaces of the tenant.
    """

    digest: AnyDigest
    keys: bytes


@command("operator", answer=JobView)
class BeginJob(Message, tag=104):
    """`spec`: JSON, one of `kvpool.wire.jobs.JobSpec`. `job`: its name, new to this node.

    JSON: a `kvpool.wire.jobs.JobView`.
    """

    job: Annotated[str, in_json(JobName)]
    spec: Annotated[bytes, in_json(JobSpec)]
    dry_run: bool = False


@command("viewer", Scope.SHOWN, answer=list[JobView])
class Jobs(ReadOnly, tag=105):
    """`jobs`: names; none: all that the node remembers. JSON: an array of `kvpool.wire.jobs.JobView`."""

    jobs: list[str] = msgspec.field(default_factory=list)


@command("operator", Scope.JOB, answer=int)
class StopJob(Message, tag=106):
    """Stop a running job."""

    job: Annotated[str, in_json(JobName)]


@command("viewer", Scope.SHOWN, answer=answers.Events)
class Events(ReadOnly, tag=107):
    """The events after number `after`; if there are none, those of the next `wait_s`."""

    after: Count
    count: Count
    # A poll that waits would hold one of the gateway's places.
    wait_s: Annotated[Finite, in_json(None)] = 0.0


@command("viewer", Scope.WHOLE, answer=list[answers.Setting], everywhere="GET /v1/config")
class Settings(ReadOnly, tag=108):
    """The current settings of nodes; of secrets only whether they are set."""


@command("admin", Scope.WHOLE, answer=int, everywhere="PATCH /v1/config")
class ChangeSettings(Message, tag=109):
    """Change settings of running nodes, by name. They apply until the daemons end."""

    changes: Annotated[bytes, in_json(Changes)]


# It takes spans away from the collector that they are for.
@command(None)
class TakeSpans(Message, tag=121):
    """The oldest finished spans of this node, `count` at most; they are removed there.

    JSON: spans, left, dropped; see `kvpool.telemetry.spans.Batch`.
    """

    count: Count


@command("viewer", answer=answers.Sessions, everywhere="GET /v1/sessions")
class ListSessions(ReadOnly, tag=142):
    """The tenant's sessions that nodes know, by ascending names, from `after` on (empty: from the beginning)."""

    after: Annotated[str, in_json(AnySession)] = ""
    count: Count = 100


@command("viewer", answer=answers.SessionDetail | None, everywhere="GET /v1/sessions/{session}")
class ShowSession(ReadOnly, tag=143):
    """A session and the prompts of its agents, or null from a node that does not know it."""

    session: Annotated[str, in_json(SessionName)]


@command("operator", answer=int, everywhere="DELETE /v1/sessions/{session}")
class EndSession(Message, tag=144):
    """End a session: its blocks go before others. The answer is 1 from a node that knew it."""

    session: Annotated[str, in_json(SessionName)]


@command("operator", answer=IntentAnswer, everywhere="POST /v1/intents")
class IntendBlocks(Message, tag=147):
    """Pin, keep, prefetch, expend or drop blocks of a prompt or a session; each node answers for how many it does.

    A prompt: `digest` of its namespace and `keys`, from the first block on. `intent`: `pin`: evicted last, or with `hard`
    never, until `unpin`; `keep`: the same as a soft pin, in memory, for `for_s` seconds; `prefetch`: brought into memory;
    `expend`: evicted before others until they are read; `drop`: removed. `digest`: with a session only its blocks in that
    namespace, or empty: all. `dry_run`: only answer.
    """

    intent: Annotated[str, in_json(Intent)]
    digest: AnyDigest = b""
    keys: bytes = b""
    session: Annotated[str, in_json(AnySession)] = ""
    hard: bool = False
    for_s: Finite = 0.0
    dry_run: bool = False


@command("viewer")
class HitCurves(ReadOnly, tag=146):
    """What a tenant has of this node's memory and disks, and the reuse distances of its reads.

    JSON: a `kvpool.telemetry.hit_curve.Memory`.
    """


@command("viewer", Scope.NAMED)
class ListAccounts(ReadOnly, tag=150):
    """Periods of tenants' accounts that began at `since_s` or later and before `until_s`, in seconds since 1970, in their
    order. JSON: a `kvpool.telemetry.receipts.PeriodRows`.

    `from_sequence`, `from_row`: from this row on, of the period with this sequence number: as the page before says.
    `tenants`: empty: all. `digest`: of one namespace; empty: all. `total`: one row for each namespace instead, of all periods.
    """

    since_s: Finite
    until_s: Finite
    from_sequence: Count
    count: Count
    tenants: list[str] = msgspec.field(default_factory=list)
    digest: AnyDigest = b""
    total: bool = False
    from_row: Count = 0


@command("viewer", Scope.NAMED)
class ListReceipts(ReadOnly, tag=151):
    """The receipts of requests that began at `since_s` or later and before `until_s`, the last `count` of them.
    JSON: a `kvpool.telemetry.receipts.Receipts`.

    `request`: those whose label contains it; empty: all. The rest as in `ListAccounts`.
    """

    since_s: Finite
    until_s: Finite
    count: Count
    request: str = ""
    tenants: list[str] = msgspec.field(default_factory=list)
    digest: AnyDigest = b""


OperatorMessage: Any = Union[tuple(COMMANDS)]  # noqa: UP007  (made of the declarations)
