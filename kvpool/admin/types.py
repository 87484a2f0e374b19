"""The input and output of the REST interface: the bodies and parameters of its routes, checked at the edge.

`openapi.py` describes these very structs. Times are durations in seconds unless they end in `_at_s` (seconds since
1970); keys and digests are hex.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvpool.placement.records import NamespaceSettings, TransportRecord
from kvpool.telemetry.cluster_stats import DrainProgress
from kvpool.telemetry.hit_curve import Curve
from kvpool.telemetry.memory_stats import Missed, SlabClass
from kvpool.telemetry.node_stats import HotPrefix
from kvpool.telemetry.receipts import Amount, Refused
from kvpool.wire.command import Role
from kvpool.wire.jobs import JobName, JobSpec, JobState, JobView

LIMIT_MAX = 1000
KEYS_MAX = 1024
LOOKUP_KEYS_MAX = 16_384
PROMPT_CHARACTERS_MAX = 1 << 20
TOKENS_MAX = 1 << 20

TenantName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?$",
        description="Whose. Empty: `default`, or the first one that the token is good for.",
    ),
]
AnyTenant = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?$",
        description="Of this one only. Empty: of all that the token is good for.",
    ),
]
NodeName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="A node.")
]
AnyNode = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?$",
        description="On this node only. Empty: on all.",
    ),
]
Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
AnyDigest = Annotated[
    str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?$", description="Of this namespace; empty: of any.")
]
Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="At most so many.")]
Cursor = Annotated[
    str,
    msgspec.Meta(
        max_length=512,
        pattern=r"^[A-Za-z0-9_-]*$",
        description="`next` of the page before. Empty: the first page.",
    ),
]
EngineName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:@-]{1,200}$")]
SessionName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[^\x00-\x1f\x7f]{1,256}$", description="A session, as its client names it."
    ),
]
RequestName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:+=@-]{1,128}$")]
Names = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9._,-]{0,4096}$",
        description="Names of nodes, with commas between them. Empty: all.",
    ),
]
Tier = Literal["dram", "ssd", "device"]
AnyTier = Annotated[
    Literal["", "dram", "ssd", "device"], msgspec.Meta(description="In this tier only.")
]
Unreachable = Annotated[
    dict[str, str], msgspec.Meta(description="Nodes that did not answer, and why.")
]
Next = Annotated[str | None, msgspec.Meta(description="`cursor` of the next page; null: none.")]


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what comes from outside."""


class Nothing(Given, frozen=True):
    """No parameters."""


class Problem(msgspec.Struct, frozen=True):
    """Any error (RFC 9457). code: which, for programs. instance: the request's id, as in `x-request-id`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str


# ---- parameters --------------------------------------------------------------------------------------


class Page(Given, frozen=True):
    """Which part of a list is wanted."""

    limit: Limit = 100
    cursor: Cursor = ""


class OfNode(Given, frozen=True):
    """A node by its name."""

    node: NodeName


class TenantPage(Page, frozen=True):
    """Part of a list, of one tenant or of all."""

    tenant: AnyTenant = ""


class OfNamespace(Given, frozen=True):
    """A namespace by its digest."""

    digest: Hex32
    tenant: TenantName = ""


class BlockPage(Page, frozen=True, kw_only=True):
    """Part of the list of a namespace's blocks."""

    digest: Hex32
    tenant: TenantName = ""
    node: AnyNode = ""
    tier: AnyTier = ""


class OfBlock(Given, frozen=True):
    """A block by its key."""

    key: Hex32
    namespace: AnyDigest = ""
    tenant: TenantName = ""


class OfTenant(Given, frozen=True):
    """A tenant by its name."""

    tenant: TenantName = ""


class OnNode(Given, frozen=True):
    """Which node's answer is wanted."""

    node: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?$",
            description="Of this node. Empty: of the one that is asked.",
        ),
    ] = ""


class OfJob(Given, frozen=True):
    """A job by its name."""

    job: JobName


class OfEngine(Given, frozen=True):
    """An engine by its name."""

    name: EngineName


class OfRequest(Given, frozen=True):
    """A request by its id."""

    id: RequestName


class SessionPage(Page, frozen=True):
    """Part of the list of a tenant's sessions."""

    tenant: TenantName = ""
    node: AnyNode = ""


Since = Annotated[float, msgspec.Meta(ge=0, le=1e12, description="Seconds since 1970.")]
AsFormat = Annotated[
    Literal["json", "jsonl", "csv"],
    msgspec.Meta(description="JSON, one JSON object a line, or a table."),
]


class AccountPage(Page, frozen=True):
    """Which periods of accounts are wanted: those that began from `since` on and before `until` (0: now)."""

    tenant: AnyTenant = ""
    node: AnyNode = ""
    namespace: AnyDigest = ""
    since: Since = 0.0
    until: Since = 0.0
    total: Annotated[
        bool, msgspec.Meta(description="One row for each namespace and node, of all periods.")
    ] = False
    format: AsFormat = "json"


class ReceiptPage(Given, frozen=True):
    """Which receipts are wanted: of requests that began from `since` on and before `until` (0: now)."""

    limit: Limit = 100
    tenant: AnyTenant = ""
    node: AnyNode = ""
    namespace: AnyDigest = ""
    since: Since = 0.0
    until: Since = 0.0
    request: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^[^\x00-\x1f\x7f]{0,256}$",
            description="Requests whose label contains this. An engine's label contains the request's X-Request-Id.",
        ),
    ] = ""
    format: AsFormat = "json"


class OfSession(Given, frozen=True):
    """A session by its name."""

    session: SessionName
    tenant: TenantName = ""


class EventsWanted(Given, frozen=True):
    """Which events a listener wants."""

    nodes: Names = ""
    replay: Annotated[
        int,
        msgspec.Meta(ge=0, le=1000, description="Begin with so many of the last ones."),
    ] = 0


class HistoryWanted(Given, frozen=True):
    """How much of the history is wanted."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600, description="The last so many.")] = 3600.0


class HotWanted(Given, frozen=True):
    """What is to be ranked by its reads."""

    by: Literal["prefix", "tenant"] = "prefix"
    seconds: Annotated[
        float, msgspec.Meta(gt=0, le=3600, description="In the last so many; by tenant.")
    ] = 60.0
    limit: Limit = 100


# ---- bodies ------------------------------------------------------------------------------------------


class ClearRequest(Given, frozen=True):
    """fence: engines must open the namespace again, since their weights may be old. dry_run: only tell the new epoch."""

    fence: bool = False
    dry_run: bool = False


class SettingsPatch(Given, frozen=True):
    """What is to change of a namespace's settings; what is left out stays. See `NamespaceSettings`."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    write: Literal["", "back", "through", "none"] | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=315_360_000)] | None = None
    ssd_codec: Literal["", "blosc2"] | None = None
    dram_quota: Annotated[float, msgspec.Meta(ge=0, le=1 << 62)] | None = None
    ssd_quota: Annotated[float, msgspec.Meta(ge=0, le=1 << 62)] | None = None
    write_remote: Literal["", "back", "none"] | None = None


AnyModel = Annotated[str, msgspec.Meta(max_length=256)]
PromptText = Annotated[str, msgspec.Meta(max_length=PROMPT_CHARACTERS_MAX)]
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=4096)]
PromptTokens = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]], msgspec.Meta(max_length=TOKENS_MAX)
]


class LookupRequest(Given, frozen=True):
    """Either `namespace` and `keys`, in prefix order; or `model` and one of `prompt`, `messages`, `tokens`."""

    namespace: AnyDigest = ""
    keys: Annotated[list[Hex32], msgspec.Meta(max_length=LOOKUP_KEYS_MAX)] = []
    model: AnyModel = ""
    prompt: PromptText = ""
    messages: Messages = []
    tokens: PromptTokens = []


class PinRequest(Given, frozen=True):
    """node: empty: on all. kind: `soft` is evicted last, `hard` never, `none` as any other."""

    keys: Annotated[list[Hex32], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]
    kind: Literal["soft", "hard", "none"]
    namespace: AnyDigest = ""
    node: AnyNode = ""


class IntentRequest(Given, frozen=True):
    """What is wanted for the blocks of a prompt, or of a session.

    A prompt: `namespace` and `keys`, from the first block on; or `model` and one of `prompt`, `messages`, `tokens`: then a
    router tells the nodes of the model's engines.

    intent: `pin`: evicted last, or with `hard` never, until `unpin`; `keep`: the same as a soft pin, in memory, for
    `for_s` seconds; `prefetch`: brought into memory; `expend`: evicted before others until they are read; `drop`: removed
    from nodes. namespace: with a session only its blocks in that one. node: empty: all; a prompt is prefetched into one.
    dry_run: only tell for how many it would hold.
    """

    intent: Literal["pin", "unpin", "keep", "prefetch", "expend", "drop"]
    namespace: AnyDigest = ""
    keys: Annotated[list[Hex32], msgspec.Meta(max_length=LOOKUP_KEYS_MAX)] = []
    session: Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{0,256}$")] = ""
    node: AnyNode = ""
    hard: bool = False
    for_s: Annotated[float, msgspec.Meta(ge=0, le=604_800)] = 0.0
    dry_run: bool = False
    model: AnyModel = ""
    prompt: PromptText = ""
    messages: Messages = []
    tokens: PromptTokens = []


class JobRequest(Given, frozen=True):
    """nodes: where; none: on all. dry_run: only count what would be done."""

    spec: JobSpec
    nodes: Annotated[list[NodeName], msgspec.Meta(max_length=1000)] = []
    dry_run: bool = False


class ConfigPatch(Given, frozen=True):
    """changes: settings by name. node: where; empty: on all."""

    changes: Annotated[dict[str, Any], msgspec.Meta(min_length=1, max_length=100)]
    node: AnyNode = ""


class WeightRequest(Given, frozen=True):
    """weight: an engine gets this share at most of the requests that it could get; 1: no limit."""

    weight: Annotated[float, msgspec.Meta(ge=0, le=1)]


class ExplainRequest(Given, frozen=True):
    """A request as an engine would get it: `model`, and one of `prompt` (text or tokens) and `messages`."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    prompt: (
        Annotated[str, msgspec.Meta(max_length=PROMPT_CHARACTERS_MAX)]
        | Annotated[
            list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]],
            msgspec.Meta(max_length=TOKENS_MAX),
        ]
        | None
    ) = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=4096)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 16


# ---- answers -----------------------------------------------------------------------------------------


class Status(msgspec.Struct, frozen=True):
    """status: `ok`, or what is lacking."""

    status: str


class Me(msgspec.Struct, frozen=True):
    """Who a token is. tenants: `*`: all."""

    name: str
    role: Role
    tenants: list[str]


class TierSum(msgspec.Struct, frozen=True):
    """secondary_bytes: beside what is in use, replicas of what other nodes keep; they go before anything else."""

    name: str
    capacity_bytes: int
    used_bytes: int
    secondary_bytes: int


class ClusterInfo(msgspec.Struct, frozen=True):
    """standing, state: of the node that was asked. states: how many nodes are in each. tiers: all nodes together;
    none for a token that is limited to tenants. routers: how many this gateway asks for requests and engines."""

    cluster: str
    node: str
    standing: str
    state: str
    states: dict[str, int]
    tiers: list[TierSum]
    versions: dict[str, int]
    namespaces: int
    routers: int


class Engine(msgspec.Struct, frozen=True):
    """An engine. rank: its data-parallel rank, of several at the URL. node: where it was announced. routers: what each router that is known says of it, by URL."""

    name: str
    url: str
    node: str
    role: str
    model: str
    tenant: str
    namespace: str
    rank: int | None = None
    routers: dict[str, dict[str, Any]] = {}


class Node(msgspec.Struct, frozen=True):
    """A node's record. tiers: none for a token that is limited to tenants. drain_wanted: by an operator."""

    node: str
    incarnation: str
    state: str
    labels: dict[str, str]
    version: str
    protocol: int
    tiers: list[TierSum]
    transports: list[TransportRecord]
    drain: DrainProgress | None
    drain_wanted: bool
    engines: int


class NodeList(msgspec.Struct, frozen=True):
    """Part of the list of nodes."""

    items: list[Node]
    next: Next


class NodeDetail(msgspec.Struct, frozen=True):
    """A node's record, and its own numbers in sections; of a tenant's token only what is of its tenants.

    sections: as the node names them: `tenants`, `counters`, `fetch`, `tiers`, `replication`, `prefix_streams`, `paths`,
    `processes` and others.
    """

    node: Node
    uptime_s: float
    sections: dict[str, Any]


class SegmentInfo(msgspec.Struct, frozen=True):
    """A tenant's memory on a node. secondary_bytes: of what is used, replicas of what other nodes keep."""

    tenant: str
    size_bytes: int
    used_bytes: int
    secondary_bytes: int
    slab_bytes: int
    slabs: int
    slabs_unassigned: int
    classes: list[SlabClass]


class SegmentList(msgspec.Struct, frozen=True):
    """Part of the list of segments."""

    items: list[SegmentInfo]
    next: Next


class DrainInfo(msgspec.Struct, frozen=True):
    """Whether a node is to be drained, and how far it is."""

    node: str
    wanted: bool
    progress: DrainProgress | None


class HeldOn(msgspec.Struct, frozen=True):
    """What a node's memory holds of a namespace. blocks: by part."""

    blocks: list[int]
    held_bytes: int
    quota_bytes: int


class NamespaceInfo(msgspec.Struct, frozen=True):
    """fields: what must agree for its blocks to be exchangeable. nodes: where it is open."""

    digest: str
    tenant: str
    fields: dict[str, Any]
    epoch: int
    generation: int
    settings: NamespaceSettings
    part_bytes: list[int]
    nodes: dict[str, HeldOn]
    unreachable: Unreachable = {}


class NamespaceList(msgspec.Struct, frozen=True):
    """Part of the list of namespaces."""

    items: list[NamespaceInfo]
    next: Next
    unreachable: Unreachable


class ClearInfo(msgspec.Struct, frozen=True):
    """epoch: the new one; with `dry_run`, the one that it would be, as far as the nodes that answered know."""

    digest: str
    tenant: str
    epoch: int
    dry_run: bool = False


class BlockInfo(msgspec.Struct, frozen=True):
    """One block in one tier of a node. copy: it is held for others. age_s: since its last use."""

    node: str
    tier: str
    key: str
    namespace: str
    parent: str
    depth: int
    parts: int
    bytes: int
    pin: str
    copy: bool
    reused: bool
    age_s: float
    leases: int = 0


class BlockList(msgspec.Struct, frozen=True):
    """A page may be short, or empty, and have a next one all the same."""

    items: list[BlockInfo]
    next: Next
    unreachable: Unreachable


class Replica(msgspec.Struct, frozen=True):
    """By the directory, which is a hint; of the node that was asked, by its own books."""

    node: str
    incarnation: str
    tier: str
    parts: int


class Located(msgspec.Struct, frozen=True):
    """The replicas of a block in one namespace."""

    namespace: str
    parts: int
    replicas: list[Replica]


class BlockDetail(msgspec.Struct, frozen=True):
    """located: where it is said to be. here: what nodes themselves say."""

    key: str
    located: list[Located]
    here: list[BlockInfo]
    unreachable: Unreachable


class PrefixOn(msgspec.Struct, frozen=True):
    """How many blocks of a prompt's prefix a node could give, from its memory, and with its disks. engine: which
    would be given the prompt, where a router was asked."""

    node: str
    memory_blocks: int
    blocks: int
    engine: str = ""


class LookupInfo(msgspec.Struct, frozen=True):
    """The longest first. asked: blocks of the whole prompt."""

    items: list[PrefixOn]
    asked: int


class WhyRequest(Given, frozen=True):
    """keys: of a prompt's blocks in their order."""

    namespace: Hex32
    keys: Annotated[list[Hex32], msgspec.Meta(min_length=1, max_length=LOOKUP_KEYS_MAX)]


class WhyBlock(msgspec.Struct, frozen=True):
    """Why a block was not there. block: its index in the prompt. reason: one of the words of `kvpool_missed_reads_total`;
    words: for people. What is not known is empty or null. tier: that which it left, `age_s` ago, after it was unused for
    `idle_s`. by: the namespace whose put took its room. where: the other namespace, or the node that is lost. differs:
    facts of that namespace, each with its value there and here. asked, found, ago_s: of a read, its blocks and when.
    """

    block: int
    key: str
    reason: str
    words: str
    tier: str = ""
    age_s: float | None = None
    idle_s: float | None = None
    by: str = ""
    where: str = ""
    differs: dict[str, list[Any]] | None = None
    asked: int | None = None
    found: int | None = None
    ago_s: float | None = None


class WhyHere(msgspec.Struct, frozen=True, kw_only=True):
    """Of a node: blocks of the prompt that it could provide from memory, and from its disks too; the first one that it
    could not, and the last read that ended at one of these blocks. reach_s: for how long it remembers blocks that left;
    null: since it began.
    """

    asked: int
    memory_blocks: int
    blocks: int
    missing: WhyBlock | None
    last: WhyBlock | None
    reach_s: float | None


class WhyOn(WhyHere, frozen=True, kw_only=True):
    """The same with the node's name."""

    node: str


class WhyInfo(msgspec.Struct, frozen=True):
    """By node. Nodes that do not have the namespace are left out."""

    items: list[WhyOn]
    unreachable: Unreachable = {}


class MemoryInfo(msgspec.Struct, frozen=True):
    """What more memory would give a tenant. curve: all nodes together. misses: by reason, since the nodes started."""

    tenant: str
    nodes: int
    curve: Curve
    misses: dict[str, Missed]
    unreachable: Unreachable = {}


class TenantInfo(msgspec.Struct, frozen=True):
    """All nodes together. ssd_bytes: of the tenant's parts of disks."""

    tenant: str
    segment_bytes: int
    used_bytes: int
    ssd_bytes: int
    ssd_used_bytes: int
    blocks: int
    soft_pinned_bytes: int
    hard_pinned_bytes: int
    namespaces: int
    nodes: int


class TenantList(msgspec.Struct, frozen=True):
    """Part of the list of tenants."""

    items: list[TenantInfo]
    next: Next
    unreachable: Unreachable


class PinnedOn(msgspec.Struct, frozen=True):
    """How many blocks were pinned on a node."""

    node: str
    blocks: int


class PinInfo(msgspec.Struct, frozen=True):
    """blocks: how many of them a node has, and has pinned or unpinned."""

    items: list[PinnedOn]
    unreachable: Unreachable


class JobInfo(msgspec.Struct, frozen=True):
    """A job on all its nodes. state: running as long as it is on any; failed if it has on any."""

    job: str
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
    nodes: list[JobView]
    unreachable: Unreachable = {}


class JobList(msgspec.Struct, frozen=True):
    """Part of the list of jobs."""

    items: list[JobInfo]
    next: Next
    unreachable: Unreachable


class AccountItem(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace of a tenant on a node, in a period, or with `total` in all of them (number 0).

    number: counts the periods of an incarnation; one that is missing was lost. seconds: that the periods took. open: it
    has not ended: its numbers still grow. namespace: empty: of all those beyond the limit. reads: by the tier that blocks came
    from. refused: by reason. kept_byte_s: bytes times seconds, by tier.
    """

    node: str
    incarnation: str
    number: int
    begin_s: float
    end_s: float
    seconds: float
    open: bool
    tenant: str
    namespace: str
    model: str
    reads: dict[str, Amount]
    written: Amount
    refused: dict[str, Refused]
    kept_byte_s: dict[str, float]


class AccountList(msgspec.Struct, frozen=True):
    """Part of the list of accounts' periods. incomplete: nodes that could not read all of their files."""

    items: list[AccountItem]
    next: Next
    unreachable: Unreachable
    incomplete: list[str]


class ReceiptItem(msgspec.Struct, frozen=True, kw_only=True):
    """What a node served to a request. request: as its engine names it. ended_s: null: its engine has not said so."""

    node: str
    request: str
    tenant: str
    namespace: str
    model: str
    session: str
    begun_s: float
    used_s: float
    ended_s: float | None
    reads: dict[str, Amount]
    written: Amount
    refused: dict[str, Refused]


class ReceiptList(msgspec.Struct, frozen=True):
    """Receipts, oldest first. more: whether older ones were left out."""

    items: list[ReceiptItem]
    more: bool
    unreachable: Unreachable


class SessionOn(msgspec.Struct, frozen=True, kw_only=True):
    """A session as one node knows it. idle_s: since its last turn."""

    node: str
    turns: int
    agents: int
    blocks: int
    nbytes: int
    idle_s: float


class SessionInfo(msgspec.Struct, frozen=True):
    """A session. nodes: that know it."""

    session: str
    nodes: list[SessionOn]


class SessionList(msgspec.Struct, frozen=True):
    """Part of the list of sessions."""

    items: list[SessionInfo]
    next: Next
    unreachable: Unreachable


class SessionChain(msgspec.Struct, frozen=True):
    """The prompt of an agent's last turn: how many of its blocks are in the node's memory, only on its disks, and not
    there at all."""

    namespace: str
    agent: str
    blocks: int
    in_memory: int
    on_disk: int
    missing: int


class SessionDetailOn(SessionOn, frozen=True, kw_only=True):
    """The same, with the prompts of its agents."""

    chains: list[SessionChain]


class SessionDetail(msgspec.Struct, frozen=True):
    """A session, on the nodes that know it."""

    session: str
    nodes: list[SessionDetailOn]
    unreachable: Unreachable


class SessionEnded(msgspec.Struct, frozen=True):
    """nodes: that knew it."""

    session: str
    nodes: list[str]
    unreachable: Unreachable


class IntentOn(msgspec.Struct, frozen=True):
    """A node's answer. outcome: `accepted` for all blocks that are there, `clipped`: for some of these, the first ones;
    `deferred`: later; `refused`: for none; `missing`: there are none. blocks, nbytes: for which it holds. missing: blocks
    that are not there, of those asked for. limit_bytes: what the limit that was met left; null: none was. namespace: of
    a prompt that was given as text, messages or tokens; else empty."""

    node: str
    outcome: Literal["accepted", "clipped", "deferred", "refused", "missing"]
    blocks: int
    nbytes: int
    asked: int
    missing: int
    limit_bytes: int | None
    reason: str
    namespace: str = ""


class IntentInfo(msgspec.Struct, frozen=True):
    """The answers of all nodes that were asked."""

    items: list[IntentOn]
    unreachable: Unreachable


class EngineList(msgspec.Struct, frozen=True):
    """Part of the list of engines."""

    items: list[Engine]
    next: Next
    unreachable: Unreachable


class EngineDrain(msgspec.Struct, frozen=True):
    """routers: those that were told."""

    name: str
    draining: bool
    routers: list[str]
    unreachable: Unreachable


class Explained(msgspec.Struct, frozen=True):
    """What a router says. router: its URL."""

    router: str
    account: dict[str, Any]


class EventInfo(msgspec.Struct, frozen=True):
    """number: counts up in each life of a node. at_s: by that node's clock, seconds since 1970."""

    number: int
    at_s: float
    node: str
    kind: str
    details: dict[str, Any]


class AuditList(msgspec.Struct, frozen=True):
    """Part of the list of changes."""

    items: list[EventInfo]
    next: Next
    unreachable: Unreachable


class Rates(msgspec.Struct, frozen=True):
    """Of one node since the sample before; null: not known. tiers: bytes in use."""

    put_bytes_s: float | None
    read_bytes_s: float | None
    pulled_bytes_s: float | None
    hit_rate: float | None
    tiers: dict[str, int]


class Sample(msgspec.Struct, frozen=True):
    """The rates of all nodes at one time."""

    at_s: float
    nodes: dict[str, Rates]


class History(msgspec.Struct, frozen=True):
    """Oldest first."""

    every_s: float
    samples: list[Sample]


class HotList(msgspec.Struct, frozen=True):
    """What was read most, on all nodes together, the most first. seconds: what bytes were counted over; 0: nothing is
    known yet, or it is not counted so."""

    by: str
    seconds: float
    items: list[HotPrefix]
    unreachable: Unreachable = {}


class Setting(msgspec.Struct, frozen=True):
    """A setting of a running node."""

    name: str
    value: Any
    """The value; of a secret only whether there is one."""
    secret: bool
    default: bool
    """Whether the value is the default."""
    changeable: bool
    """Whether the value can be changed while the daemon runs."""
    help: str
    """The purpose, in a sentence."""
    form: str
    """The form of the value, as the command line's help has it: `SIZE`, `SECONDS`, `a|b`."""


class SettingList(msgspec.Struct, frozen=True):
    """A node's settings."""

    node: str
    items: list[Setting]


class SettingsChanged(msgspec.Struct, frozen=True):
    """nodes: those that have made the change, which holds until their daemons end."""

    nodes: list[str]
    unreachable: Unreachable


class EngineWeight(msgspec.Struct, frozen=True):
    """routers: those that were told."""

    name: str
    weight: float
    routers: list[str]
    unreachable: Unreachable
