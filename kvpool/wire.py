"""Every message that travels, and how it is framed.

A frame, on the control socket, between the daemon's processes, and ahead of bulk bytes between daemons:

    0        4           8
    +--------+-----------+---------------------------+
    | length | request   | MessagePack of one message|
    +--------+-----------+---------------------------+
      u32 LE   u32 LE      `length` bytes

`request` is chosen by who asks and repeated in the answer; 0 asks for no answer. A message is an array
whose first element is its type number:

    type  message            direction            answer
    ----  -----------------  -------------------  ----------------
    1     Hello              client → daemon      Welcome, with the segment's descriptor
    2     Welcome            daemon → client
    3     Error              any answer
    4     Done               answer: a count
    10    OpenNamespace      client → daemon      Opened
    11    Reserve            client → daemon      Reserved
    12    Reserved           daemon → client
    13    Commit             client → daemon      Done: blocks newly stored
    14    Abort              client → daemon      Done, or none
    15    Acquire            client → daemon      Leased
    16    Leased             daemon → client
    17    Join               client → daemon      Leased
    18    Release            client → daemon      Done, or none
    19    Match              client → daemon      Done: blocks
    20    Contains           client → daemon      Bytes: one byte a key, 0 or 1
    21    Bytes              daemon → client
    22    Remove             client → daemon      Done: blocks removed
    23    Pin                client → daemon      Done: blocks pinned or unpinned
    24    Stats              client → daemon      Bytes: a JSON object
    25    Pull               client → daemon      Done: blocks now here
    26    Grant              client → daemon      Reserved
    27    Store              client → daemon      Stored
    28    Stored             daemon → client
    29    GiveBack           client → daemon      Done, or none
    30    Reset              client → daemon      Opened
    31    Cluster            operator → daemon    Bytes: a JSON object
    32    Locate             operator → daemon    Bytes: a JSON object
    33    Drain              operator → daemon    Done
    34    Clear              operator → daemon    Done: the new epoch
    35    Configure          operator → daemon    Done
    36    Opened             daemon → client
    37    Evict              operator → daemon    Done: blocks that went
    38    PinBlocks          operator → daemon    Done: blocks pinned or unpinned
    39    Scrub              operator → daemon    Bytes: a JSON object
    40    PeerHello          daemon → daemon      PeerChallenge
    41    PeerChallenge      daemon → daemon      PeerProof
    42    PeerProof          daemon → daemon      Done
    43    Fetch              daemon → daemon      Fetched, then its bytes
    44    Fetched            daemon → daemon
    45    Ask                daemon → daemon      Done: blocks of the prefix that are there
    46    Corrupt            daemon → daemon      none
    47    Offer              daemon → daemon      Bytes: one byte a key, 1 where the peer has it now
    48    Await              daemon → daemon      Bytes: masks of parts, and what is being written, when there is news
    50    FollowEvents       client → daemon      Done: 1 if they are followed; or none
    51    Follow             client → daemon      Done: blocks now here
    53    AnnounceEngine     client → daemon      Done: 1 if it is announced; or none
    54    Engines            client → daemon      Bytes: a JSON array
    52    Progress           client → daemon      Done, or none
    55    Readable           daemon → daemon      answers a Fetch over NIXL
    56    Describe           daemon → daemon      Bytes: what NIXL needs to read here
    57    Taken              daemon → daemon      none
    58    Prefixes           client → daemon      Bytes: a JSON object
    59    Operate            daemon → daemon      Bytes: the answer to the request in it
    60    MoverStart         control → mover      MoverReady
    61    MoverReady         mover → control
    62    AttachSegment      control → mover      Done; carries a descriptor
    63    PullBlocks         control → mover      Pulled
    64    Pulled             mover → control
    65    Lend               mover → control      Lent
    66    Lent               control → mover
    67    Return             mover → control      none
    68    AskPeer            control → mover      the peer's answer to what it was asked
    69    StopOrder          control ↔ worker     none; the order's answer then comes early
    70    DiskStart          control → disk       DiskReady
    71    DiskReady          disk → control
    72    ScanDisk           control → disk       Scanned
    73    Scanned            disk → control
    74    AddTable           control → disk       Done: the table's number
    75    DropTables         control → disk       Done
    76    WriteBlocks        control → disk       Written
    77    Written            disk → control
    78    ReadBlocks         control → disk       Pulled
    79    ForgetSlots        control → disk       Done
    80    ScrubBlocks        control → disk       Written
    81    DiskStats          control → disk       Bytes: a JSON object
    82    PinSlots           control → disk       Done
    83    PackBlocks         control → disk       Packed
    84    Packed             disk → control
    85    DropPack           control → disk       none
    90    StoreStart         control → store      Done
    91    CheckStore         control → store      Done
    92    KeepBlocks         control → store      Kept
    93    Kept               store → control
    94    LoadBlocks         control → store      Pulled
    95    ListPacks          control → store      PackList
    96    PackList           store → control
    97    DropPacks          control → store      Done
    98    StoreStats         control → store      Bytes: a JSON object
    99    ForgetBlocks       control → store      Kept
    100   OnNode             operator → daemon    what the request in it is answered with
    101   Inspect            operator → daemon    Bytes: a JSON object
    102   ListBlocks         operator → daemon    Bytes: a JSON object
    103   ShowBlocks         operator → daemon    Bytes: a JSON array
    104   BeginJob           operator → daemon    Bytes: a JSON object
    105   Jobs               operator → daemon    Bytes: a JSON array
    106   StopJob            operator → daemon    Done: 1 if it was running
    107   Events             operator → daemon    Bytes: a JSON object
    108   Settings           operator → daemon    Bytes: a JSON array
    109   ChangeSettings     operator → daemon    Done
    110   DeviceStart        control → device     Done
    111   LiftBlocks         control → device     Done
    112   LowerBlocks        control → device     Pulled
    113   ExportSegment      control → device     Bytes: a handle for one attach
    120   GatewayStart       control → gateway    Bytes: the URLs that it listens on, a JSON array
    121   TakeSpans          operator → daemon    Bytes: a JSON object

Block keys, checksums and row numbers are packed into one bytes object each: one object a batch decodes
tens of times faster than one a block. Rows are u32 LE; `NO_ROW` stands for "nothing here".
Times that travel are durations in seconds, never time stamps.
`trace` is the W3C `traceparent` of whoever asks, or empty; what is not valid or not sampled counts as empty.

Versions: each side says in its first message which it speaks best, and the oldest that it speaks. The lower
one of the two best is spoken, and who does not speak that is refused then. From one version to the next a
message may get further fields at its end, with defaults: who is older does not look at them, who is newer
finds the defaults. Nothing else of a message changes, and none is sent to those who are too old to know it.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

import msgspec

from kvpool.errors import KvpoolError, ProtocolError, from_code
from kvpool.types import EngineRecord

PROTOCOL_VERSION = 7
PROTOCOL_OLDEST = 6
HEADER = struct.Struct("<II")
FRAME_BYTES_MAX = 16 << 20
HELLO_BYTES_MAX = 64 << 10  # what a connection may send before it has introduced itself
KEYS_MAX = 1 << 16  # keys in one request
NO_ROW = 0xFFFFFFFF
BEING_WRITTEN = struct.Struct("<QIIIQ")  # in answers to `Await`
HEARD = struct.Struct("<QQ")  # in an `Await`


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages: an array on the wire, immutable, owned by whoever decoded it."""


def spoken(version: int, oldest: int) -> int | None:
    """The version that is spoken with somebody who speaks these; None: none is. oldest: 0 for `version`."""
    lower = min(version, PROTOCOL_VERSION)
    return lower if lower >= max(oldest or version, PROTOCOL_OLDEST) else None


def agree(version: int, oldest: int, whose: str) -> int:
    """As `spoken`. Raises `ProtocolError`. whose: "the client", "the peer"."""
    found = spoken(version, oldest)
    if found is None:
        raise ProtocolError(
            f"this side speaks protocol {_range(PROTOCOL_VERSION, PROTOCOL_OLDEST)}, {whose} "
            f"{_range(version, oldest)}: install the same version of kvpool on both, or neighbouring ones"
        )
    return found


def _range(version: int, oldest: int) -> str:
    return f"{oldest} to {version}" if 0 < oldest < version else str(version)


class Hello(Message, tag=1):
    """First frame of a connection of a client.

    `instance`: the engine instance that its leases belong to. `client`: chosen at random by each client
    and the same on all its connections; reservations belong to it. `operator`: the operator token. `device`:
    the client wants to read spare device memory by itself. `version`, `oldest`: the protocols that it speaks.
    """

    version: int
    tenant: str
    instance: str
    client: str
    token: str | None = None
    operator: str = ""
    device: bool = False
    oldest: int = 0


class Welcome(Message, tag=2):
    """The daemon's answer. The segment's descriptor comes with its first byte (SCM_RIGHTS).

    `device`: a handle of the tenant's part of spare device memory, good for one attach, where the client asked
    for it and there is some; then `life` names the present life of the process that owns it, and a
    descriptor that tells of its end (`kvpool.life`) comes with the segment's.
    """

    version: int
    node: str
    incarnation: str
    segment: int
    segment_bytes: int
    device: bytes = b""
    life: int = 0


class Error(Message, tag=3):
    code: str
    message: str


class Done(Message, tag=4):
    value: int = 0


class OpenNamespace(Message, tag=10):
    """`fields`: canonical JSON whose digest is checked. `parts`: [nbytes, kind, window, stride] each.

    `generation`: that of the client's weights, from an `Opened` of before; -1: its weights are the present
    ones. The settings are those wanted if the namespace is new to the cluster: see `Configure`; `copies` 0
    is one, and empty `write` as each node does by default.
    """

    digest: bytes
    fields: bytes
    parts: list[tuple[int, str, int, int]]
    copies: int = 0
    generation: int = -1
    write: str = ""
    ttl_s: float = 0.0
    ssd_codec: str = ""
    write_remote: str = ""


class Reserve(Message, tag=11):
    """`ticket` names the reservation; the client chooses it, so that it can abort what it never heard of.

    `parent`: the key before the first one in the prefix chain, or empty.
    """

    ns: int
    part: int
    ticket: int
    keys: bytes
    parent: bytes = b""


class Reserved(Message, tag=12):
    """`rows`: one a key, `NO_ROW` where the block is there already."""

    stride: int
    rows: bytes


class Commit(Message, tag=13):
    """`checksums`: 16 bytes for each row handed out, in order. `indices` (u32) commits only these keys.

    `copies`: wanted in the cluster; 0: as many as the namespace says.
    """

    ticket: int
    checksums: bytes
    indices: bytes = b""
    copies: int = 0


class Progress(Message, tag=52):
    """The first `nbytes` bytes of each slot of this reservation are as they will be committed.

    Peers who follow the prompt may pull them now. A promise that does not hold costs them a transfer: what they
    have read is compared with the checksums at the commit.
    """

    ticket: int
    nbytes: int


class Abort(Message, tag=14):
    tickets: list[int]


class Acquire(Message, tag=15):
    """A lease on the longest usable prefix, or with `scattered` on each of the keys that is present.

    `parts`: empty means all. `wait_s`: how long to wait for blocks that must come from other nodes. `recompute`:
    see `Pull`; not with `scattered`, where no block replaces the computing of those behind it. `life`: of the
    device memory that the client is attached to, and reads by itself; 0: none. Not with `scattered`.
    """

    ns: int
    keys: bytes
    parts: list[int]
    lease_s: float
    wait_s: float = 0.0
    scattered: bool = False
    recompute: tuple[float, float] | None = None
    life: int = 0
    trace: str = ""


class LeasedPart(Message):
    """Slots of one part: rows in block order, from block index `first` on.

    `device_rows`: of the tenant's device memory, as many; each block has one of both, and `NO_ROW` for the
    other. Empty where all are in memory.
    """

    part: int
    first: int
    stride: int
    nbytes: int
    rows: bytes
    device_rows: bytes = b""


class Leased(Message, tag=16):
    """`token` is empty when nothing is there.

    `lease_s`: how long the lease lasts, counted from when the daemon got the request. So a client that
    counts from when it asked never believes in a lease that has ended, however late the answer comes.
    `life`: of the device memory that the lease has rows of; 0: of none.
    """

    token: str
    blocks: int
    lease_s: float
    parts: list[LeasedPart]
    life: int = 0


class Join(Message, tag=17):
    token: str
    parts: list[int]


class Release(Message, tag=18):
    tokens: list[str]


class Match(Message, tag=19):
    ns: int
    keys: bytes
    parts: list[int]


class Contains(Message, tag=20):
    ns: int
    part: int
    keys: bytes


class Bytes(Message, tag=21):
    data: bytes


class Remove(Message, tag=22):
    ns: int
    keys: bytes


class Pin(Message, tag=23):
    """`kind`: soft, hard, or none (unpin)."""

    ns: int
    keys: bytes
    kind: str


class Stats(Message, tag=24):
    pass


class Pull(Message, tag=25):
    """Bring the blocks here from other nodes, all parts, before `wait_s` is over.

    `recompute`: seconds that the client takes to compute the first block, and how many more each further one
    takes than the one before it. What would take longer to bring is left out. None: not known, bring all.
    `life`: of the device memory that the client's engine reads by itself: what is there counts as here; 0: none.
    """

    ns: int
    keys: bytes
    wait_s: float
    recompute: tuple[float, float] | None = None
    life: int = 0
    trace: str = ""


class Grant(Message, tag=26):
    """Slots of a part's size without keys, to be filled and then named by `Store`: up to `count`."""

    ns: int
    part: int
    count: int


class Store(Message, tag=27):
    """Granted slots have been written; these are their keys and checksums. One exchange a put.

    `count`: how many granted slots the client would like to have for the next one. `copies`: see `Commit`.
    """

    ns: int
    part: int
    rows: bytes
    keys: bytes
    checksums: bytes
    count: int
    parent: bytes = b""
    copies: int = 0


class Stored(Message, tag=28):
    """`new`: blocks newly stored. `unused`: rows whose block was there already; they stay granted.

    `fresh`: further rows, granted now.
    """

    new: int
    unused: bytes
    fresh: bytes


class GiveBack(Message, tag=29):
    """Granted slots that nobody writes to any more, and that are not needed.

    `stride` 0: all that this client was ever granted, also what it has not heard of.
    """

    stride: int
    rows: bytes


class Reset(Message, tag=30):
    """This engine's weights are new: none of the namespace's blocks may be read any more, by anybody.

    `generation`: of its weights so far; they are of the next one now. Begins that one's epoch, or enters
    it where another engine's reset has begun it. Where there are later ones already, this engine stays out.
    """

    ns: int
    generation: int


class Cluster(Message, tag=31):
    """What this node knows of the cluster: nodes, namespaces, directory."""


class Locate(Message, tag=32):
    """Where these blocks are, by the directory. `digest`: of one namespace; empty: all of the tenant's."""

    keys: bytes
    digest: bytes = b""


class Drain(Message, tag=33):
    """Have a node copy its sole copies elsewhere and leave, or with `wanted` false, call that off."""

    node: str
    wanted: bool = True


class Clear(Message, tag=34):
    """Begin a new epoch of a namespace. Engines go on in it, but with `fence` only once they reopen it."""

    digest: bytes
    fence: bool = False


class Configure(Message, tag=35):
    """Change settings of a namespace in the whole cluster; null: that one stays as it is.

    `replicas`: copies of each block. `write`: when blocks go to SSD: back, through, none, or empty: as each
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


class Opened(Message, tag=36):
    """`number`: the namespace's, in this incarnation. `generation`: of weights, that the client is in.

    `current`: whether that is the living one; else reads find nothing and writes are refused.
    """

    number: int
    generation: int
    current: bool


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
    """`spec`: JSON, one of `kvpool.jobs.JobSpec`. `job`: its name, which this node does not know yet.

    JSON: a `kvpool.jobs.JobView`.
    """

    job: str
    spec: bytes
    dry_run: bool = False


class Jobs(Message, tag=105):
    """`jobs`: names; none: all that the node remembers. JSON: an array of `kvpool.jobs.JobView`."""

    jobs: list[str] = []


class StopJob(Message, tag=106):
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

    JSON: spans, left, dropped; see `kvpool.spans.Batch`.
    """

    count: int


class Operate(Message, tag=59):
    """An operator of one node asks another one; `node`: the one that asks, the rest as in `OnNode`.

    Answered with the payload of the answer's frame.
    """

    node: str
    request: bytes
    wait_s: float
    tenant: str
    by: str


class PeerHello(Message, tag=40):
    version: int
    cluster: str
    node: str
    nonce: bytes
    oldest: int = 0


class PeerChallenge(Message, tag=41):
    """`proof`: HMAC over both nonces where a cluster secret is set, else empty."""

    version: int
    node: str
    incarnation: str
    nonce: bytes
    proof: bytes
    oldest: int = 0


class PeerProof(Message, tag=42):
    proof: bytes


class Fetch(Message, tag=43):
    """Blocks of one part, wanted by `deadline_s` from now. `nbytes` must be the part's at the owner.

    background: nobody waits for them: they come when nothing that is waited for is in the way. `start`: the
    first byte of each that is wanted. `stop`: the byte behind the last one, of blocks that are being written and
    not committed (see `Await`); 0: they are committed, and all bytes from `start` on are wanted.
    """

    tenant: str
    digest: bytes
    part: int
    nbytes: int
    keys: bytes
    deadline_s: float
    background: bool = False
    start: int = 0
    stop: int = 0
    trace: str = ""


class Fetched(Message, tag=44):
    """`present`: one byte a key. Then follow the wanted bytes of each present key, in order.

    `checksums`: 16 bytes for each present key, as committed by the writer; zeros where it is not committed.
    """

    present: bytes
    checksums: bytes


class Ask(Message, tag=45):
    """How many blocks of this prefix could be pulled, by the hit rules of `parts` (empty: all)?

    A mover passes it on to its control process, which answers.
    """

    tenant: str
    digest: bytes
    parts: list[int]
    keys: bytes


class Corrupt(Message, tag=46):
    """These blocks arrived, and are not what their owner's checksums say. It drops its copies.

    A mover passes it on to its control process. Only for blocks that this peer has just fetched.
    """

    tenant: str
    digest: bytes
    part: int
    keys: bytes


class Offer(Message, tag=47):
    """A peer, as which `node` and `incarnation` are known to the cluster, would like these blocks kept here.

    The node pulls what it wants of them, whole blocks, and then answers; none but what it says it has may
    be relied on. `reason`: copy (wanted in so many places), forward (a victim of the peer's eviction), or
    drain. `digest`, `fields`, `parts`, `epoch`: the namespace, as in `OpenNamespace`. `age_s`: since the
    most recent use of any of them. `hops`: how often they were forwarded, this time included.
    `mask`: the parts to pull, bit p of byte p // 8.
    """

    node: str
    incarnation: str
    reason: str
    tenant: str
    digest: bytes
    epoch: int
    fields: bytes
    parts: list[tuple[int, str, int, int]]
    keys: bytes
    mask: bytes
    copies: int
    hops: int
    age_s: float
    deadline_s: float


class Await(Message, tag=48):
    """What is in memory here of these blocks? Asked again and again while an engine here computes them.

    Answered at once where any part is here that `known` lacks, else as soon as one is committed, or with
    `wait_s` over. `known`, and the answer: for each key the parts, bit p of byte p // 8, all of one length.
    `node`: who asks.

    With `heard` the answer also comes when more is written of blocks that are not committed, as their writer
    says (`Progress`), and behind the masks it has for each run of such keys a `BEING_WRITTEN`: number of the
    reservation, part, index of the first key, count of keys, bytes that are written of each. `heard`: for each
    reservation that the asker was told of a `HEARD`: its number, and the bytes.
    """

    node: str
    tenant: str
    digest: bytes
    keys: bytes
    known: bytes
    wait_s: float
    heard: bytes | None = None


class Readable(Message, tag=55):
    """A `Fetch` over NIXL: where to read the blocks, which stay until a `Taken`, or the `Fetch`'s deadline.

    `present`, `checksums`: as in a `Fetched`. `rows`: u32 for each present key; row n is at `base + n * stride`.
    `agent`, `version`: who holds them. A peer that does not know it, or only an older version, asks it to
    `Describe` itself first.
    """

    present: bytes
    checksums: bytes
    rows: bytes
    base: int
    stride: int
    agent: str
    version: int


class Describe(Message, tag=56):
    """What NIXL needs to read from here. Asked between a `Readable` and its `Taken`."""


class Taken(Message, tag=57):
    """The blocks of the last `Readable` are not read any more."""


class FollowEvents(Message, tag=50):
    """This client's engine tells of its own cache in KV events: follow them, as long as its process lives.

    `endpoint`: to connect to, on this machine; empty: follow them no more. `replay`: where missed ones are
    repeated, or empty. `groups`: the cache group, in the events' numbers, of each part of the namespace.
    One engine a client: another message takes the place of the one before.
    """

    ns: int
    endpoint: str
    replay: str = ""
    topic: str = ""
    groups: list[int] = []


class Follow(Message, tag=51):
    """Bring a prompt's blocks here while an engine elsewhere computes them, until `wait_s` is over.

    `source`: the node of that engine, or empty where that is not known. `parts`: empty means all.
    """

    ns: int
    keys: bytes
    wait_s: float
    source: str = ""
    parts: list[int] = []
    trace: str = ""


class AnnounceEngine(Message, tag=53):
    """This client's engine takes requests: tell all nodes, as long as its process lives.

    `engine`: null: not any more. One engine a client: another message takes the place of the one before.
    """

    ns: int
    engine: EngineRecord | None


class Engines(Message, tag=54):
    """The engines of this tenant that were announced, on all nodes. For each: what was announced, `node`,
    `incarnation`, `labels` of it, and whether it is on this machine (`here`).
    """


class Prefixes(Message, tag=58):
    """How much of a prefix each node could give, by the directory, in blocks: `{node: [in memory, with disks]}`.

    `digest`: of the namespace, without its epoch; this node need not have it open. `wait_s`: what does not
    answer in that time is left out.
    """

    digest: bytes
    keys: bytes
    wait_s: float


class MoverStart(Message, tag=60):
    """First frame on a mover's control channel: who it is and where it listens (empty: nowhere).

    `waits_max`: questions to peers that wait, at a time: engines' (`Await`), and as many of operators (`Operate`).
    `tls_cert`, ...: paths, as in the configuration.
    """

    cluster: str
    node: str
    incarnation: str
    secret: str
    listen: list[str]
    connections_max: int
    inflight_bytes_max: int
    waits_max: int = 16
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_crl: str = ""
    plaintext: bool = False


class MoverReady(Message, tag=61):
    """`listening`: the URLs that peers can pull from."""

    listening: list[str]


class AttachSegment(Message, tag=62):
    """Map this segment; its descriptor comes with the frame."""

    segment: int
    size: int


class PullBlocks(Message, tag=63):
    """Fetch blocks from the peer at `url` straight into reserved rows of a segment.

    `background`, `start`, `stop`: see `Fetch`. The bytes before `start` are in the rows already.
    """

    url: str
    tenant: str
    digest: bytes
    part: int
    nbytes: int
    keys: bytes
    segment: int
    stride: int
    rows: bytes
    deadline_s: float
    background: bool = False
    start: int = 0
    stop: int = 0
    trace: str = ""


class Pulled(Message, tag=64):
    """`status`: one byte a key: 0 absent there, 1 here and verified, 2 checksum mismatch, 3 not arrived.

    What is not committed yet (`stop`) cannot be verified: 1 is here as it came, and its checksum zeros.
    `checksums`: 16 bytes a key, zeros unless status is 1. When this is sent, nothing writes to the rows
    any more. `error`: why the transfer ended early, or empty. `refused`: that is what the peer answered, by this
    way as by any other.
    """

    status: bytes
    checksums: bytes
    seconds: float
    error: str = ""
    refused: bool = False


class Lend(Message, tag=65):
    """A peer wants these: lease them to the mover for `deadline_s`. `stop`: see `Fetch`."""

    tenant: str
    digest: bytes
    part: int
    nbytes: int
    keys: bytes
    deadline_s: float
    stop: int = 0
    trace: str = ""


class Lent(Message, tag=66):
    """`rows`: one a key, `NO_ROW` where absent. `checksums`: 16 bytes for each key that is present.

    `token`: to be returned when the bytes have been taken; empty when nothing is lent.
    """

    token: str
    segment: int
    stride: int
    rows: bytes
    checksums: bytes


class Return(Message, tag=67):
    token: str


class AskPeer(Message, tag=68):
    """Ask the peer at `url`, for at most `deadline_s`. `background`: a late answer says nothing of the way."""

    url: str
    question: Ask | Offer | Await | Operate
    deadline_s: float
    background: bool = False


class StopOrder(Message, tag=69):
    """End what was ordered as `request`: nobody waits for it. From a mover: what it asked, without an answer."""

    request: int


class DiskStart(Message, tag=70):
    """First frame on a disk process's control channel: the folder that it owns, and its limits.

    `size`: bytes that all in the folder may take. `threads`: reads and writes at a time.
    """

    path: str
    size: int
    threads: int


class DiskReady(Message, tag=71):
    """`tables`: number and record of each that the index knows. `direct`: whether the page cache is bypassed.

    `entries_max`: blocks that the index has room for. `codecs`: the names of those that can be used there.
    """

    segment_bytes: int
    entries_max: int
    direct: bool
    tables: list[tuple[int, bytes]]
    codecs: list[str] = []


class ScanDisk(Message, tag=72):
    """The next entries of the index: about `count`."""

    count: int


class Scanned(Message, tag=73):
    """`entries`: packed as `kvpool.storage.ssd_index.ENTRY`. Empty: that was all.

    `codec_error`: why blocks that are packed cannot be read, though `DiskReady` has named their codec.
    """

    entries: bytes
    codec_error: str = ""


class AddTable(Message, tag=74):
    """Know a table by a number from now on, after restarts too. The same record has the same number.

    `table`: the number of a table whose record this one replaces; 0: it is a new one.
    """

    record: bytes
    table: int = 0


class DropTables(Message, tag=75):
    """Nothing of these is left, and nothing more will come."""

    tables: list[int]


class WriteBlocks(Message, tag=76):
    """Write rows of a segment to slots of the disk: readable after any crash once this is answered.

    `slots`: byte offsets, u64. `forget`: slots whose blocks have gone; that is made durable before anything
    is written. `depths`: u32. `parents`, `checksums`: 16 bytes a key. `pack`: the blocks are what was packed
    under this number, and `rows` counts those of its `PackBlocks`; 0: they lie in the segment.
    """

    table: int
    nbytes: int
    keys: bytes
    parents: bytes
    depths: bytes
    checksums: bytes
    slots: bytes
    segment: int
    stride: int
    rows: bytes
    forget: bytes
    deadline_s: float
    pack: int = 0


class Written(Message, tag=77):
    """`status`: one byte a key: 1 done, 2 checksum mismatch, 3 I/O error, 4 no room."""

    status: bytes
    seconds: float


class ReadBlocks(Message, tag=78):
    """Read slots of the disk into reserved rows of a segment, and compare them with their checksums.

    The answer's `status`: 0 not begun, 1 there and verified, 2 checksum mismatch, 3 I/O error. `lengths`: of
    the slots, u32, shorter than a whole block where it is packed; empty: none is.
    """

    nbytes: int
    checksums: bytes
    slots: bytes
    segment: int
    stride: int
    rows: bytes
    deadline_s: float
    lengths: bytes = b""


class ForgetSlots(Message, tag=79):
    """The blocks in these slots (u64) have gone. Answered when that is durable."""

    slots: bytes
    deadline_s: float


class ScrubBlocks(Message, tag=80):
    """Compare slots of the disk with their checksums. `lengths`: see `ReadBlocks`."""

    nbytes: int
    checksums: bytes
    slots: bytes
    deadline_s: float
    lengths: bytes = b""


class PinSlots(Message, tag=82):
    """Keep the pin `level` of these slots (u64) in the index. Answered when that is durable."""

    slots: bytes
    level: int
    deadline_s: float


class PackBlocks(Message, tag=83):
    """Make blocks in rows of a segment smaller, and keep them under the number `pack` until `DropPack`."""

    pack: int
    nbytes: int
    segment: int
    stride: int
    rows: bytes
    deadline_s: float


class Packed(Message, tag=84):
    """`stored`: u32, the bytes that each takes now; `nbytes`: it is not worth it."""

    stored: bytes
    seconds: float


class DropPack(Message, tag=85):
    """A pack is not needed any more, if there is one. No answer."""

    pack: int


class DiskStats(Message, tag=81):
    """What the disk process counts."""

    deadline_s: float


class StoreStart(Message, tag=90):
    """First frame on a store process's control channel: where its objects lie, and its limits.

    `node`: 8 bytes, by which this node knows packs for its own in each of its lives. `bytes_max`: of these.
    `instance_credentials`: where no others are given, the metadata service of the cloud is asked.
    """

    url: str
    node: bytes
    bytes_max: int
    instance_credentials: bool


class CheckStore(Message, tag=91):
    """Ask the store for a listing, and tell whether it can be used."""

    deadline_s: float


class KeepBlocks(Message, tag=92):
    """Write rows of a segment to packs, in the order of their chains. `record`: of the table, opaque.

    `depths`: u32. `parents`, `checksums`: 16 bytes a key.
    """

    digest: bytes
    part: int
    record: bytes
    nbytes: int
    keys: bytes
    parents: bytes
    depths: bytes
    checksums: bytes
    segment: int
    stride: int
    rows: bytes
    deadline_s: float


class Kept(Message, tag=93):
    """`status`: one byte a key: 1 done, 3 the store failed, 4 no room. `locations`: 50 bytes a key, for those
    that are done. `dropped`: packs that made way, each with the blocks that went with it: digest, part, the
    pack's id, keys.
    """

    status: bytes
    locations: bytes
    dropped: list[tuple[bytes, int, bytes, bytes]]


class LoadBlocks(Message, tag=94):
    """Read blocks into reserved rows of a segment and compare them with the checksums in their locations.

    `locations`: 50 bytes a block. The answer's `checksums` are empty.
    """

    digest: bytes
    part: int
    nbytes: int
    locations: bytes
    segment: int
    stride: int
    rows: bytes
    deadline_s: float


class ListPacks(Message, tag=95):
    """The next packs that are there. `first`: begin anew. `own`: only those that this node wrote."""

    first: bool
    own: bool
    deadline_s: float


class PackList(Message, tag=96):
    """`packs`: digest, part, record, seconds since it was written, keys, locations; a large pack comes in
    pieces. Empty: that was all.
    """

    packs: list[tuple[bytes, int, bytes, float, bytes, bytes]]


class DropPacks(Message, tag=97):
    """Nobody uses this namespace any more: delete its packs. `own`: only those that this node wrote."""

    digest: bytes
    own: bool
    deadline_s: float


class StoreStats(Message, tag=98):
    """What the store process counts."""

    deadline_s: float


class ForgetBlocks(Message, tag=99):
    """Nobody wants the blocks at these locations any more. The answer's `dropped`: packs of this node that go
    since too little in them is wanted.
    """

    digest: bytes
    part: int
    locations: bytes
    deadline_s: float


class DeviceStart(Message, tag=110):
    """First frame on a device process's control channel, after the segments of memory.

    Carries the descriptor that tells clients of its end (`kvpool.life`).

    `device`: `cuda:N` or `cpu`. `sizes`: bytes of device memory beside each segment, by its number.
    """

    device: str
    sizes: list[int]


class LiftBlocks(Message, tag=111):
    """Copy rows of a segment to rows of the same stride in the device memory beside it. Answer: `Done`."""

    segment: int
    stride: int
    rows: bytes
    device_rows: bytes
    deadline_s: float


class LowerBlocks(Message, tag=112):
    """Copy rows of device memory back into reserved rows of the segment, and compare with checksums.

    The answer is a `Pulled` without checksums; its status is never 0.
    """

    segment: int
    stride: int
    nbytes: int
    rows: bytes
    device_rows: bytes
    checksums: bytes
    deadline_s: float


class ExportSegment(Message, tag=113):
    """A handle of the device memory beside a segment, for one client to map."""

    segment: int


class GatewayStart(Message, tag=120):
    """First frame on the gateway's control channel: all that it needs, secrets included.

    `addresses`, `tokens_file`, `rate`, `routers`, `otlp`, `node`: see `kvpool.config.DaemonConfig`. `socket`, `tenant`, `token`,
    `operator_token`: how it gets in at its daemon. `digest`: SHA-256 of the token that the daemon has made, hex, or
    empty. `verbose`: log more.
    """

    addresses: list[str]
    socket: str
    socket_mode: int
    tenant: str
    token: str | None
    operator_token: str
    tokens_file: str
    digest: str
    rate: float
    tls_cert: str
    tls_key: str
    routers: list[str]
    router_token: str
    verbose: bool
    otlp: str = ""
    node: str = ""


ClientMessage = (
    Hello
    | OpenNamespace
    | Reserve
    | Commit
    | Progress
    | Abort
    | Acquire
    | Join
    | Release
    | Match
    | Contains
    | Remove
    | Pin
    | Stats
    | Pull
    | Grant
    | Store
    | GiveBack
    | Reset
    | Cluster
    | Locate
    | Drain
    | Clear
    | Configure
    | Evict
    | PinBlocks
    | Scrub
    | FollowEvents
    | Follow
    | AnnounceEngine
    | Engines
    | Prefixes
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
DaemonMessage = Welcome | Error | Done | Reserved | Leased | Bytes | Stored | Opened
PeerMessage = (
    PeerHello
    | PeerChallenge
    | PeerProof
    | Fetch
    | Fetched
    | Ask
    | Offer
    | Await
    | Operate
    | Corrupt
    | Readable
    | Describe
    | Taken
    | Done
    | Bytes
    | Error
)
MoverMessage = (
    MoverStart
    | MoverReady
    | AttachSegment
    | PullBlocks
    | Pulled
    | Lend
    | Lent
    | Return
    | Ask
    | Offer
    | Await
    | Operate
    | AskPeer
    | StopOrder
    | Corrupt
    | Done
    | Bytes
    | Error
)
DiskMessage = (
    DiskStart
    | DiskReady
    | AttachSegment
    | ScanDisk
    | Scanned
    | AddTable
    | DropTables
    | WriteBlocks
    | Written
    | ReadBlocks
    | Pulled
    | ForgetSlots
    | ScrubBlocks
    | PinSlots
    | PackBlocks
    | Packed
    | DropPack
    | DiskStats
    | StopOrder
    | Done
    | Bytes
    | Error
)
StoreMessage = (
    StoreStart
    | AttachSegment
    | CheckStore
    | KeepBlocks
    | Kept
    | LoadBlocks
    | Pulled
    | ListPacks
    | PackList
    | DropPacks
    | StoreStats
    | ForgetBlocks
    | StopOrder
    | Done
    | Bytes
    | Error
)

GatewayMessage = GatewayStart | Bytes | Error
DeviceMessage = (
    DeviceStart
    | AttachSegment
    | LiftBlocks
    | LowerBlocks
    | ExportSegment
    | Pulled
    | StopOrder
    | Done
    | Bytes
    | Error
)

_encoder = msgspec.msgpack.Encoder()


class Decoder:
    """Bytes of one payload to a message of the given union; anything else is a `ProtocolError`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def __call__(self, payload: bytes | bytearray | memoryview) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from None


decode_client = Decoder(ClientMessage)
decode_daemon = Decoder(DaemonMessage)
decode_peer = Decoder(PeerMessage)
decode_mover = Decoder(MoverMessage)
decode_disk = Decoder(DiskMessage)
decode_device = Decoder(DeviceMessage)
decode_store = Decoder(StoreMessage)
decode_gateway = Decoder(GatewayMessage)


def encode(message: Message, request: int) -> bytes:
    """One whole frame."""
    payload = _encoder.encode(message)
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(payload)} bytes: frames are at most {FRAME_BYTES_MAX}"
        )
    return HEADER.pack(len(payload), request) + payload


def error_message(error: KvpoolError) -> Error:
    return Error(error.code, str(error))


def raise_error(error: Error) -> None:
    raise from_code(error.code, error.message)


def pack_rows(rows: list[int]) -> bytes:
    """Row numbers as u32 LE. (kvpool runs on little-endian machines only; import of this module checks.)"""
    return array("I", rows).tobytes()


if array("I", [1]).tobytes() != b"\x01\x00\x00\x00":
    raise ImportError("kvpool needs a little-endian machine with 4-byte C ints")


class FrameReader:
    """Cuts a stream into frames. Feed it what arrives; it holds at most one frame that is incomplete.

    Not thread-safe: one reader a connection.
    """

    def __init__(self, limit: int = FRAME_BYTES_MAX) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Whole frames as (request, payload). Raises `ProtocolError` for a frame above the limit."""
        pending = self._pending
        if pending:
            pending += data
            if len(pending) >= 8:
                length, _ = HEADER.unpack_from(pending)
                if length <= self.limit and len(pending) < 8 + length:
                    return []  # a long frame in many pieces is joined once, not once a piece
            data = bytes(pending)
            pending.clear()
        frames = []
        at, end = 0, len(data)
        while end - at >= 8:
            length, request = HEADER.unpack_from(data, at)
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes: the limit here is {self.limit}")
            stop = at + 8 + length
            if stop > end:
                break
            frames.append((request, data[at + 8 : stop]))
            at = stop
        if at < end:
            self._pending += data[at:]
        return frames

    @property
    def partial(self) -> bool:
        """Whether the stream stands inside a frame: an end here cuts one off."""
        return bool(self._pending)
