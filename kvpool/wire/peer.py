"""Messages between daemons: handshake, fetches, requests.

type  message          direction             answer
----  ---------------  --------------------  ----------------
40    PeerHello        daemon → daemon       PeerChallenge
41    PeerChallenge    daemon → daemon       PeerProof
42    PeerProof        daemon → daemon       Done
43    Fetch            daemon → daemon       Fetched, then its bytes, part by part
44    Fetched          daemon → daemon
45    Ask              daemon → daemon       Done: blocks of the prefix that are there
46    Corrupt          daemon → daemon       none
47    Offer            daemon → daemon       Bytes: one byte a key, 1 where the peer has it now
48    Await            daemon → daemon       Bytes: masks of parts, and the first dropped block, on changes
55    Readable         daemon → daemon       answers a Fetch over NIXL
56    Describe         daemon → daemon       Bytes: NIXL's metadata for reading here
57    Taken            daemon → daemon       none
59    Operate          daemon → daemon       Bytes: the answer to the request in it
136   Holds            daemon → daemon       Bytes: one byte a key, 1 where the block is there
137   Discard          daemon → daemon       Bytes: one byte a key, 1 where there was a block
141   SessionEnded     daemon → daemon       Done: 1 if the session was known there
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from kvpool.decoding import Finite
from kvpool.wire.frame import (
    PROTOCOL_OLDEST,
    Bytes,
    Count,
    Decoder,
    Digest,
    Done,
    Epoch,
    Error,
    Integer,
    Message,
    Nonce,
    Part,
    Parts,
    Proof,
    ReadOnly,
)

FIRST_DROPPED = struct.Struct("<I")  # in answers to `Await`
# The bytes behind a `Fetched` come in groups: as many whole blocks as fit, one at least. Where a connection has keys, a
# tag follows each group.
GROUP_BYTES = 1 << 20
GROUP_BLOCKS_MAX = 1024
TOMBSTONE_BYTES = 16  # of a token


class PeerHello(Message, tag=40):
    """The first message of a peer, with its nonce."""

    version: Count
    cluster: str
    node: str
    nonce: Nonce
    oldest: Count = PROTOCOL_OLDEST


class PeerChallenge(Message, tag=41):
    """`proof`: HMAC over both nonces with the listener's first secret; `more`: with its others."""

    version: Count
    node: str
    incarnation: str
    nonce: Nonce
    proof: Proof
    oldest: Count = PROTOCOL_OLDEST
    more: tuple[Proof, ...] = ()


class PeerProof(Message, tag=42):
    """Proves that a peer knows one of the listener's secrets."""

    proof: Proof


class PartKeys(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks of one part. `nbytes` must be the part's at the owner."""

    part: Part
    nbytes: Count
    keys: bytes


class Fetch(ReadOnly, tag=43):
    """Blocks of one or more parts, each named once, wanted by `deadline_s` from now.

    background: nobody waits for them: they are served when nothing more urgent is.
    """

    tenant: str
    digest: Digest
    parts: list[PartKeys]
    deadline_s: Finite
    background: bool = False
    trace: str = ""


class Fetched(Message, tag=44):
    """`present`: one byte a key. Then follow the wanted bytes of each present key, in order.

    `checksums`: 16 bytes for each present key, as committed by the writer; zeros where it is not committed.
    """

    present: bytes
    checksums: bytes


class Ask(ReadOnly, tag=45):
    """How many blocks of this prefix could be pulled, by the hit rules of `parts` (empty: all)?

    A transfer worker passes it on to its control process, which answers.
    """

    tenant: str
    digest: Digest
    parts: Parts
    keys: bytes


class Holds(ReadOnly, tag=136):
    """Which of these blocks' parts could be pulled from here, whatever the others are?"""

    tenant: str
    digest: Digest
    part: Part
    keys: bytes


Tombstone = Annotated[bytes, msgspec.Meta(max_length=TOMBSTONE_BYTES)]


class Discard(Message, tag=137):
    """A client wants these blocks of some namespaces removed from all nodes: see `Remove`."""

    tenant: str
    digests: list[Digest]
    keys: bytes
    deadline_s: Finite
    to: str
    """The node that is meant."""
    tombstone: Tombstone = b""
    """Names a tombstone that stands on the blocks from now on, at most until the deadline. Without keys: the one that
    is taken down. Empty: there is none.
    """


class SessionEnded(Message, tag=141):
    """A client of another node reports that a session has no further turns here. `to`: the node that is meant."""

    tenant: str
    session: str
    to: str


class Corrupt(Message, tag=46):
    """These blocks arrived and do not match their owner's checksums. It verifies and drops its replicas.

    A transfer worker passes it on to its control process. Only for blocks that this peer has just fetched.
    """

    tenant: str
    digest: Digest
    part: Part
    keys: bytes


class Offer(Message, tag=47):
    """A peer, known to the cluster as `node` and `incarnation`, asks this node to keep these blocks.

    The node pulls the whole blocks that it wants, and then answers; only those that it reports may
    be relied on. `reason`: copy (replication), forward (a victim of the peer's eviction), or
    drain. `digest`, `fields`, `parts`, `epoch`: the namespace, as in `OpenNamespace`. `age_s`: since the
    most recent use of any of them. `hops`: how often they were forwarded, this time included.
    `mask`: the parts to pull, bit p of byte p // 8. `to`: the node that is meant; empty: whoever hears it.
    """

    node: str
    incarnation: str
    reason: str
    tenant: str
    digest: Digest
    epoch: Epoch
    fields: bytes
    parts: list[tuple[Integer, str, Integer, Integer]]
    keys: bytes
    mask: bytes
    replicas: Integer
    hops: Integer
    age_s: Finite
    deadline_s: Finite
    to: str = ""


class Await(ReadOnly, tag=48):
    """Which parts of these blocks are in memory here? Repeated while an engine here computes them.

    Answered at once if any part is here that `known` lacks, else as soon as one is committed, when the writer of a
    block that lacks parts has given it up, or after `wait_s`. `node`: the requester. `known`, and the answer: for each
    key the parts, bit p of byte p // 8, all of one length. Behind the masks of the answer is a `FIRST_DROPPED`: the
    index of the first key whose block was given up, or the count of keys.
    """

    node: str
    tenant: str
    digest: Digest
    keys: bytes
    known: bytes
    wait_s: Finite


class Readable(Message, tag=55):
    """A `Fetch` over NIXL: where to read the blocks, which stay until a `Taken`, or the `Fetch`'s deadline.

    `present`, `checksums`: as in a `Fetched`. `rows`: u32 for each present key; row n is at `base + n * stride`.
    `agent`, `version`: the owner's. A peer that does not know it, or only an older version, asks it to
    `Describe` itself first.
    """

    present: bytes
    checksums: bytes
    rows: bytes
    base: Count
    stride: Count
    agent: str
    version: Count


class Describe(ReadOnly, tag=56):
    """NIXL's metadata for reading from here. Requested between a `Readable` and its `Taken`."""


class Taken(Message, tag=57):
    """The blocks of the last `Readable` are no longer being read."""


class Operate(Message, tag=59):
    """An operator's request forwarded by another node; `node`: that node, the rest as in `OnNode`.

    `to`: the node that is meant; empty: whoever hears it.

    Answered with the payload of the answer's frame.
    """

    node: str
    request: bytes
    wait_s: Finite
    tenant: str
    by: str
    to: str = ""


Question = Ask | Holds | Offer | Discard | SessionEnded
"""Answered with a message, an `Offer` and a `Discard` by their deadlines."""
LongQuestion = Await | Operate
"""Answered when there is news, or the work is done."""

PeerMessage = (
    PeerHello
    | PeerChallenge
    | PeerProof
    | Fetch
    | Fetched
    | Ask
    | Holds
    | Offer
    | Discard
    | SessionEnded
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
decode_peer = Decoder(PeerMessage)
