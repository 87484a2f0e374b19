"""What a stream of KV events has told of this node's blocks, and the events that tell of changes. No I/O, no clock.

An event is of vLLM's form: a block is named by the end of its hash, 64 bits as a number, which is the end of its key too.
Tokens are not in it, as the pool does not know any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.types import PartKind

NAME_BYTES = 8
EVENT_BLOCKS_MAX = 512
CLEARED = {"type": "AllBlocksCleared"}
MEDIA = {"dram": ("CPU", None), "ssd": ("STORAGE", "LOCAL")}
"""Of a tier: vLLM's name of the medium, and where it is."""

Event = dict[str, Any]
ParentOf = Callable[[bytes], bytes | None]


def name_of(key: bytes) -> int:
    """As vLLM names a block in its events, unless it is told to name them by whole hashes."""
    return int.from_bytes(key[-NAME_BYTES:], "big")


def needed(namespace: NamespaceState) -> int:
    """The mask of the parts that an engine needs of every block of a prompt."""
    parts = namespace.parts
    whole = [at for at, part in enumerate(parts) if part.kind is PartKind.FULL and part.stride == 1]
    return sum(1 << at for at in whole or range(len(parts)))


class PublishedBlocks:
    """The blocks that readers of a stream believe to be here, by tier and namespace. Not thread-safe.

    Takes about 120 bytes for each.
    """

    def __init__(self) -> None:
        # In the order in which they came: mostly that of their chains.
        self._told: dict[str, dict[bytes, dict[bytes, None]]] = {tier: {} for tier in MEDIA}

    def __len__(self) -> int:
        return sum(len(keys) for tier in self._told.values() for keys in tier.values())

    def has(self, digest: bytes) -> bool:
        """Whether readers know of any block of this namespace."""
        return any(digest in spaces for spaces in self._told.values())

    def changed(
        self, tier: str, digest: bytes, here: Iterable[tuple[bytes, bool]]
    ) -> tuple[list[bytes], list[bytes]]:
        """Blocks of a namespace that readers do not know of yet, and those that they must forget.

        here: keys, and whether all that is needed of each is in the tier now. A block that several of the namespaces
        have stays known until none has it.
        """
        spaces = self._told[tier]
        own = spaces.setdefault(digest, {})
        others = [keys for other, keys in spaces.items() if other != digest]
        new: list[bytes] = []
        gone: list[bytes] = []
        for key, is_here in here:
            if is_here is (key in own):
                continue
            if is_here:
                own[key] = None
            else:
                del own[key]
            if not any(key in keys for keys in others):
                (new if is_here else gone).append(key)
        if not own:
            del spaces[digest]
        return new, gone

    def known(self, tier: str) -> list[tuple[bytes, list[bytes]]]:
        """All blocks of a tier that readers know of, once each, by namespace."""
        found: list[tuple[bytes, list[bytes]]] = []
        for digest, keys in self._told[tier].items():
            before = [self._told[tier][other] for other, _ in found]
            mine = [key for key in keys if not any(key in others for others in before)]
            found.append((digest, mine if before else list(keys)))
        return found


def stored(
    tier: str, keys: Sequence[bytes], block_tokens: int, parent_of: ParentOf = lambda _: None
) -> Iterator[Event]:
    """Events for blocks that are here now: those that follow one another together, others one by one."""
    run: list[bytes] = []
    parent: bytes | None = None
    for key in keys:
        before = parent_of(key)
        if run and (before != run[-1] or len(run) >= EVENT_BLOCKS_MAX):
            yield _stored(tier, run, parent, block_tokens)
            run = []
        if not run:
            parent = before
        run.append(key)
    if run:
        yield _stored(tier, run, parent, block_tokens)


def _stored(tier: str, run: Sequence[bytes], parent: bytes | None, block_tokens: int) -> Event:
    medium, locality = MEDIA[tier]
    event: Event = {
        "type": "BlockStored",
        "block_hashes": [name_of(key) for key in run],
        "parent_block_hash": name_of(parent) if parent else None,
        "token_ids": [],
        "block_size": block_tokens,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    return event if locality is None else {**event, "locality": locality}


def removed(tier: str, keys: Sequence[bytes]) -> Iterator[Event]:
    """Events for blocks that are not here any more."""
    medium, locality = MEDIA[tier]
    for at in range(0, len(keys), EVENT_BLOCKS_MAX):
        event: Event = {
            "type": "BlockRemoved",
            "block_hashes": [name_of(key) for key in keys[at : at + EVENT_BLOCKS_MAX]],
            "medium": medium,
        }
        yield event if locality is None else {**event, "locality": locality}
