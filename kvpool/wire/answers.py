"""What nodes answer to operators' commands: the bodies of the REST interface, and the rows of the command line's tables.

Keys and digests are hex. `column` names the column of a field in a table.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


def column(head: str) -> msgspec.Meta:
    """Declare the column of a field: its heading in tables of the command line."""
    return msgspec.Meta(extra={"column": head})


def columns_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The names of a struct's fields by the headings of their columns, in the order of the fields."""
    return {
        meta.extra["column"]: each.name
        for each in msgspec.structs.fields(kind)
        for meta in getattr(each.type, "__metadata__", ())
        if "column" in (meta.extra or {})
    }


class Block(msgspec.Struct, kw_only=True):
    """One block in one tier of a node."""

    node: str
    tier: str
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$"), column("key")]
    namespace: str
    parent: str
    """The key of the block before it; empty if it is the first, or the parent is not known."""
    depth: Annotated[int, column("depth")]
    parts: Annotated[int, column("parts")]
    bytes: Annotated[int, column("bytes")]
    pin: str
    copy: bool
    """Whether the replica is held for other nodes."""
    reused: bool
    age_s: Annotated[float, column("unused")]
    """Since its last use."""
    leases: int = 0


class Blocks(msgspec.Struct):
    """Some blocks of a tier. There may be few, or none, and a cursor all the same."""

    blocks: list[Block]
    cursor: str | None
    """Where the next ones begin, or null at the end."""


class Replica(msgspec.Struct):
    """A replica of a block: by the directory, which is a hint, or on the node that answers, by its own state."""

    node: str
    incarnation: str
    tier: str
    parts: int


class Located(msgspec.Struct):
    """The replicas of a block of one namespace."""

    key: str
    namespace: str
    parts: int
    replicas: list[Replica]


class Session(msgspec.Struct, kw_only=True):
    """A session as a node knows it."""

    session: Annotated[str, column("session")]
    turns: Annotated[int, column("turns")]
    agents: Annotated[int, column("agents")]
    blocks: Annotated[int, column("blocks")]
    nbytes: Annotated[int, column("bytes")]
    idle_s: Annotated[float, column("since its last turn")]


class Sessions(msgspec.Struct):
    """Some sessions of a tenant, and whether there are more."""

    sessions: list[Session]
    more: bool


class SessionChain(msgspec.Struct):
    """The prompt of an agent's last turn: how many of its blocks are in memory, only on disks, and not on the node."""

    namespace: Annotated[str, column("namespace")]
    agent: Annotated[str, column("agent")]
    """Empty for the main one."""
    blocks: Annotated[int, column("blocks")]
    in_memory: Annotated[int, column("in memory")]
    on_disk: Annotated[int, column("only on disks")]
    missing: Annotated[int, column("not here")]


class SessionDetail(Session, kw_only=True):
    """A session with the prompts of its agents."""

    chains: list[SessionChain]


class MissedBlock(msgspec.Struct, kw_only=True):
    """Why a block was not there. What is not known is empty or null."""

    block: int
    """Its index in the prompt."""
    key: str
    reason: str
    """One of the reasons of `kvpool_missed_reads_total`."""
    words: str
    """The reason for people."""
    tier: str = ""
    """The tier that it left."""
    age_s: float | None = None
    """Since it left the tier."""
    idle_s: float | None = None
    """For how long it had been unused then."""
    by: str = ""
    """The namespace whose put took its room."""
    where: str = ""
    """The other namespace, or the node or disk that is lost."""
    differs: dict[str, list[Any]] | None = None
    """Facts of the other namespace, each with its value there and here."""
    asked: int | None = None
    """Blocks of a read."""
    found: int | None = None
    ago_s: float | None = None
    """Since the read."""


class Missing(msgspec.Struct, kw_only=True):
    """How much of a prompt a node could provide, and why not more."""

    asked: int
    memory_blocks: int
    blocks: int
    """From its disks too."""
    missing: MissedBlock | None
    """The first block that it could not provide."""
    last: MissedBlock | None
    """The last read that ended at one of these blocks."""
    reach_s: float | None
    """For how long departures are remembered; null: since the node started."""


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


class Event(msgspec.Struct, frozen=True):
    """Something that a node has noted."""

    number: int
    """Counts up from 1 after each start of the node."""
    at_s: float
    """Seconds since 1970, by the node's clock."""
    node: str
    kind: str
    details: dict[str, Any]


class Events(msgspec.Struct, frozen=True):
    """Some events, the oldest first; the numbers of the oldest and the last one that the node remembers."""

    events: list[Event]
    first: int
    last: int
