"""What daemons answer, in the tests of what is shown of it, and what was shown."""

import json
from typing import Any

import msgspec

from kvpool.cli.render.node import status_view
from kvpool.errors import Unavailable
from kvpool.placement.records import DEFAULT_SETTINGS
from kvpool.wire.answers import Located, Replica
from tests.support.printed import printed
from tests.support.stats import node_stats

DIRECTORY = {
    "connected": True,
    "queued": 12,
    "lag_s": 0.25,
    "repairing": 0,
    "failures": 0,
}

DEFAULTS = msgspec.to_builtins(DEFAULT_SETTINGS)

STATS: dict[str, Any] = {
    "node": "host-7",
    "incarnation": "abc123",
    "uptime_s": 90_061.5,
    "clients": 1,
    "connections": 12,
    "refused_connections": 0,
    "leases": 3,
    "counters": {"committed": 1500, "committed_bytes": 3 << 29, "match_keys": 10, "match_hits": 7},
    "tenants": {
        "red": {
            "segment_bytes": 4 << 30,
            "blocks": 1400,
            "hard_pinned_bytes": 1 << 20,
            "soft_pinned_bytes": 0,
            "granted_bytes": 0,
            "secondary_bytes": 0,
            "space": {
                "size": 4 << 30,
                "slab_bytes": 16 << 20,
                "slabs": 256,
                "slabs_unassigned": 64,
                "bytes_unassigned": 1 << 30,
                "bytes_used": 3 << 29,
                "classes": [
                    {
                        "stride": 1 << 20,
                        "extents": 192,
                        "slots_used": 1400,
                        "slots_free": 1672,
                        "bytes_used": 1400 << 20,
                        "bytes_free": 1672 << 20,
                        "bytes_lost": 0,
                    }
                ],
            },
            "namespaces": {
                "0123456789abcdef0123456789abcdef": {
                    "fields": {"model": "llama [8b]", "tp_size": 2, "dtype": "bf16", "seed": "0"},
                    "epoch": 2,
                    "settings": DEFAULTS,
                    "blocks": [700, 700],
                    "part_bytes": [1 << 20, 1 << 20],
                }
            },
        }
    },
    "transfer_workers": [
        {
            "pid": 77,
            "alive": True,
            "restarts": 0,
            "orders": 1,
            "loans": 2,
            "listening": ["tcp://a:1"],
        },
        {"pid": None, "alive": False, "restarts": 3, "orders": 0, "loans": 0, "listening": []},
    ],
    "fetch": {
        "lookups": 30,
        "lookups_failed": 0,
        "lookups_remembered": 4,
        "joined": 5,
        "hedges": 6,
        "cancelled": 7,
        "absent": 0,
        "mismatches": 0,
        "failed_transfers": 0,
        "transfers": 1,
        "peers": [
            {
                "incarnation": "b" * 16,
                "distance": "rack",
                "latency_ms": 1.25,
                "bytes_s": 200 << 20,
                "inflight_bytes": 0,
                "running": 0,
                "asked": 10,
                "failed": 2,
                "slow": 3,
                "bytes": 100 << 20,
                "suspended_s": 1.5,
                "suspected": False,
                "last_error": "connection [refused]",
            }
        ],
    },
    "replication": {
        "offered_blocks": 40,
        "accepted_blocks": 30,
        "accepted_bytes": 30 << 20,
        "taken_blocks": 20,
        "refused_offers": 1,
        "forwarded_blocks": 10,
        "replicated_blocks": 20,
        "repairs": 0,
        "dropped_wishes": 0,
        "promoted": 0,
        "wanted": 3,
        "repairing": False,
    },
    "cluster": {
        "cluster": "prod",
        "standing": "member",
        "state": "serving",
        "incarnation": "abc123",
        "others": 2,
        "directory": DIRECTORY,
    },
}

NAMES = {"b" * 16: "host-8"}


def shown(stats: dict, tenant: str = "red", width: int = 120) -> str:
    return printed(status_view(node_stats(**stats), tenant, NAMES), width)


def line_with(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def node(name: str, letter: str, **changes) -> dict:
    return {
        "node": name,
        "incarnation": letter * 16,
        "state": "serving",
        "transports": [{"url": f"tcp://10.0.0.{ord(letter) - 96}:7070", "metadata": ""}],
        "tiers": [
            {
                "name": "dram",
                "capacity_bytes": 64 << 30,
                "used_bytes": 3 << 29,
                "secondary_bytes": 0,
            }
        ],
        "labels": {"zone": "a", "rack": "7"},
        "version": "1.2.3",
        "protocol": 2,
        "drain": None,
    } | changes


DRAIN = {
    "phase": "copying",
    "blocks": 450,
    "blocks_total": 1000,
    "copied": 120,
    "copied_bytes": 3 << 29,
    "failed": 0,
    "left": 0,
    "leases": 0,
}

DIGEST = "0123456789abcdef0123456789abcdef"

ENTRY = {
    "tenant": "red",
    "digest": DIGEST,
    "fields": json.dumps({"model": "llama [8b]", "format_version": 1}),
    "parts": [[1 << 20, "full", 0, 1], [1 << 20, "full", 0, 1]],
    "epoch": 2,
    "fence": 0,
    "settings": DEFAULTS | {"replicas": 3},
}

CLUSTER = {
    "cluster": "prod",
    "node": "host-1",
    "incarnation": "a" * 16,
    "standing": "member",
    "state": "serving",
    "joined": True,
    "nodes": [node("host-1", "a"), node("host-2", "b")],
    "peers": [],
    "silent_peers": [],
    "drains": [],
    "namespaces": [ENTRY],
    "directory": DIRECTORY,
    "leases_lost": 0,
    "swept": 0,
}

FOUND = [
    Located(
        "00" * 16,
        DIGEST,
        2,
        [Replica("host-1", "a" * 16, "dram", 2), Replica("host-2", "b" * 16, "gpu", 1)],
    )
]


def draining(**progress) -> dict:
    record = node("host-2", "b", state="draining", drain=DRAIN | progress)
    return CLUSTER | {"nodes": [node("host-1", "a"), record], "drains": ["host-2"]}


SERVING = CLUSTER

LEFT = CLUSTER | {"nodes": [node("host-1", "a")], "drains": ["host-2"]}

MARKED_GONE = LEFT | {"nodes": [node("host-2", "b", state="gone", drain=DRAIN | {"phase": "done"})]}

OURSELVES = {"node": "host-2", "state": "gone"}

AWAY = Unavailable("no answer")
