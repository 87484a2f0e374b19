"""Splits a batch of keys into few commands to the right Redis servers, all of them at the same time.

Keys belong to groups (`key_groups.tag_of`); a server has whole groups. A piece of a batch can be handled by one
command: keys of one group on a Redis Cluster, any keys elsewhere. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import hiredis

from kvpool.errors import Unavailable
from kvpool.placement.key_groups import TAGS
from kvpool.placement.redis.connection import Command, Lost, Refused, pack
from kvpool.placement.redis.shards import READING, Server, Shards

LOCATE_KEYS = 1024  # requested of a server at a time
PUBLISH_KEYS = 512  # in a script: it blocks all other lookups for about a millisecond

_VALUE = {bytes, type(None)}


class Batches:
    """See the module."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._loop = asyncio.get_running_loop()

    def cut(self, keys: Sequence[bytes], most: int) -> list[Piece]:
        """Pieces of a batch, one command each."""
        if self._shards.in_one:
            return [Piece(0, part) for part in parts_of(range(len(keys)), most)]
        by_tag: dict[int, list[int]] = {}
        for at, key in enumerate(keys):
            by_tag.setdefault(key[-1] % TAGS, []).append(at)
        return [
            Piece(tag, part) for tag, all_of in by_tag.items() for part in parts_of(all_of, most)
        ]

    async def all(
        self,
        pieces: list[Piece],
        command: Callable[[Piece], Command],
        lane: int,
        timeout_s: float,
    ) -> None:
        """As `run`; raises `Unavailable` when a piece failed."""
        await self.run(pieces, command, lane, timeout_s)
        failed = [piece for piece in pieces if piece.error is not None]
        if failed:
            raise error_of(failed)

    async def run(
        self,
        pieces: list[Piece],
        command: Callable[[Piece], Command],
        lane: int,
        timeout_s: float,
    ) -> None:
        """Have each piece answered by the server of its group, or set its error.

        All servers at the same time. A piece that was sent to the wrong server, or whose connection ended, is
        tried once more; a late answer never is.
        """
        deadline = self._loop.time() + timeout_s
        await self._try(pieces, command, lane, deadline)
        failed = [piece for piece in pieces if piece.error is not None]
        if not failed:
            self._shards.trust()
            return
        again = [piece for piece in failed if piece.again]
        if again:
            self._shards.counters.retries += 1
            await self._shards.renew(deadline)
            await self._try(again, command, lane, deadline)
        else:
            self._shards.doubt()

    async def _try(
        self,
        pieces: list[Piece],
        command: Callable[[Piece], Command],
        lane: int,
        deadline: float,
    ) -> None:
        owners = await self._shards.by_group(deadline)
        by_server: dict[Server, list[Piece]] = {}
        for piece in pieces:
            by_server.setdefault(owners[piece.tag], []).append(piece)
        work = [_serve(server, mine, command, lane, deadline) for server, mine in by_server.items()]
        if len(work) == 1:
            await work[0]  # no task for the most common case
        else:
            await asyncio.gather(*work)


class Piece:
    """A piece of a batch: keys of one group, unless one server has all groups.

    positions: in the batch. reply, and run_id of the server that gave it; or error.
    """

    __slots__ = ("error", "positions", "reply", "run_id", "tag")

    def __init__(self, tag: int, positions: Sequence[int]) -> None:
        self.tag = tag
        self.positions = positions
        self.reply: Any = None
        self.run_id = b""
        self.error: Unavailable | None = None

    def pick(self, batch: Sequence[Any]) -> list[Any]:
        return [batch[at] for at in self.positions]

    def pairs(self) -> Iterator[tuple[int, bytes | None]]:
        return zip(self.positions, self.reply, strict=True)

    @property
    def again(self) -> bool:
        """Whether a retry may help."""
        error = self.error
        return isinstance(error, Lost) or (isinstance(error, Refused) and error.moved)


def good(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Those without an error."""
    return (piece for piece in pieces if piece.error is None)


async def _serve(
    server: Server,
    pieces: list[Piece],
    command: Callable[[Piece], Command],
    lane: int,
    deadline: float,
) -> None:
    """Send these pieces to one server, a step at a time: each is one message and one wait.

    One step is under way at a time, so that other lookups do not queue behind a whole batch.
    """
    most = LOCATE_KEYS if lane == READING else PUBLISH_KEYS
    todo = iter(_steps(pieces, most))
    for step in todo:
        try:
            packed = pack([command(piece) for piece in step])
            replies = await server.ask(lane, packed, len(step), deadline)
        except Unavailable as error:
            for piece in (*step, *[piece for later in todo for piece in later]):
                piece.error = error
            return
        for piece, reply in zip(step, replies, strict=True):
            piece.error = None
            piece.reply = reply
            piece.run_id = server.run_id
            if isinstance(reply, hiredis.ReplyError):
                piece.error = Refused(server.where, str(reply))
            elif lane == READING and not _is_values(reply, len(piece.positions)):
                piece.error = Refused(server.where, "GARBAGE instead of values")


def _is_values(reply: Any, count: int) -> bool:
    """Whether it is a valid answer to MGET, the only reading command used."""
    return isinstance(reply, list) and len(reply) == count and set(map(type, reply)) <= _VALUE


def _steps(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces in steps of at most this many keys."""
    step: list[Piece] = []
    keys = 0
    for piece in pieces:
        if step and keys + len(piece.positions) > most:
            yield step
            step, keys = [], 0
        step.append(piece)
        keys += len(piece.positions)
    if step:
        yield step


def error_of(failed: Sequence[Piece]) -> Unavailable:
    """The error of a batch: that of its first failed piece."""
    error = failed[0].error
    assert error is not None
    return error


def parts_of(batch: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """A batch in pieces of `most` at most."""
    for at in range(0, len(batch), most):
        yield batch[at : at + most]
