"""What a tenant's account and a request's receipt say: what was read from the cache, written to it, refused, and kept.

The account of a tenant on a node is cut into periods, one row a namespace; a receipt is of one request on one node. As
JSON they are what the export gives. Parts of the daemon count in them; not thread-safe.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.telemetry.metrics import counter, each

PERIOD_S = 60.0
BLOCK_TOKENS_MAX = (1 << 31) - 1
MODEL_MAX = 128  # characters

READ_TOKENS = counter(
    "account_read_tokens",
    help="Tokens whose blocks clients read, by the tier that these came from; leases that nobody read are not in it.",
    read=attrgetter("tokens"),
)
READ_BYTES = counter(
    "account_read_bytes",
    help="Bytes of the blocks that clients read, by the tier that these came from.",
    read=attrgetter("nbytes"),
)


class Amount(msgspec.Struct):
    """blocks: whole ones, whatever their parts. tokens: that they stand for; 0 for objects. nbytes: of all parts."""

    blocks: int = 0
    tokens: int = 0
    nbytes: int = 0

    def add(self, other: Amount) -> None:
        self.blocks += other.blocks
        self.tokens += other.tokens
        self.nbytes += other.nbytes


class Refused(msgspec.Struct):
    """requests: that stored nothing of what they were to store. nbytes: of blocks that were not taken."""

    requests: int = 0
    parts: Annotated[int, counter("account_refused_parts")] = 0
    """Parts of blocks that clients were to put and that were not taken, by reason."""
    nbytes: int = 0

    def add(self, other: Refused) -> None:
        self.requests += other.requests
        self.parts += other.parts
        self.nbytes += other.nbytes


class Booked(msgspec.Struct):
    """What was counted. reads: by the tier that they came from: dram, device, ssd, object, or peer, another node's memory
    or disks.
    """

    reads: Annotated[dict[str, Amount], each("tier", metrics=(READ_TOKENS, READ_BYTES))] = {}
    written: Annotated[Amount, counter("account_written_tokens", read=attrgetter("tokens"))] = (
        msgspec.field(default_factory=Amount)
    )
    """Tokens of the new blocks that clients committed."""
    refused: Annotated[dict[str, Refused], each("reason")] = {}
    kept_byte_s: Annotated[dict[str, float], counter("account_kept_byte_seconds", "tier")] = {}
    """Bytes that blocks have taken, times the seconds for which they did, by tier."""

    def read(self, tier: str, amount: Amount) -> None:
        self.reads.setdefault(tier, Amount()).add(amount)

    def refuse(self, reason: str, refused: Refused) -> None:
        self.refused.setdefault(reason, Refused()).add(refused)

    def keep(self, tier: str, byte_s: float) -> None:
        self.kept_byte_s[tier] = self.kept_byte_s.get(tier, 0.0) + byte_s

    def add(self, other: Booked) -> None:
        for tier, amount in other.reads.items():
            self.read(tier, amount)
        self.written.add(other.written)
        for reason, refused in other.refused.items():
            self.refuse(reason, refused)
        for tier, byte_s in other.kept_byte_s.items():
            self.keep(tier, byte_s)


class Row(msgspec.Struct):
    """A tenant's namespace in a period. namespace: its digest, in hex; empty: of all those beyond the limit."""

    tenant: str
    namespace: str
    model: str = ""
    booked: Booked = msgspec.field(default_factory=Booked)


class Period(msgspec.Struct):
    """A line of the receipts' file. begin_s, end_s: since 1970; seconds: between them, by a clock that is never set.

    number: counts the periods of an incarnation from 1; one that is missing was lost. sequence: ascends over restarts,
    whatever clocks say. rows: of those that counted.
    """

    node: str
    incarnation: str
    number: int
    begin_s: float
    end_s: float
    seconds: float
    rows: list[Row] = []
    sequence: int = 0


class Receipt(msgspec.Struct):
    """Of a request. request: as its engine names it. ended_s: when the engine said so; null: not yet, or never."""

    request: str
    tenant: str
    namespace: str
    model: str
    begun_s: float
    used_s: float
    ended_s: float | None = None
    session: str = ""
    booked: Booked = msgspec.field(default_factory=Booked)


class AccountItem(Booked, kw_only=True):
    """A namespace of a tenant on a node, in a period or in all of them together."""

    node: str
    incarnation: str
    number: int
    """Counts the periods of an incarnation; one that is missing was lost. 0: all together."""
    begin_s: float
    end_s: float
    seconds: float
    """That the periods took."""
    open: bool
    """Whether the period has not ended, so that its numbers still grow."""
    tenant: str
    namespace: str
    """Empty: of all those beyond the limit."""
    model: str


class ReceiptItem(Booked, kw_only=True):
    """What a node served to a request."""

    node: str
    request: str
    """As its engine names it."""
    tenant: str
    namespace: str
    model: str
    session: str
    begun_s: float
    used_s: float
    ended_s: float | None
    """Null: its engine has not said so."""


class PeriodRows(msgspec.Struct, frozen=True):
    """more: whether there are any after the last of these: the next one is `next_row` (from 0) of the period with the
    sequence number `next_sequence`. incomplete: some of the file could not be read.
    """

    rows: list[AccountItem]
    more: bool
    next_sequence: int = 0
    next_row: int = 0
    incomplete: bool = False


class Receipts(msgspec.Struct, frozen=True):
    """more: whether older ones were left out."""

    receipts: list[ReceiptItem]
    more: bool


decode_period = JsonDecoder[Period](Period, "a line of the receipts' file")


def facts_of(fields: dict[str, Any]) -> tuple[str, int]:
    """A namespace's model, as far as it is shown, and tokens a block, by what its users have said of it; 0: its blocks stand
    for none.
    """
    tokens = fields.get("hash_tokens", fields.get("block_tokens", 0))
    # A client may say anything, also what no message can carry.
    told = type(tokens) is int and 0 <= tokens <= BLOCK_TOKENS_MAX
    model = "".join(filter(str.isprintable, str(fields.get("model", ""))))[:MODEL_MAX]
    return model, tokens if told else 0
