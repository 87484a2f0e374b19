"""Calls about any number of objects, under text keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.blocks import How
from kvpool.engine_plugins.mooncake.labels import OBJECT_BYTES_MAX
from kvpool.engine_plugins.mooncake.objects import Objects
from kvpool.engine_plugins.mooncake.pieces import Made, Pieces
from kvpool.engine_plugins.mooncake.values import Keys, ReplicateConfig, all_of
from kvpool.errors import KvpoolError

logger = logging.getLogger(__name__)

KEYS_TOGETHER = 8192
"""Larger batches are cut: a request has a limit of keys."""


class Batches:
    """Translates keys, and cuts large batches. Thread-safe.

    objects: None before `setup` and after `close`: all calls get codes then.
    """

    def __init__(self) -> None:
        self.objects: Objects | None = None

    def exist(self, keys: Keys) -> list[int]:
        """For each key 1, 0, or -1 when the daemon does not answer."""
        objects = self.objects
        if objects is None:
            return all_of(codes.INTERNAL_ERROR, keys)

        def exist(some: Sequence[bytes]) -> list[int]:
            found = objects.reader.exist(some)
            return all_of(codes.INTERNAL_ERROR, some) if found is None else list(map(int, found))

        return _in_turns(exist, _encoded(keys))

    def sizes(self, keys: Keys) -> list[tuple[int, int]] | None:
        """For each key the object's length, or -1, and its `Presence`; None: the daemon does not answer."""
        objects = self.objects
        if objects is None:
            return None
        found = _in_turns(lambda some: objects.reader.sizes(some) or [None], _encoded(keys))
        return None if None in found else found

    def put(
        self,
        keys: Keys,
        pieces: Sequence[Pieces | None],
        config: ReplicateConfig,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Store objects of this memory, under keys that are not empty: a code each. All are refused where one of these
        has no bytes or too many, or a key that is no text.
        """
        objects = self.objects
        if objects is None:
            return all_of(codes.INVALID, keys)
        how = How(config.replica_num if config.replica_num > 1 else 0, config.pin)
        work = objects.writer.replace if replace else objects.writer.put

        def put(some: Sequence[str], of: Sequence[Pieces]) -> list[int]:
            encoded = _encoded(some)
            if not all(encoded) or not all(0 < each.nbytes <= OBJECT_BYTES_MAX for each in of):
                return all_of(codes.INVALID, some)
            return _in_turns(partial(work, how=how), encoded, of)

        return _of_valid(put, keys, pieces)

    def read(self, keys: Keys, pieces: Sequence[Pieces | None]) -> list[int]:
        """Read objects into this memory: for each its bytes, or a code; `INVALID` where the memory is smaller."""
        objects = self.objects
        if objects is None:
            return all_of(codes.INVALID, keys)

        def read(some: Sequence[str], of: Sequence[Pieces]) -> list[int]:
            return _in_turns(objects.reader.read, _encoded(some), of)

        return _of_valid(read, keys, pieces)

    def read_new(self, keys: Keys, make: Callable[[Any], Any]) -> list[Any]:
        """What `make` makes of the bytes of each object; None of those that could not be read."""
        made = [Made(make) for _ in keys]
        got = self.read(keys, made)
        return [one.value if code >= 0 else None for one, code in zip(made, got, strict=True)]

    def remove(self, keys: Keys) -> list[int]:
        """`OK`, `NOT_FOUND`, or another code, of each."""
        objects = self.objects
        if objects is None:
            return all_of(codes.INVALID, keys)
        return _in_turns(objects.writer.remove, _encoded(keys))

    def clear(self) -> int:
        """How many objects this node had, which are gone from all nodes; or a code."""
        if self.objects is None:
            return codes.INVALID
        try:
            return self.objects.clear()
        except KvpoolError as error:
            logger.warning("the objects could not be removed: %s", error)
            return codes.code_of(error)


def encoded(key: str) -> bytes:
    """What is no text has no key: it is treated as the empty one, which no object has."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        return b""


def _encoded(keys: Keys) -> list[bytes]:
    if isinstance(keys, (str, bytes)):
        raise TypeError("keys must be a list of str")
    return [encoded(key) for key in keys]


def _in_turns(work: Callable[..., Sequence[Any]], *columns: Sequence[Any]) -> list[Any]:
    """What `work` gives for the rows of the columns, as many at a time as one request takes."""
    found: list[Any] = []
    for at in range(0, len(columns[0]), KEYS_TOGETHER):
        found += work(*[column[at : at + KEYS_TOGETHER] for column in columns])
    return found


def _of_valid(
    work: Callable[..., list[int]], keys: Keys, pieces: Sequence[Pieces | None]
) -> list[int]:
    """What `work` gives for the rows that have a key and memory; -600 for the others, or where there are not as many."""
    if len(keys) != len(pieces):
        return all_of(codes.INVALID, keys)
    if all(pieces) and all(keys):
        return work(keys, pieces)
    found = all_of(codes.INVALID, keys)
    some = [at for at, key in enumerate(keys) if key and pieces[at] is not None]
    if some:
        done = work([keys[at] for at in some], [pieces[at] for at in some])
        for at, code in zip(some, done, strict=True):
            found[at] = code
    return found
