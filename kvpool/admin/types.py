"""The input and output of the REST interface: the bodies and parameters of its routes, checked at the edge.

`openapi.py` describes these very structs. Times are durations in seconds unless they end in `_at_s` (seconds since
1970); keys and digests are hex.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from kvpool.placement.records import NamespaceSettings, NodeRecord, TierRecord
from kvpool.telemetry.memory_stats import NamespaceStats
from kvpool.telemetry.node_stats import HotPrefix
from kvpool.telemetry.rates import Rates
from kvpool.telemetry.receipts import AccountItem, ReceiptItem
from kvpool.types import Intent, Outcome
from kvpool.wire.command import Role
from kvpool.wire.jobs import JobName, JobSpec, JobState, JobView, Progress

T = TypeVar("T")

LIMIT_MAX = 1000
PROMPT_CHARACTERS_MAX = 1 << 20
TOKENS_MAX = 1 << 20

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


def matching(pattern: str, description: str | None = None) -> msgspec.Meta:
    """The whole text has to match."""
    return msgspec.Meta(pattern=f"^{pattern}$", description=description)


_WHOSE = "Whose. Empty: `default`, or the first one that the token is good for."
TenantName = Annotated[str, matching(f"({_NAME})?", _WHOSE)]
_OF_ALL = "Of this one only. Empty: of all that the token is good for."
AnyTenant = Annotated[str, matching(f"({_NAME})?", _OF_ALL)]
NodeName = Annotated[str, matching(_NAME, "A node.")]
AnyNode = Annotated[str, matching(f"({_NAME})?", "On this node only. Empty: on all.")]
Hex32 = Annotated[str, matching("[0-9a-f]{32}")]
AnyDigest = Annotated[str, matching("([0-9a-f]{32})?", "Of this namespace; empty: of any.")]
Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="At most so many.")]
_PAGE = "`next` of the page before. Empty: the first page."
Cursor = Annotated[str, matching("[A-Za-z0-9_-]{0,512}", _PAGE)]
EngineName = Annotated[str, matching("[A-Za-z0-9._:@-]{1,200}")]
RequestName = Annotated[str, matching("[A-Za-z0-9._:+=@-]{1,128}")]
_COMMAS = "Names of nodes, with commas between them. Empty: all."
Names = Annotated[str, matching("[A-Za-z0-9._,-]{0,4096}", _COMMAS)]
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


class OfTenant(Given, frozen=True):
    """A tenant by its name."""

    tenant: TenantName = ""


class OfJob(Given, frozen=True):
    """A job by its name."""

    job: JobName


class OfEngine(Given, frozen=True):
    """An engine by its name."""

    name: EngineName


class OfRequest(Given, frozen=True):
    """A request by its id."""

    id: RequestName


Since = Annotated[float, msgspec.Meta(ge=0, le=1e12, description="Seconds since 1970.")]
AsFormat = Annotated[
    Literal["json", "jsonl", "csv"],
    msgspec.Meta(description="JSON, one JSON object a line, or a table."),
]


class AccountsWanted(Given, frozen=True, kw_only=True):
    """Which periods or requests are wanted: those that began from `since` on and before `until` (0: now)."""

    tenant: AnyTenant = ""
    node: AnyNode = ""
    namespace: AnyDigest = ""
    since: Since = 0.0
    until: Since = 0.0
    format: AsFormat = "json"


class AccountPage(AccountsWanted, frozen=True, kw_only=True):
    """Which periods of accounts are wanted."""

    limit: Limit = 100
    cursor: Cursor = ""
    total: Annotated[
        bool, msgspec.Meta(description="One row for each namespace and node, of all periods.")
    ] = False


_LABEL = (
    "Requests whose label contains this. An engine's label contains the request's X-Request-Id."
)


class ReceiptPage(AccountsWanted, frozen=True, kw_only=True):
    """Which receipts are wanted."""

    limit: Limit = 100
    request: Annotated[str, matching(r"[^\x00-\x1f\x7f]{0,256}", _LABEL)] = ""


class EventsWanted(Given, frozen=True):
    """Which events a listener wants."""

    nodes: Names = ""
    replay: Annotated[
        int, msgspec.Meta(ge=0, le=1000, description="Begin with so many of the last ones.")
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


Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
PromptText = Annotated[str, msgspec.Meta(max_length=PROMPT_CHARACTERS_MAX)]
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=4096)]
PromptTokens = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]], msgspec.Meta(max_length=TOKENS_MAX)
]


class LookupRequest(Given, frozen=True):
    """A prompt, by `model` and one of `prompt`, `messages`, `tokens`."""

    model: Model
    prompt: PromptText = ""
    messages: Messages = []
    tokens: PromptTokens = []


class IntentRequest(LookupRequest, frozen=True, kw_only=True):
    """What is wanted for the blocks of a prompt. node: where, or empty: on all nodes of the model's engines.

    The rest is as in `POST /v1/intents`.
    """

    intent: Intent
    node: AnyNode = ""
    hard: bool = False
    for_s: Annotated[float, msgspec.Meta(ge=0, le=604_800)] = 0.0
    dry_run: bool = False


class JobRequest(Given, frozen=True):
    """nodes: where; none: on all. dry_run: only count what would be done."""

    spec: JobSpec
    nodes: Annotated[list[NodeName], msgspec.Meta(max_length=1000)] = []
    dry_run: bool = False


class WeightRequest(Given, frozen=True):
    """weight: an engine gets this share at most of the requests that it could get; 1: no limit."""

    weight: Annotated[float, msgspec.Meta(ge=0, le=1)]


class ExplainRequest(Given, frozen=True):
    """A request as an engine would get it: `model`, and one of `prompt` (text or tokens) and `messages`."""

    model: Model
    prompt: PromptText | PromptTokens | None = None
    messages: Messages | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 16


# ---- answers -----------------------------------------------------------------------------------------


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """Part of a list."""

    items: list[T]
    next: Next
    unreachable: Unreachable = {}


class Status(msgspec.Struct, frozen=True):
    """status: `ok`, or what is lacking."""

    status: str


class Me(msgspec.Struct, frozen=True):
    """Who a token is. tenants: `*`: all."""

    name: str
    role: Role
    tenants: list[str]


class ClusterInfo(msgspec.Struct, frozen=True):
    """standing, state: of the node that was asked. states: how many nodes are in each. tiers: all nodes together;
    none for a token that is limited to tenants. routers: how many this gateway asks for requests and engines."""

    cluster: str
    node: str
    standing: str
    state: str
    states: dict[str, int]
    tiers: list[TierRecord]
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


class Node(NodeRecord, frozen=True):
    """A node's record. For a token that is limited to tenants only what is of its tenants, or of none."""

    drain_wanted: bool = False
    """Whether an operator wants it drained."""


class NodeDetail(msgspec.Struct, frozen=True):
    """A node's record, and its own numbers in sections; of a tenant's token only what is of its tenants.

    sections: as the node names them: `tenants`, `counters`, `fetch`, `tiers`, `replication`, `prefix_streams`, `paths`,
    `processes` and others.
    """

    node: Node
    uptime_s: float
    sections: dict[str, Any]


class NamespaceInfo(msgspec.Struct, frozen=True):
    """fields: what must agree for its blocks to be exchangeable. nodes: where it is open."""

    digest: str
    tenant: str
    fields: dict[str, Any]
    epoch: int
    generation: int
    settings: NamespaceSettings
    part_bytes: list[int]
    nodes: dict[str, NamespaceStats]
    unreachable: Unreachable = {}


class ClearInfo(msgspec.Struct, frozen=True):
    """epoch: the new one; with `dry_run`, the one that it would be, as far as the nodes that answered know."""

    digest: str
    tenant: str
    epoch: int
    dry_run: bool = False


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


class JobInfo(Progress, kw_only=True):
    """A job on all its nodes. state: running as long as it is on any; failed if it has on any."""

    job: str
    kind: str
    state: JobState
    dry_run: bool
    tenant: str
    by: str
    nodes: list[JobView]
    unreachable: Unreachable = msgspec.field(default_factory=dict)


class AccountList(msgspec.Struct, frozen=True):
    """Part of the list of accounts' periods. incomplete: nodes that could not read all of their files."""

    items: list[AccountItem]
    next: Next
    unreachable: Unreachable
    incomplete: list[str]


class ReceiptList(msgspec.Struct, frozen=True):
    """Receipts, oldest first. more: whether older ones were left out."""

    items: list[ReceiptItem]
    more: bool
    unreachable: Unreachable


class IntentOn(msgspec.Struct, frozen=True):
    """A node's answer to an intent for a prompt, as in `POST /v1/intents`, and the prompt's namespace."""

    node: str
    outcome: Outcome
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


class EngineChanged(msgspec.Struct, frozen=True):
    """routers: those that were told."""

    name: str
    routers: list[str]
    unreachable: Unreachable


class Explained(msgspec.Struct, frozen=True):
    """What a router says. router: its URL."""

    router: str
    account: dict[str, Any]


class Activity(Rates, frozen=True, kw_only=True):
    """What a node has done since the sample before. tiers: bytes in use."""

    tiers: dict[str, int]


class Sample(msgspec.Struct, frozen=True):
    """The rates of all nodes at one time."""

    at_s: float
    nodes: dict[str, Activity]


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
