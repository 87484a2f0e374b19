"""All verbs: importing this registers them, in the order of `kvpool --help`."""
# ruff: noqa: I001

from __future__ import annotations

from kvpool.cli.base import app
from kvpool.cli.serving import serve
from kvpool.cli.fronting import router
from kvpool.cli.showing import blocks, locate, lookup, namespaces, nodes, status, tiers
from kvpool.cli.watching import events, top
from kvpool.cli.changing import configure, drain, pin, reset, unpin
from kvpool.cli.working import evict, jobs, move, scrub, warm
from kvpool.cli.explaining import explain
from kvpool.cli.planning import plan, sim
from kvpool.cli.checking import bench, completion, config, doctor, version
from kvpool.cli.certificates import certs
from kvpool.cli.tokens import token

__all__ = [
    "app",
    "bench",
    "blocks",
    "certs",
    "completion",
    "config",
    "configure",
    "doctor",
    "drain",
    "events",
    "evict",
    "explain",
    "jobs",
    "locate",
    "lookup",
    "move",
    "namespaces",
    "nodes",
    "pin",
    "plan",
    "reset",
    "router",
    "scrub",
    "serve",
    "sim",
    "status",
    "tiers",
    "token",
    "top",
    "unpin",
    "version",
    "warm",
]
