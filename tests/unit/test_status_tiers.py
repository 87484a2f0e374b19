"""What `kvpool status` says of tiers and their codecs."""

from typing import Any

import pytest

from kvpool.cli.render.tiers import places, tiers_view
from kvpool.telemetry.node_stats import NodeStats
from kvpool.telemetry.tier_stats import ObjectStats
from tests.support.printed import printed
from tests.support.stats import node_stats

DISK: dict[str, Any] = {
    "path": "/disk[0]",
    "state": "serving",
    "error": "",
    "size_bytes": 1 << 30,
    "segment_bytes": 1 << 30,
    "entries_max": 1000,
    "direct": True,
    "used_bytes": 3 << 20,
    "blocks": 4,
    "raw_bytes": 4 << 20,
    "stored_bytes": 3 << 20,
    "codec_error": "",
    "writing_bytes": 0,
    "written_bytes": 3 << 20,
    "written_blocks": 4,
    "read_blocks": 0,
    "read_bytes": 0,
    "write_errors": 0,
    "read_errors": 0,
    "mismatches": 0,
    "packed_blocks": 3,
    "unpacked_blocks": 1,
    "undecoded_blocks": 0,
    "retired_bytes": 0,
}


USAGE: dict[str, Any] = {
    "where": "",
    "part_bytes": 512 << 20,
    "used_bytes": 3 << 20,
    "namespaces": {
        "ab" * 16: {"held_bytes": 2 << 20, "quota_bytes": 5 << 20},
        "cd" * 16: {"held_bytes": 1 << 20, "quota_bytes": 0},
    },
}


def stats(**disk: Any) -> NodeStats:
    usage = {"dram": [USAGE], "ssd": [USAGE | {"where": "/disk[0]"}]}
    return node_stats(
        tenants={"red": {"segment_bytes": 1, "usage": usage}}, tiers={"ssd": [DISK | disk]}
    )


def shown(**disk: Any) -> str:
    return printed(tiers_view(stats(**disk), "red"), width=200)


def test_what_a_tenant_and_its_namespaces_have_is_told() -> None:
    lines = [line.split() for line in shown().splitlines()]
    for tier in (["dram"], ["ssd", "/disk[0]"]):
        assert ["tenant", "red", *tier, "3", "MiB", "512", "MiB"] in lines
        assert ["namespace", "ab" * 6, *tier, "2", "MiB", "5", "MiB"] in lines
        assert ["namespace", "cd" * 6, *tier, "1", "MiB"] in lines


def test_how_much_a_codec_saves_is_told() -> None:
    text = shown()
    assert "/disk[0] holds 4 MiB of blocks in 3 MiB (1.33 to 1)" in text
    assert "3 were written smaller and 1 were not worth it" in text
    assert "decoded" not in text


@pytest.mark.parametrize("raw", [3 << 20, (3 << 20) - 4000, 0])
def test_nothing_is_said_where_nothing_is_packed(raw: int) -> None:
    stored = (3 << 20) * bool(raw)
    assert "holds" not in shown(
        packed_blocks=0, unpacked_blocks=0, raw_bytes=raw, stored_bytes=stored
    )


def test_packed_blocks_of_an_earlier_life_are_told_of() -> None:
    assert "1.33 to 1" in shown(packed_blocks=0, unpacked_blocks=0)


def test_what_is_wrong_with_a_codec_is_told() -> None:
    assert "2 blocks could not be decoded" in shown(undecoded_blocks=2)
    assert "8 KiB failed repeatedly" in shown(retired_bytes=8192)
    assert "/disk[0]: no blosc2" in shown(codec_error="no blosc2")


def test_object_storage_is_a_tier_and_tells_what_ails_it() -> None:
    said = stats()
    said.tiers.object = [
        ObjectStats(
            path="s3://bucket/[x]",
            state="failing",
            error="it is away",
            size_bytes=1 << 30,
            read_errors=2,
            write_errors=3,
            stale_blocks=1,
        )
    ]
    tier, place = places(said, "red")[-1]
    assert (tier, place.path) == ("object", "s3://bucket/[x]")
    text = printed(tiers_view(said, "red"), width=200)
    row = next(line.split() for line in text.splitlines() if "object" in line)
    assert row[-1] == "5"
    assert "s3://bucket/[x] is failing: it is away" in text
    assert "1 block not found in the object named for it" in text
