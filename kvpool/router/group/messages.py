"""What routers of a group tell each other, in MessagePack: a frame is a list of messages.

The router that schedules is the leader, the others follow it. Requests have the follower's number, engines their name,
and times are relative: clocks differ. All senders have the operator's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvpool.decoding import Finite, MsgpackDecoder

PROTOCOL = 3
FRAME_BYTES_MAX = 256 << 20
NAME_CHARACTERS_MAX = 4096

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
COUNT_MAX = 1 << 53
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Fields are only ever added at the end, with defaults."""


LinkRow = tuple[Finite, Finite, Name, Finite | None]
"""`scheduler.links.Link`."""


class EstimateRow(msgspec.Struct, array_like=True, frozen=True):
    """`scheduler.values.Estimate`."""

    engine: Name
    cached: Count
    loaded: Count
    pulled: Count
    source: Name | None
    load_s: Finite
    starts_s: Finite
    prefill_s: Finite
    cost: Finite
    pending: bool
    link: LinkRow | None = None


class DecodeRow(msgspec.Struct, array_like=True, frozen=True):
    """`scheduler.values.DecodeEstimate`."""

    engine: Name
    tpot_s: Finite
    lacks: Count
    handover_s: Finite
    fits: bool
    cost: Finite
    link: LinkRow | None = None


class OrderRow(msgspec.Struct, array_like=True, frozen=True):
    """`scheduler.values.Order`, with the first candidates only."""

    estimate: EstimateRow
    end: Count
    last: bool
    decode: Name | None
    whole: bool
    follow: bool
    candidates: Sequence[EstimateRow] = ()
    decoders: Sequence[DecodeRow] = ()
    number: Count = 0


class SavesRow(msgspec.Struct, array_like=True, frozen=True):
    """`scheduler.values.Saves`."""

    stored: Count
    saving: Count
    saving_s: Seconds | None


class BegunRow(msgspec.Struct, array_like=True, frozen=True):
    """`scheduler.values.Begun`."""

    orders: Sequence[OrderRow]
    done: Count
    computed_by: Name | None
    decode: Name | None
    follows: bool
    failures: Count
    avoid: Sequence[Name]


class RequestRow(msgspec.Struct, array_like=True, frozen=True):
    """`scheduler.values.Request`. waited_s: since its arrival. left_s: until its deadline; None: it has none."""

    ident: Count
    model: Name
    keys: bytes
    tokens: Count
    output_tokens: Count
    waited_s: Seconds
    left_s: Seconds | None
    session: Name | None
    priority: int
    tenant: Name
    whole: bool
    segments: bool


# ---- both ways -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message. ident: of this process. since: when it began, in seconds since 1970."""

    protocol: int
    ident: Name
    since: Finite


class Operated(Message, frozen=True):
    """What an operator wants of an engine. at: when that was said, in seconds since 1970; the latest counts."""

    engine: Name
    drains: bool
    weight: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    at: Finite


class Retires(Message, frozen=True):
    """The sender shuts down: it should schedule no new requests."""


class Question(Message, frozen=True):
    """what: a path of the API whose answer only the asked router has. The answer has the same number."""

    number: Count
    what: Name
    request: RequestRow | None = None
    name: Name = ""
    tenant: Name | None = None


class Answer(Message, frozen=True):
    """body: JSON; empty: it has none."""

    number: Count
    body: bytes


# ---- to the leader ---------------------------------------------------------------------------------------


class Prefixes(Message, frozen=True):
    """A node of the pool has this much of the prefix: for each of its holders a number of blocks, by node."""

    namespace: bytes
    keys: bytes
    lengths: dict[str, tuple[Count, ...]]


class Submit(Message, frozen=True):
    """begun: how far it has come with another scheduler. Without it the answer is `Accepted` or `Refused`."""

    request: RequestRow
    begun: BegunRow | None = None


class Computed(Message, frozen=True):
    """The engine's order of this number was carried out, or is no longer needed (not measured)."""

    ident: Count
    engine: Name
    measured: bool
    cached_tokens: Count | None
    timed: bool
    saves: SavesRow | None = None
    order: Count = 0


class Failed(Message, frozen=True):
    """The engine has not served the request. decodes: after it was sent there for its answer; otherwise with the order of
    this number, and all its orders there are void. elsewhere: only another engine may be asked.
    """

    ident: Count
    engine: Name
    decodes: bool
    elsewhere: bool
    order: Count = 0


class Answered(Message, frozen=True):
    """An answer has ended; so many tokens came in this time, after the first one."""

    engine: Name
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    took_s: Seconds


class Served(Message, frozen=True):
    """The engine has served a request."""

    engine: Name


class Blamed(Message, frozen=True):
    """A request has failed by the engine's fault. request: its digest."""

    engine: Name
    request: Annotated[int, msgspec.Meta(ge=0)]


class Reaches(Message, frozen=True):
    """The engines that get requests of this router. Until it is said these are all."""

    engines: Sequence[Name]


class Abandoned(Message, frozen=True):
    """No orders for the request any more."""

    ident: Count


# ---- from the leader -------------------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    """Orders will come."""

    ident: Count


class Refused(Message, frozen=True):
    """retry_after_s: None: never."""

    ident: Count
    reason: str
    code: str
    retry_after_s: Seconds | None


class Ordered(Message, frozen=True):
    """An `Order`."""

    ident: Count
    order: OrderRow


class DecodeOrdered(Message, frozen=True):
    """A `DecodeOrder`."""

    ident: Count
    engine: Name
    computed_by: Name
    estimate: DecodeRow
    decoders: Sequence[DecodeRow]
    wait_s: Seconds = 0.0


class Gone(Message, frozen=True):
    """The engine gets no more requests. again: another order comes."""

    ident: Count
    engine: Name
    again: bool


class Over(Message, frozen=True):
    """The request is forgotten: its deadline has passed, or nothing can serve it."""

    ident: Count
    expired: bool


class KindRow(msgspec.Struct, array_like=True, frozen=True):
    """What was learned of a kind of engine. loads: seconds a byte, by tier."""

    prefill: tuple[Finite, Finite, Finite]
    decode: tuple[Finite, Finite, Finite]
    loads: dict[str, Finite]


class Learned(Message, frozen=True):
    """What the next leader is to know. roles: of engines that may change theirs."""

    kinds: dict[str, KindRow]
    roles: dict[str, int]


_Message = (
    Hello
    | Operated
    | Retires
    | Question
    | Answer
    | Prefixes
    | Submit
    | Computed
    | Failed
    | Answered
    | Served
    | Blamed
    | Reaches
    | Abandoned
    | Accepted
    | Refused
    | Ordered
    | DecodeOrdered
    | Gone
    | Over
    | Learned
)

encode = msgspec.msgpack.Encoder().encode
decode: MsgpackDecoder[list[Any]] = MsgpackDecoder(list[_Message], "messages of a router")
