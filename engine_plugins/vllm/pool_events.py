"""What an engine's KV events say of the pool: blocks that came within its reach, or left it, in this node's memory or disks.

An event names blocks as the engine's own do, with their tokens: routers index both alike. Only blocks that this engine has
met itself are reported, since the pool knows no tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvpool.client import Presence
from kvpool.engine_plugins.vllm.pool_watch import Change, PoolWatch

MEMORY, DISKS = "CPU", "STORAGE"  # vLLM's names
MEDIA: dict[Presence, tuple[str, ...]] = {
    Presence.NOWHERE: (),
    Presence.DISK: (DISKS,),
    Presence.MEMORY: (MEMORY, DISKS),
}
"""What is told of a block in each place. Routers add up tiers from above, and expect below what is above: what is in memory
behind blocks that are on disks only would not count.
"""
LOCALITIES = {DISKS: "LOCAL"}
EVENT_BLOCKS_MAX = 256


@dataclass(frozen=True, slots=True)
class Described:
    """A block as its engine has it. name, parent: whole hashes, parent None at the beginning. tokens: of `array('I')`.

    extra: what else went into the hash, as the engine tells it; None: nothing.
    """

    name: bytes
    parent: bytes | None
    tokens: bytes
    lora_id: int | None = None
    lora_name: str | None = None
    extra: tuple[Any, ...] | None = None


@dataclass(slots=True)
class StoredRun:
    """Blocks that follow one another and have come to one medium."""

    medium: str
    blocks: list[Described] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        found = array("I")
        for block in self.blocks:
            found.frombytes(block.tokens)
        return found.tolist()

    def takes(self, block: Described) -> bool:
        last = self.blocks[-1]
        return (
            block.parent == last.name
            and block.lora_name == last.lora_name
            and len(self.blocks) < EVENT_BLOCKS_MAX
        )


@dataclass(slots=True)
class Removed:
    """Blocks that have left a medium."""

    medium: str
    names: list[bytes] = field(default_factory=list)


def runs(changes: Iterable[Change[Described]]) -> list[StoredRun | Removed]:
    """The events to report for changes: what has left first."""
    removed: dict[str, Removed] = {}
    stored: dict[str, list[StoredRun]] = {MEMORY: [], DISKS: []}
    for change in changes:
        before, now = MEDIA[change.before], MEDIA[change.now]
        for medium in before:
            if medium not in now:
                left = removed.setdefault(medium, Removed(medium))
                left.names.append(change.label.name)
        for medium in now:
            if medium not in before:
                found = stored[medium]
                if not found or not found[-1].takes(change.label):
                    found.append(StoredRun(medium))
                found[-1].blocks.append(change.label)
    return [*removed.values(), *stored[MEMORY], *stored[DISKS]]


class PoolEvents:
    """Watches the blocks of an engine's requests. For its scheduling thread.

    extra_of: what else went into the hash of a block of a request, given its first token and the one behind its last.
    """

    def __init__(
        self,
        watch: PoolWatch[Described],
        hash_tokens: int,
        extra_of: Callable[[Any, int, int], tuple[Any, ...] | None],
    ) -> None:
        self.watch = watch
        self._tokens = hash_tokens
        self._extra_of = extra_of
        self._parts: Sequence[int] = ()
        self._cleared: object = None

    def use_parts(self, parts: Sequence[int]) -> None:
        """Which parts of a block an engine needs of all of a prompt's."""
        self._parts = tuple(parts)

    def know(self, request: Any, keys: Sequence[bytes], begin: int) -> None:
        """Blocks of a request's chain from an index on, whose tokens are known. keys: the pool's, of each."""
        if not self._parts:
            return
        names = request.block_hashes
        for index, key in enumerate(keys, begin):
            describe = partial(self._describe, request, names, index)
            self.watch.know(key, key, self._parts, describe)

    def _describe(self, request: Any, names: Sequence[bytes], index: int) -> Described:
        begin, end = index * self._tokens, (index + 1) * self._tokens
        lora = request.lora_request
        return Described(
            bytes(names[index]),
            bytes(names[index - 1]) if index else None,
            array("I", request.all_token_ids[begin:end]).tobytes(),
            None if lora is None else lora.adapter_id,
            None if lora is None else lora.name,
            self._extra_of(request, begin, end),
        )

    def take(self, own_blocks: object) -> list[StoredRun | Removed]:
        """What is to be reported now. own_blocks: the engine's own cache, another object once it was cleared.

        Routers take such a clear for one of all that the engine can reach.
        """
        if own_blocks is not self._cleared:
            first, self._cleared = self._cleared is None, own_blocks
            if not first:
                self.watch.forget_told()
        return runs(self.watch.take())
