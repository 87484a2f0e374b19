"""The embedded directory's own: its bound, what it loses when told to, and where its marks come from.

What it shares with others is in `tests/contract/test_directory_embedded.py`.
"""

import asyncio
import random

import pytest

from kvpool.errors import InvalidRequest
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.key_groups import TAGS, tag_of
from tests.contract.suites.directory import NAMESPACE, key_of, keys_of, node
from tests.support.embedded_directory import EmbeddedDirectory

DRAM = TIERS["dram"]


def publish(directory: EmbeddedDirectory, keys: list[bytes], mask: int = 1) -> None:
    for at in range(0, len(keys), 4096):
        part = keys[at : at + 4096]
        asyncio.run(directory.publish(NAMESPACE, 1, node(1), DRAM, part, [mask] * len(part)))


def present(directory: EmbeddedDirectory, keys: list[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for at in range(0, len(keys), 4096):
        part = keys[at : at + 4096]
        answers = asyncio.run(directory.locate(NAMESPACE, 1, part))
        found += [key for key, entries in zip(part, answers, strict=True) if entries]
    return found


def test_it_holds_no_more_than_its_bound_and_drops_what_is_old() -> None:
    directory = EmbeddedDirectory(blocks_max=8192)
    keys = keys_of(range(40_000))
    publish(directory, keys)
    left = present(directory, keys)
    assert directory.blocks == len(left) <= 8192
    assert len(left) > 7000, "the room is used"
    # Two a bucket, which has seen ten: hardly one of them is from the first half.
    assert len(set(left) & set(keys[20_000:])) > 0.9 * len(left)


def test_changing_a_block_in_a_full_directory_drops_nothing() -> None:
    directory = EmbeddedDirectory(blocks_max=1)
    keys = keys_of(range(3000))
    publish(directory, keys)
    before = present(directory, keys)
    for mask in (1, 1):
        publish(directory, before, mask)
    assert present(directory, keys) == before


def test_withdrawing_frees_room() -> None:
    directory = EmbeddedDirectory()
    keys = keys_of(range(500))
    publish(directory, keys)
    publish(directory, keys, 0)
    assert directory.blocks == 0


def test_some_groups_can_be_lost_alone() -> None:
    directory = EmbeddedDirectory()
    keys = keys_of(range(2000))
    publish(directory, keys)
    before = asyncio.run(directory.marks())
    directory.lose([3, 7])
    after = asyncio.run(directory.marks())
    assert [tag for tag in range(TAGS) if before[tag] != after[tag]] == [3, 7]
    assert present(directory, keys) == [key for key in keys if tag_of(key) not in {3, 7}]


def test_the_same_randomness_gives_the_same_marks() -> None:
    def marks(seed: int) -> list[bytes]:
        directory = EmbeddedDirectory(rng=random.Random(seed))
        directory.lose([5])
        return list(asyncio.run(directory.marks()))

    assert marks(1) == marks(1) != marks(2)
    assert len(set(marks(1))) == TAGS


def test_closing_one_users_end_leaves_the_others_theirs() -> None:
    directory = EmbeddedDirectory()
    publish(directory, [key_of(1)])
    asyncio.run(directory.close())
    found = asyncio.run(directory.locate(NAMESPACE, 1, [key_of(1)]))
    assert found == [[Entry(node(1), DRAM, 1)]]


def test_a_cursor_of_something_else() -> None:
    with pytest.raises(InvalidRequest, match="cursor"):
        asyncio.run(EmbeddedDirectory().sweep([node(1)], b"127.0.0.1:6379 0", 10))
