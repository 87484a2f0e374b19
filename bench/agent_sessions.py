"""Sessions of agents, as a stream of requests to one pool: read, split, and laid out in time.

The file has a session a line: `id, block_tokens, system_tokens, tool_tokens, requests: [[t_s, model, input_tokens,
output_tokens, think_s, [[first_hash, blocks], ...], agent], ...]`; hash ids are runs of consecutive numbers, local to
the session, times are from its start, `agent` is empty or a sub-agent's id.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

SESSIONS = Path(__file__).resolve().parents[1] / "../shared/traces/agent_sessions.jsonl"


def default_path() -> Path:
    """KVPOOL_AGENTS, or else where the project keeps it."""
    return Path(os.environ.get("KVPOOL_AGENTS", SESSIONS))


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. blocks: ids of its prompt's blocks, from its head on; equal ids, equal prefixes."""

    at_s: float
    agent: str
    model: str
    blocks: Sequence[int]
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """In the order of its turns. unique: blocks of all of them, each counted once."""

    name: str
    turns: list[Turn]
    unique: int

    @property
    def duration_s(self) -> float:
        return self.turns[-1].at_s


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn at its time in the stream. pause_s: until the next turn of the same session; None: it was the last one."""

    at_s: float
    session: int
    turn: Turn
    pause_s: float | None


def read_sessions(path: Path, merged: int = 1) -> list[Session]:
    """As the file has them, in blocks that are `merged` of the file's. A prompt's last, partial block is left out.

    Block ids are chained hashes: the last id of several blocks in a row names them all, and what is before them.
    No two sessions share an id.
    """
    sessions = []
    first = 0
    with path.open() as lines:
        for line in lines:
            told = json.loads(line)
            turns = []
            known: dict[tuple[tuple[int, int], ...], list[int]] = {}
            unique: set[int] = set()
            for at_s, model, input_tokens, output_tokens, _, runs, agent in told["requests"]:
                key = tuple((start, count) for start, count in runs)
                if key not in known:
                    ids = [first + start + at for start, count in key for at in range(count)]
                    known[key] = ids[merged - 1 :: merged]
                    unique.update(known[key])
                turns.append(Turn(at_s, agent, model, known[key], input_tokens, output_tokens))
            turns.sort(key=lambda turn: turn.at_s)
            sessions.append(Session(str(told["id"]), turns, len(unique)))
            first += 1 + max(
                start + count for _, *_, runs, _ in told["requests"] for start, count in runs
            )
    return sessions


def half(sessions: Sequence[Session], *, judged: bool) -> list[Session]:
    """One half to choose on, the other one to judge by; which one a session is in depends on its name alone."""
    return [session for session in sessions if (zlib.crc32(session.name.encode()) & 1) == judged]


def arrivals(sessions: Sequence[Session], active: int, seed: int) -> list[Arrival]:
    """All turns in the order of time. Sessions begin as a Poisson process, so often that `active` overlap on average.

    Little's law: that many are active if their rate is `active` divided by their mean duration.
    """
    random_ = random.Random(seed)
    order = list(range(len(sessions)))
    random_.shuffle(order)
    rate = active * len(sessions) / sum(session.duration_s for session in sessions)
    starts = accumulate(random_.expovariate(rate) for _ in order)
    stream = []
    for number, start in zip(order, starts, strict=True):
        turns = sessions[number].turns
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            pause_s = None if following is None else following.at_s - turn.at_s
            stream.append(Arrival(start + turn.at_s, number, turn, pause_s))
    stream.sort(key=lambda arrival: (arrival.at_s, arrival.session))
    return stream
