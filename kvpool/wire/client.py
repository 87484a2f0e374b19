"""Messages between a client and the daemon of its node. Operators' questions are in `operator`.

type  message          direction             answer
----  ---------------  --------------------  ----------------
1     Hello            client → daemon       Welcome, with the segment's descriptor
2     Welcome          daemon → client
10    OpenNamespace    client → daemon       Opened
11    Reserve          client → daemon       Reserved
12    Reserved         daemon → client
13    Commit           client → daemon       Committed
14    Abort            client → daemon       Done, or none
15    Acquire          client → daemon       Leased
16    Leased           daemon → client
17    Join             client → daemon       Leased
18    Release          client → daemon       Done, or none
19    Match            client → daemon       Done: blocks
22    Remove           client → daemon       Bytes: 0 or 1 a key, and a `Presence` of those beside
23    Pin              client → daemon       Done: blocks pinned or unpinned
24    Stats            client → daemon       Bytes: a JSON object
25    Pull             client → daemon       Done: blocks now here
26    Grant            client → daemon       Granted
27    Store            client → daemon       Stored
28    Stored           daemon → client
29    GiveBack         client → daemon       Done, or none
30    Reset            client → daemon       Opened
36    Opened           daemon → client
49    CorruptSlots     client → daemon       Done: blocks dropped; or none
50    FollowEvents     client → daemon       Done: 1 if they are followed; or none
51    Follow           client → daemon       Done: blocks now here
53    AnnounceEngine   client → daemon       Done: 1 if it is announced; or none
54    Engines          client → daemon       Bytes: a JSON array
58    Prefixes         client → daemon       Bytes: a JSON object
87    Dropped          client → daemon       Done, or none
88    CloseNamespace   client → daemon       Done, or none
134   Present          client → daemon       Bytes: a `Presence` a key, for each namespace, and of those beside
135   ClearNamespace   client → daemon       Done: the new epoch
140   SessionTurn      client → daemon       Done: 1 if the session goes on; or none
152   EndSessionOn     client → daemon       Done; or none
149   EndRequest       client → daemon       Done: 1 if it is known; or none
145   WhyMissing       client → daemon       Bytes: a JSON object
148   Intend           client → daemon       Bytes: a JSON object
131   Granted          daemon → client
133   Committed        daemon → client
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvpool.decoding import Finite
from kvpool.types import PARTS_MAX, EngineRecord
from kvpool.wire.answers import Missing
from kvpool.wire.command import Scope, command, in_json
from kvpool.wire.frame import (
    PROTOCOL_OLDEST,
    AnyDigest,
    Bytes,
    Count,
    Decoder,
    Digest,
    Done,
    Error,
    Generation,
    Integer,
    Integers,
    Message,
    ReadOnly,
    Tickets,
)
from kvpool.wire.operator import OperatorMessage

TOKENS_MAX = 1024  # in one request
PREFIXES_S_MAX = 10.0  # over HTTP


class Hello(Message, tag=1):
    """First frame of a connection of a client.

    `instance`: the engine instance that its leases belong to. `client`: chosen at random by each client
    and the same on all its connections; reservations belong to it. `operator`: the operator token. `device`:
    the client wants to read spare device memory by itself. `version`, `oldest`: the protocols that it speaks.
    """

    version: Count
    tenant: str
    instance: str
    client: str
    token: str | None = None
    operator: str = ""
    device: bool = False
    oldest: Count = PROTOCOL_OLDEST


class Welcome(Message, tag=2):
    """The daemon's answer. The segment's descriptor comes with its first byte (SCM_RIGHTS).

    `device`: a handle of the tenant's part of spare device memory, good for one attach, where the client asked
    for it and there is some; then `life` names the present life of the process that owns it, and a
    descriptor that tells of its end (`kvpool.memory.owner_liveness`) comes with the segment's.
    """

    version: Count
    node: str
    incarnation: str
    segment: Count
    segment_bytes: Count
    device: bytes = b""
    life: Count = 0


class OpenNamespace(Message, tag=10):
    """`fields`: canonical JSON whose digest is checked. `parts`: [nbytes, kind, window, stride] each.

    `generation`: of the client's weights, from an earlier `Opened`; -1: its weights are the current
    ones. The settings apply if the namespace is new to the cluster: see `Configure`; `replicas` 0
    is one, and empty `write` is each node's default.
    """

    digest: Digest
    fields: bytes
    parts: list[tuple[Integer, str, Integer, Integer]]
    replicas: Integer = 0
    generation: Generation = -1
    write: str = ""
    ttl_s: Finite = 0.0
    ssd_codec: str = ""
    write_remote: str = ""


class Opened(Message, tag=36):
    """`number`: the namespace's, in this incarnation. `generation`: of the client's weights.

    `current`: whether that is the current one; otherwise reads find nothing and writes are refused.
    """

    number: Count
    generation: Generation
    current: bool


class Reserve(Message, tag=11):
    """Slots for the same keys in each of some parts.

    `tickets`: one a part; each names a reservation. The client chooses them, so that it can abort without having seen
    the answer. `parents`: 16 bytes a key, the one before it in its prefix chain, zeros if there is none: the keys may
    be of several chains. `requests`: as in `Acquire`, each with how many of the keys, in their order, belong to it, at
    least one; what is left is nobody's, as is what has an empty label. At most 4096 of them.
    """

    ns: Count
    parts: Integers
    tickets: Tickets
    keys: bytes
    parents: bytes
    requests: list[tuple[str, Integer]] = msgspec.field(default_factory=list)


class Reserved(Message, tag=12):
    """One a part. `rows`: one a key, `NO_ROW` where the block is present already; fewer than keys, or none at all,
    where there was no space. Without space for any part the answer is an error.
    """

    strides: list[Count]
    rows: list[bytes]


class Commit(Message, tag=13):
    """Make reserved slots readable. `checksums`: one a ticket, 16 bytes for each row handed out, in order.

    `replicas`: wanted in the cluster; 0: the namespace's setting.
    """

    tickets: Tickets
    checksums: Annotated[list[bytes], msgspec.Meta(max_length=PARTS_MAX)]
    replicas: Integer = 0


class Committed(Message, tag=133):
    """`stored`: how many blocks of each are new; -1: this client had not reserved it."""

    stored: list[Integer]


class Abort(Message, tag=14):
    """Give reserved slots back."""

    tickets: Tickets


class Acquire(Message, tag=15):
    """A lease on the longest usable prefix, or with `scattered` on each of the keys that is present.

    `parts`: empty means all. `wait_s`: how long to wait for blocks from other nodes. `recompute`:
    see `Pull`; not with `scattered`, where blocks do not depend on each other. `life`: of the
    device memory that the client is attached to and reads itself; 0: none. Not with `scattered`. `verify`: the
    answer is to have checksums. `request`: on whose behalf, as its engine names it: for its receipt; empty: none.
    `for_others`: those who join the lease read, so it counts as read with the first of them.
    """

    ns: Count
    keys: bytes
    parts: Integers
    lease_s: Finite
    wait_s: Finite = 0.0
    scattered: bool = False
    recompute: tuple[Finite, Finite] | None = None
    life: Count = 0
    trace: str = ""
    verify: bool = False
    request: str = ""
    for_others: bool = False


class LeasedPart(Message):
    """Slots of one part: rows in block order, from block index `first` on.

    `device_rows`: of the tenant's device memory, as many; each block has one of both, and `NO_ROW` for the
    other. Empty where all are in memory. `checksums`: xxh3-128 of each block, 16 bytes a row, zeros for `NO_ROW`;
    empty: they were not asked for.
    """

    part: Integer
    first: Count
    stride: Count
    nbytes: Count
    rows: bytes
    device_rows: bytes = b""
    checksums: bytes = b""


class Leased(Message, tag=16):
    """`token` is empty when nothing is present.

    `lease_s`: how long the lease lasts, counted from when the daemon got the request. So a client that
    counts from its request never uses a lease that has ended, however late the answer arrives.
    `life`: of the device memory that the lease has rows of; 0: of none.
    """

    token: str
    blocks: Count
    lease_s: Finite
    parts: list[LeasedPart]
    life: Count = 0


class Join(Message, tag=17):
    """Share a lease by its token. `verify`: see `Acquire`."""

    token: str
    parts: Integers
    verify: bool = False


class CorruptSlots(Message, tag=49):
    """Slots of a lease whose bytes do not match their checksums: `rows` (u32) of one part. Their blocks are dropped
    from memory; a `Done` with how many. Copies elsewhere stay.
    """

    token: str
    part: Integer
    rows: bytes


class Release(Message, tag=18):
    """Give leases back."""

    tokens: Annotated[list[str], msgspec.Meta(max_length=TOKENS_MAX)]


class Match(ReadOnly, tag=19):
    """Length of the usable prefix that is present."""

    ns: Count
    keys: bytes
    parts: Integers


class Present(ReadOnly, tag=134):
    """Where one part of each of the blocks is, if anywhere, in each of some namespaces. `wait_s`: for the answers of
    others; None: only this node's memory is looked at.

    `first`: a block that is in memory in one namespace is not looked for in those after it. `beside`: further keys,
    looked for in the first namespace only; others are asked for them only if they are asked for one of `keys`.
    """

    namespaces: list[Count]
    part: Integer
    keys: bytes
    wait_s: Finite | None
    first: bool = False
    beside: bytes = b""


class Remove(Message, tag=22):
    """Remove the blocks of several namespaces from all tiers of this node. Which of the keys were in any of them?

    `others_s`: then also from all other nodes, within this time; 0: not. `beside`: further keys, which stay: where
    their blocks of the first namespace are, as in an answer to `Present`.
    """

    namespaces: list[Count]
    keys: bytes
    others_s: Finite = 0.0
    beside: bytes = b""


class ClearNamespace(Message, tag=135):
    """Start a new epoch of the namespace: its blocks are no longer found anywhere. Its clients go on."""

    ns: Count


class SessionTurn(Message, tag=140):
    """A turn of a session has used these blocks, one chain from its head on.

    `agent`: a strand of the session whose turns follow one another. `ended`: there will be no further turn. `shared`:
    several conversations may have this name.
    """

    ns: Count
    session: str
    keys: bytes
    agent: str = ""
    ended: bool = False
    shared: bool = False


class EndSessionOn(Message, tag=152):
    """A session has no further turns on these nodes, or on the daemon's own if there are none."""

    session: str
    nodes: Annotated[list[str], msgspec.Meta(max_length=64)]


class EndRequest(Message, tag=149):
    """An engine has finished a request: its receipt is closed. `session`: that it was a turn of; empty: none.

    What is still stored on its behalf is added.
    """

    ns: Count
    request: str
    session: str = ""


class Intend(Message, tag=148):
    """What is wanted for the blocks `keys` of a prompt, from its first one on, or for those of a session in this
    namespace. JSON: a `kvpool.types.IntentAnswer`.

    `intent`: see `kvpool.types.Intent`. `hard`: of a pin. `for_s`: how long to keep; 0 with all others. `dry_run`: only
    answer. `digest`: of the namespace, without its epoch, instead of `ns`: then it need not be open. `node`: with it, by
    name; empty: the one that is asked.
    """

    ns: Count
    intent: str
    keys: bytes = b""
    session: str = ""
    hard: bool = False
    for_s: Finite = 0.0
    dry_run: bool = False
    digest: AnyDigest = b""
    node: str = ""


class Pin(Message, tag=23):
    """`kind`: soft, hard, or none (unpin)."""

    ns: Count
    keys: bytes
    kind: str


@command("viewer", Scope.SHOWN)
class Stats(ReadOnly, tag=24):
    """The node's statistics, for the client's tenant."""


class Pull(Message, tag=25):
    """Bring the blocks here from other nodes, all parts, before `wait_s` is over.

    `recompute`: seconds that the client takes to compute the first block, and how many more each further one
    takes than the one before it. Blocks that take longer to bring are left out. None: not known, bring all.
    `life`: of the device memory that the client's engine reads itself: blocks there count as here; 0: none.
    """

    ns: Count
    keys: bytes
    wait_s: Finite
    recompute: tuple[Finite, Finite] | None = None
    life: Count = 0
    trace: str = ""


class Grant(Message, tag=26):
    """Slots of a part's size without keys, to be filled and then named by `Store`: up to `count`."""

    ns: Count
    part: Integer
    count: Count


class Granted(Message, tag=131):
    """`rows`: as many as there are, at most `count`."""

    stride: Count
    rows: bytes


class Store(Message, tag=27):
    """Granted slots have been written; these are their keys and checksums. One exchange a put.

    `count`: how many granted slots the client wants for the next one. `replicas`: see `Commit`. `parents`: see
    `Reserve`. `request`: see `Acquire`.
    """

    ns: Count
    part: Integer
    rows: bytes
    keys: bytes
    checksums: bytes
    count: Count
    parents: bytes
    replicas: Integer = 0
    request: str = ""


class Stored(Message, tag=28):
    """`new`: blocks newly stored. `unused`: rows whose block was present already; they stay granted.

    `fresh`: further rows, granted now.
    """

    new: Count
    unused: bytes
    fresh: bytes


class GiveBack(Message, tag=29):
    """Granted slots that nobody writes to any more, and that are not needed.

    `stride` 0: all that this client was ever granted, including unreceived grants.
    """

    stride: Count
    rows: bytes


class Reset(Message, tag=30):
    """This engine's weights are new: none of the namespace's blocks may be read any more, by any client.

    `generation`: of its previous weights; it enters the next one. Starts that generation's epoch, or enters
    it if another engine's reset has started it. If there are later ones already, this engine stays out.
    """

    ns: Count
    generation: Generation


class FollowEvents(Message, tag=50):
    """This client's engine publishes KV events of its own cache: follow them, as long as its process lives.

    `endpoint`: to connect to, on this machine; empty: stop following. `replay`: where missed ones are
    repeated, or empty. `groups`: the cache group, in the events' numbers, of each part of the namespace.
    One engine a client: a new message replaces the previous one.
    """

    ns: Count
    endpoint: str
    replay: str = ""
    topic: str = ""
    groups: list[Integer] = msgspec.field(default_factory=list)


class Follow(Message, tag=51):
    """Bring a prompt's blocks here while an engine elsewhere computes them, until `wait_s` is over.

    `source`: the node of that engine, or empty if unknown. `parts`: empty means all.
    """

    ns: Count
    keys: bytes
    wait_s: Finite
    source: str = ""
    parts: Integers = msgspec.field(default_factory=list)
    trace: str = ""


class Dropped(Message, tag=87):
    """These blocks were to be put, and will not be: prompts that are followed do not wait for them."""

    ns: Count
    keys: bytes


class CloseNamespace(Message, tag=88):
    """This client does not use the namespace any more; for it alone, it need not be kept while it is empty."""

    ns: Count


class AnnounceEngine(Message, tag=53):
    """This client's engine accepts requests: announce it to all nodes, as long as its process lives.

    `engine`: null: withdraw it. One engine a client: a new message replaces the previous one.
    """

    ns: Count
    engine: EngineRecord | None


@command("viewer", answer=list)
class Engines(ReadOnly, tag=54):
    """The engines of this tenant that were announced, on all nodes. For each: what was announced, `node`,
    `incarnation`, `labels` and `host` of it, as in its record, and whether it is on this machine (`here`). The first
    engine of each node also has the record's `links`.
    """


@command("viewer", answer=dict[str, list[int]])
class Prefixes(ReadOnly, tag=58):
    """How much of a prefix each node could provide, by the directory, in blocks: `{node: [in memory, with
    disks]}`.

    `digest`: of the namespace, without its epoch; this node need not have it open. `wait_s`: answers that take
    longer are left out.
    """

    digest: Digest
    keys: bytes
    wait_s: Annotated[Finite, in_json(Annotated[float, msgspec.Meta(ge=0, le=PREFIXES_S_MAX)])]


@command("viewer", answer=Missing, everywhere="POST /v1/why")
class WhyMissing(ReadOnly, tag=145):
    """Why a node could not provide more of a prompt, whose blocks are `keys` in their order.

    `digest`: of the namespace, without its epoch. `node`: its name; empty: the one that is asked.
    """

    digest: Digest
    keys: bytes
    node: Annotated[str, in_json(None)] = ""


ClientMessage = (
    Hello
    | OpenNamespace
    | Reserve
    | Commit
    | Abort
    | Acquire
    | Join
    | Release
    | CorruptSlots
    | Match
    | Remove
    | Pin
    | Stats
    | Pull
    | Grant
    | Store
    | GiveBack
    | Reset
    | FollowEvents
    | Follow
    | Dropped
    | CloseNamespace
    | Present
    | ClearNamespace
    | SessionTurn
    | EndSessionOn
    | EndRequest
    | Intend
    | AnnounceEngine
    | Engines
    | Prefixes
    | WhyMissing
    | OperatorMessage
)
DaemonMessage = (
    Welcome | Error | Done | Reserved | Committed | Granted | Leased | Bytes | Stored | Opened
)
decode_client = Decoder(ClientMessage)
decode_daemon = Decoder(DaemonMessage)
