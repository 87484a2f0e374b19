"""What operators ask a daemon, over a client's connection or through `OnNode` any node of the cluster.

type  message          direction             answer
----  ---------------  --------------------  ----------------
31    Cluster          operator → daemon     Bytes: a JSON object
32    Locate           operator → daemon     Bytes: a JSON object
33    Drain            operator → daemon     Done
34    Clear            operator → daemon     Done: the new epoch
35    Configure        operator → daemon     Done
37    Evict            operator → daemon     Done: blocks that went
38    PinBlocks        operator → daemon     Done: blocks pinned or unpinned
39    Scrub            operator → daemon     Bytes: a JSON object
100   OnNode           operator → daemon     what the request in it is answered with
101   Inspect          operator → daemon     Bytes: a JSON object
102   ListBlocks       operator → daemon     Bytes: a JSON object
103   ShowBlocks       operator → daemon     Bytes: a JSON array
104   BeginJob         operator → daemon     Bytes: a JSON object
105   Jobs             operator → daemon     Bytes: a JSON array
106   StopJob          operator → daemon     Done: 1 if it was running
107   Events           operator → daemon     Bytes: a JSON object
108   Settings         operator → daemon     Bytes: a JSON array
109   ChangeSettings   operator → daemon     Done
121   TakeSpans        operator → daemon     Bytes: a JSON object
"""

from __future__ import annotations

import msgspec

from kvpool.wire.frame import Message


class Cluster(Message, tag=31):
    """What this node knows of the cluster: nodes, namespaces, directory."""


class Locate(Message, tag=32):
    """Where these blocks are, by the directory. `digest`: of one namespace; empty: all of the tenant's."""

    keys: bytes
    digest: bytes = b""


class Drain(Message, tag=33):
    """Have a node copy its sole replicas elsewhere and leave, or with `wanted` false, call that off."""

    node: str
    wanted: bool = True


class Clear(Message, tag=34):
    """Begin a new epoch of a namespace. Engines go on in it, but with `fence` only once they reopen it."""

    digest: bytes
    fence: bool = False


class Configure(Message, tag=35):
    """Change settings of a namespace in the whole cluster; null: that one stays as it is.

    `replicas`: how many of each block. `write`: when blocks go to SSD: back, through, none, or empty: as each
    node does by default. `ttl_s`: a block that was not used for so long on a node is not found there any
    more; 0: never. `ssd_codec`: blosc2, or empty for none. `write_remote`:
    when blocks go to object storage: none, or back and empty, which are the same. `dram_quota`, `ssd_quota`: what its blocks may
    take of each node's memory and disks: bytes, or (not whole) a share of the tenant's part; 0: no quota.
    """

    digest: bytes
    replicas: int | None = None
    write: str | None = None
    ttl_s: float | None = None
    ssd_codec: str | None = None
    dram_quota: int | float | None = None
    ssd_quota: int | float | None = None
    write_remote: str | None = None


class Evict(Message, tag=37):
    """Give blocks up on this node, as if there were no room. What is leased goes when its readers are done.

    `keys`: empty: all. `digest`: of one namespace; empty: all of the tenant's. `tier`: one, or empty: all. `masks`:
    for each key the parts that whoever takes it over has: a block of which more is here stays. Empty: nobody does.
    """

    keys: bytes
    digest: bytes = b""
    tier: str = ""
    masks: bytes = b""


class PinBlocks(Message, tag=38):
    """As `Pin`, by an operator. `digest`: of one namespace; empty: all of the tenant's."""

    keys: bytes
    kind: str
    digest: bytes = b""


class Scrub(Message, tag=39):
    """Compare about `count` blocks on this node's disks with their checksums, from a cursor on (at first 0).

    The answer: `seen`, `bad` (dropped), and the next `cursor`, null at the end.
    """

    cursor: int
    count: int


class OnNode(Message, tag=100):
    """An operator's request, for any node of the cluster and any tenant. One does not hold another.

    `node`: its name; empty: the one that is asked. `request`: the payload of a frame. `tenant`: whose namespaces it is
    about; empty: the connection's. `by`: on whose behalf, for the audit log. `wait_s`: for the other node's answer.
    """

    node: str
    request: bytes
    wait_s: float
    tenant: str = ""
    by: str = ""


class Inspect(Message, tag=101):
    """All numbers of this node, of all its tenants."""


class ListBlocks(Message, tag=102):
    """Some of this node's blocks, from `cursor` on (empty: from the beginning). JSON: blocks, cursor (null: the end).

    Fewer than `count` may come where a cursor does. `tier`: dram, ssd or device. `digest`: of one namespace; empty:
    of all that the tenant has.
    """

    tier: str
    cursor: str
    count: int
    digest: bytes = b""


class ShowBlocks(Message, tag=103):
    """What this node has of these blocks, tier by tier. JSON: one object for each block that is here."""

    digest: bytes
    keys: bytes


class BeginJob(Message, tag=104):
    """`spec`: JSON, one of `kvpool.wire.jobs.JobSpec`. `job`: its name, which this node does not know yet.

    JSON: a `kvpool.wire.jobs.JobView`.
    """

    job: str
    spec: bytes
    dry_run: bool = False


class Jobs(Message, tag=105):
    """`jobs`: names; none: all that the node remembers. JSON: an array of `kvpool.wire.jobs.JobView`."""

    jobs: list[str] = msgspec.field(default_factory=list)


class StopJob(Message, tag=106):
    """Stop a job that runs."""

    job: str


class Events(Message, tag=107):
    """What happened after event `after`; when that is nothing, what comes within `wait_s`.

    JSON: events, first (the oldest that is remembered), last.
    """

    after: int
    count: int
    wait_s: float = 0.0


class Settings(Message, tag=108):
    """This node's configuration as it is now; of secrets only whether they are set."""


class ChangeSettings(Message, tag=109):
    """`changes`: a JSON object, settings by name. They hold until the daemon ends."""

    changes: bytes


class TakeSpans(Message, tag=121):
    """The oldest finished spans of this node, `count` at most, which then are not kept any longer.

    JSON: spans, left, dropped; see `kvpool.telemetry.spans.Batch`.
    """

    count: int


OperatorMessage = (
    Cluster
    | Locate
    | Drain
    | Clear
    | Configure
    | Evict
    | PinBlocks
    | Scrub
    | OnNode
    | Inspect
    | ListBlocks
    | ShowBlocks
    | BeginJob
    | Jobs
    | StopJob
    | Events
    | Settings
    | ChangeSettings
    | TakeSpans
)
