"""Messages between the control process and its disk and object workers. Common ones are in `worker`.

type  message          direction             answer
----  ---------------  --------------------  ----------------
70    DiskStart        control → disk        DiskReady
71    DiskReady        disk → control
72    ScanDisk         control → disk        Scanned
73    Scanned          disk → control
74    AddTable         control → disk        Done: the table's number
75    DropTables       control → disk        Done
76    WriteBlocks      control → disk        Written
77    Written          disk → control
78    ReadBlocks       control → disk        Pulled
79    ForgetSlots      control → disk        Done
80    ScrubBlocks      control → disk        Written
81    ReadEntries      control → disk        Scanned
82    PinSlots         control → disk        Done
83    PackBlocks       control → disk        Packed
84    Packed           disk → control
85    DropPack         control → disk        none
86    ChangeSecrets    control → both        none
90    ObjectStart      control → object      Done
91    CheckObjects     control → object      Done
92    PutObjects       control → object      ObjectsPut
93    ObjectsPut       object → control
94    GetObjects       control → object      Pulled
95    ListPacks        control → object      PackList
96    PackList         object → control
97    DropPacks        control → object      Done
98    ObjectStats      control → object      Bytes: a JSON object
99    ForgetBlocks     control → object      ObjectsPut
"""

from __future__ import annotations

import msgspec

from kvpool.decoding import Finite
from kvpool.wire.frame import Bytes, Count, Decoder, Digest, Done, Error, Message, Part
from kvpool.wire.worker import AttachSegment, Pulled, StopOrder


class DiskStart(Message, tag=70):
    """First frame on a disk worker's control channel: the folder that it owns, and its limits.

    `size`: the most bytes used in the folder. `threads`: concurrent reads and writes. `secrets`: those of the
    encryption at rest, the newest first; empty: blocks are not encrypted.
    """

    path: str
    size: Count
    threads: Count
    secrets: list[bytes] = msgspec.field(default_factory=list)


class DiskReady(Message, tag=71):
    """`tables`: number and record of each that the index knows. `direct`: whether the page cache is bypassed.

    `entries_max`: blocks that the index has room for. `codecs`: the names of the available ones. `seal_bytes`:
    by how much the encryption makes a block longer.
    """

    segment_bytes: Count
    entries_max: Count
    direct: bool
    tables: list[tuple[Count, bytes]]
    codecs: list[str] = msgspec.field(default_factory=list)
    seal_bytes: Count = 0


class ScanDisk(Message, tag=72):
    """The next entries of the index: about `count`."""

    count: Count


class Scanned(Message, tag=73):
    """`entries`: packed as `kvpool.storage.ssd.index.ENTRY`. Empty: that was all.

    `codec_error`: why packed blocks cannot be read, although `DiskReady` has named their codec.
    """

    entries: bytes
    codec_error: str = ""


class ReadEntries(Message, tag=81):
    """The entries of these slots (u64) in the index: a `Scanned`. Slots without one are left out."""

    slots: bytes
    deadline_s: Finite


class AddTable(Message, tag=74):
    """Register a table under a number, across restarts too. The same record has the same number.

    `table`: the number of a table whose record this one replaces; 0: it is a new one.
    """

    record: bytes
    table: Count = 0


class DropTables(Message, tag=75):
    """Drop these tables; nothing more is written to them."""

    tables: list[Count]


class WriteBlocks(Message, tag=76):
    """Write rows of a segment to slots of the disk: readable after any crash once this is answered.

    `slots`: byte offsets, u64. `forget`: slots whose blocks are gone; that is made durable before anything
    is written. `depths`: u32. `parents`, `checksums`: 16 bytes a key. `pack`: the blocks were packed
    under this number, and `rows` counts those of its `PackBlocks`; 0: they are in the segment. `place`: namespace and
    part, by which encrypted blocks are known.
    """

    table: Count
    nbytes: Count
    keys: bytes
    parents: bytes
    depths: bytes
    checksums: bytes
    slots: bytes
    segment: Count
    stride: Count
    rows: bytes
    forget: bytes
    deadline_s: Finite
    pack: Count = 0
    place: bytes = b""


class Written(Message, tag=77):
    """`status`: a `BlockStatus` a key: PRESENT, MISMATCH, FAILED, NO_SPACE."""

    status: bytes
    seconds: Finite


class ReadBlocks(Message, tag=78):
    """Read slots of the disk into reserved rows of a segment, and compare them with their checksums.

    The answer's `status`: a `BlockStatus` a key: LATE, PRESENT, MISMATCH, FAILED. `lengths`: of
    the slots, u32, shorter than a whole block if it is packed; empty: none is. `keys`, `place`: as in `WriteBlocks`;
    only of an encrypted disk.
    """

    nbytes: Count
    checksums: bytes
    slots: bytes
    segment: Count
    stride: Count
    rows: bytes
    deadline_s: Finite
    lengths: bytes = b""
    keys: bytes = b""
    place: bytes = b""


class ForgetSlots(Message, tag=79):
    """The blocks in these slots (u64) are gone. Answered when that is durable."""

    slots: bytes
    deadline_s: Finite


class ScrubBlocks(Message, tag=80):
    """Compare slots of the disk with their checksums. `lengths`, `keys`, `place`: see `ReadBlocks`."""

    nbytes: Count
    checksums: bytes
    slots: bytes
    deadline_s: Finite
    lengths: bytes = b""
    keys: bytes = b""
    place: bytes = b""


class PinSlots(Message, tag=82):
    """Keep the pin `level` of these slots (u64) in the index. Answered when that is durable."""

    slots: bytes
    level: Count
    deadline_s: Finite


class PackBlocks(Message, tag=83):
    """Compress blocks in rows of a segment, and keep them under the number `pack` until `DropPack`."""

    pack: Count
    nbytes: Count
    segment: Count
    stride: Count
    rows: bytes
    deadline_s: Finite


class Packed(Message, tag=84):
    """`stored`: u32, the bytes that each takes now; `nbytes`: not worth compressing."""

    stored: bytes
    seconds: Finite


class DropPack(Message, tag=85):
    """A pack is no longer needed, if there is one. No answer."""

    pack: Count


class ChangeSecrets(Message, tag=86):
    """From now on these are the secrets of the encryption at rest, the newest first. No answer."""

    secrets: list[bytes]


class ObjectStart(Message, tag=90):
    """First frame on an object worker's control channel: the place of its objects, and its limits.

    `node`: 8 bytes, by which this node recognises its own packs across restarts. `bytes_max`: of these.
    `instance_credentials`: without others, use the metadata service of the cloud. `secrets`: as in `DiskStart`.
    """

    url: str
    node: bytes
    bytes_max: Count
    instance_credentials: bool
    secrets: list[bytes] = msgspec.field(default_factory=list)


class CheckObjects(Message, tag=91):
    """List the store once, to check whether it can be used."""

    deadline_s: Finite


class PutObjects(Message, tag=92):
    """Write rows of a segment to packs, in the order of their chains. `record`: of the table, opaque.

    `depths`: u32. `parents`, `checksums`: 16 bytes a key.
    """

    digest: Digest
    part: Part
    record: bytes
    nbytes: Count
    keys: bytes
    parents: bytes
    depths: bytes
    checksums: bytes
    segment: Count
    stride: Count
    rows: bytes
    deadline_s: Finite


class ObjectsPut(Message, tag=93):
    """`status`: a `BlockStatus` a key: PRESENT, FAILED, NO_SPACE. `locations`: 50 bytes a key, for those
    that are done. `dropped`: packs deleted to make room, each with its blocks: digest, part, the
    pack's id, keys.
    """

    status: bytes
    locations: bytes
    dropped: list[tuple[Digest, Part, bytes, bytes]]


class GetObjects(Message, tag=94):
    """Read blocks into reserved rows of a segment and compare them with the checksums in their locations.

    `locations`: 50 bytes a block. The answer's `checksums` are empty.
    """

    digest: Digest
    part: Part
    nbytes: Count
    keys: bytes
    locations: bytes
    segment: Count
    stride: Count
    rows: bytes
    deadline_s: Finite


class ListPacks(Message, tag=95):
    """The next existing packs. `first`: start anew. `own`: only those that this node wrote."""

    first: bool
    own: bool
    deadline_s: Finite


class PackList(Message, tag=96):
    """`packs`: digest, part, record, seconds since it was written, keys, locations; a large pack comes in
    pieces. Empty: that was all.
    """

    packs: list[tuple[Digest, Part, bytes, Finite, bytes, bytes]]


class DropPacks(Message, tag=97):
    """This namespace is no longer used: delete its packs. `own`: only those that this node wrote."""

    digest: Digest
    own: bool
    deadline_s: Finite


class ObjectStats(Message, tag=98):
    """The object worker's statistics: an `ObjectUsage`."""

    deadline_s: Finite


class ObjectUsage(msgspec.Struct):
    """Of this node's own objects, and of requests to the store."""

    packs: Count = 0
    blocks: Count = 0
    used_bytes: Count = 0
    attempts: Count = 0
    faults: dict[str, int] = {}
    suspended_s: Finite = 0.0


class ForgetBlocks(Message, tag=99):
    """The blocks at these locations are no longer wanted. The answer's `dropped`: packs of this node that are
    deleted because few of their blocks are wanted.
    """

    digest: Digest
    part: Part
    locations: bytes
    deadline_s: Finite


DiskMessage = (
    DiskStart
    | DiskReady
    | AttachSegment
    | ScanDisk
    | ReadEntries
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
    | ChangeSecrets
    | StopOrder
    | Done
    | Bytes
    | Error
)


ObjectMessage = (
    ObjectStart
    | AttachSegment
    | CheckObjects
    | PutObjects
    | ObjectsPut
    | GetObjects
    | Pulled
    | ListPacks
    | PackList
    | DropPacks
    | ObjectStats
    | ForgetBlocks
    | ChangeSecrets
    | StopOrder
    | Done
    | Bytes
    | Error
)
decode_disk = Decoder(DiskMessage)
decode_object = Decoder(ObjectMessage)
