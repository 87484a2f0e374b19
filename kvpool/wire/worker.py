"""Messages between the control process and its workers; those of disk and object workers are in `storage`.

type  message          direction             answer
----  ---------------  --------------------  ----------------
60    TransferStart    control → transfer    TransferReady
61    TransferReady    transfer → control
62    AttachSegment    control → worker      Done; carries a descriptor
63    PullBlocks       control → transfer    Pulled
64    Pulled           worker → control
65    OpenLoan             transfer → control    Loan
66    Loan             control → transfer
67    Return           transfer → control    none
68    AskPeer          control → transfer    the peer's answer to what it was asked
69    StopOrder        control ↔ worker      none; the order's answer then comes early
110   DeviceStart      control → device      Done
111   PromoteBlocks    control → device      Done
112   DemoteBlocks     control → device      Pulled
113   ExportSegment    control → device      Bytes: a handle for one attach
120   GatewayStart     control → gateway     Bytes: the URLs that it listens on, a JSON array
122   LoginsFailed     worker → control      none
123   RequestFailed    transfer → control    none
"""

from __future__ import annotations

import msgspec

from kvpool.decoding import Finite
from kvpool.wire.frame import Bytes, Count, Decoder, Digest, Done, Error, Message, Part, ReadOnly
from kvpool.wire.peer import (
    Ask,
    Await,
    Corrupt,
    Discard,
    Holds,
    LongQuestion,
    Offer,
    Operate,
    PartKeys,
    Question,
    SessionEnded,
)


class TransferStart(Message, tag=60):
    """First frame on a transfer worker's control channel: its identity and listening addresses (empty: none).

    `tls_cert`, ..., `secret_file`: paths, as in the configuration. `secret_is_local`: see `SecretSource`.
    `secrets_before`: what the control process uses, for a file that cannot be read now.
    """

    cluster: str
    node: str
    incarnation: str
    secret: str
    listen: list[str]
    connections_max: Count
    inflight_bytes_max: Count
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_crl: str = ""
    plaintext: bool = False
    secret_file: str = ""
    secret_is_local: bool = False
    secrets_before: str = ""


class TransferReady(Message, tag=61):
    """`listening`: the URLs that peers can pull from."""

    listening: list[str]


class AttachSegment(Message, tag=62):
    """Map this segment; its descriptor comes with the frame."""

    segment: Count
    size: Count


class PartRows(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks of one part, of `nbytes` each, and the rows of `stride` bytes that are reserved for them."""

    part: Part
    nbytes: Count
    stride: Count
    keys: bytes
    rows: bytes


class PullBlocks(Message, tag=63):
    """Fetch blocks from the peer at `url` straight into reserved rows of a segment.

    `parts`: each named once. `background`: see `Fetch`.
    """

    url: str
    tenant: str
    digest: Digest
    segment: Count
    parts: list[PartRows]
    deadline_s: Finite
    background: bool = False
    trace: str = ""

    @property
    def count(self) -> int:
        """Of blocks."""
        return sum(len(part.rows) for part in self.parts) // 4

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(len(part.rows) // 4 * part.nbytes for part in self.parts)


class Pulled(Message, tag=64):
    """`status`: a `BlockStatus` a key, part by part: ABSENT there, PRESENT here and verified, MISMATCH, LATE.

    `checksums`: 16 bytes a key, zeros unless PRESENT. When this is sent, nothing writes to the rows
    any more. `error`: why the transfer ended early, or empty. `refused`: the peer's own answer, the same on
    any path.
    """

    status: bytes
    checksums: bytes
    seconds: Finite
    error: str = ""
    refused: bool = False


class OpenLoan(ReadOnly, tag=65):
    """A peer wants these: lease them to the transfer worker for `deadline_s`."""

    tenant: str
    digest: Digest
    parts: list[PartKeys]
    deadline_s: Finite
    trace: str = ""


class Loan(Message, tag=66):
    """`rows`: one a key, part by part, `NO_ROW` where absent. `checksums`: 16 bytes for each key that is present.

    `token`: to be returned when the bytes have been taken; empty when nothing is on loan. `strides`: of the rows of
    each part.
    """

    token: str
    segment: Count
    strides: list[Count]
    rows: bytes
    checksums: bytes


class Return(Message, tag=67):
    """Give a loan back."""

    token: str


class AskPeer(Message, tag=68):
    """Ask the peer at `url`, for at most `deadline_s`. `background`: do not judge the path by a late answer."""

    url: str
    question: Question | LongQuestion
    deadline_s: Finite
    background: bool = False


class StopOrder(Message, tag=69):
    """End the order `request`: nobody waits for it. From a transfer worker: its request; there is no answer."""

    request: Count


class DeviceStart(Message, tag=110):
    """First frame on a device worker's control channel, after the segments of memory.

    Carries the descriptor that signals its end to clients (`kvpool.memory.owner_liveness`).

    `device`: `cuda:N` or `cpu`. `sizes`: bytes of device memory beside each segment, by its number.
    """

    device: str
    sizes: list[Count]


class PromoteBlocks(Message, tag=111):
    """Copy rows of a segment to rows of the same stride in the device memory beside it. Answer: `Done`."""

    segment: Count
    stride: Count
    rows: bytes
    device_rows: bytes
    deadline_s: Finite


class DemoteBlocks(Message, tag=112):
    """Copy rows of device memory back into reserved rows of the segment, and compare with checksums.

    The answer is a `Pulled` without checksums; its status is never ABSENT.
    """

    segment: Count
    stride: Count
    nbytes: Count
    rows: bytes
    device_rows: bytes
    checksums: bytes
    deadline_s: Finite


class ExportSegment(Message, tag=113):
    """A handle of the device memory beside a segment, for one client to map."""

    segment: Count


class LoginsFailed(Message, tag=122):
    """Peers, or users of the gateway, that could not prove who they are: source, reason, and how many of each."""

    failures: list[tuple[str, str, Count]]


class RequestFailed(Message, tag=123):
    """A peer's request of this name met an unexpected error, which ended its connection."""

    request: str


class GatewayStart(Message, tag=120):
    """First frame on the gateway's control channel: all its settings, including secrets.

    `addresses`, `tokens_file`, `rate`, `routers`, `otlp`, `node`: see `kvpool.config.DaemonConfig`. `socket`,
    `tenant`, `token`, `operator_token`: for its connection to the daemon. `digest`: SHA-256 of the token that the
    daemon created, hex, or empty.
    """

    addresses: list[str]
    socket: str
    socket_mode: Count
    tenant: str
    token: str | None
    operator_token: str
    tokens_file: str
    digest: str
    rate: Finite
    tls_cert: str
    tls_key: str
    routers: list[str]
    router_token: str
    otlp: str = ""
    node: str = ""
    router_ca: str = ""


TransferMessage = (
    TransferStart
    | TransferReady
    | AttachSegment
    | PullBlocks
    | Pulled
    | OpenLoan
    | Loan
    | Return
    | Ask
    | Holds
    | Offer
    | Discard
    | SessionEnded
    | Await
    | Operate
    | AskPeer
    | StopOrder
    | Corrupt
    | LoginsFailed
    | RequestFailed
    | Done
    | Bytes
    | Error
)


DeviceMessage = (
    DeviceStart
    | AttachSegment
    | PromoteBlocks
    | DemoteBlocks
    | ExportSegment
    | Pulled
    | StopOrder
    | Done
    | Bytes
    | Error
)
GatewayMessage = GatewayStart | LoginsFailed | Bytes | Error
decode_transfer = Decoder(TransferMessage)
decode_device = Decoder(DeviceMessage)
decode_gateway = Decoder(GatewayMessage)
