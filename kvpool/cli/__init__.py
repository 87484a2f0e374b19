"""The command line: reads the configuration, wires the parts together, prints for people.

One module a group of verbs; importing it registers them. In the order of `kvpool --help`.
"""
# ruff: noqa: I001

from __future__ import annotations

import os

from kvpool.cli.base import EXIT_ERROR, EXIT_INTERRUPTED, app, complain, exit_status
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
from kvpool.errors import KvpoolError

__all__ = [
    "EXIT_ERROR",
    "EXIT_INTERRUPTED",
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
    "main",
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


def main() -> None:
    """Entry point: errors that are expected are one line, not a traceback."""
    if "_KVPOOL_COMPLETE" in os.environ:
        from kvpool.status.completion import prepare

        prepare()
    try:
        app(prog_name="kvpool")
    except KvpoolError as error:
        complain(str(error))
        raise SystemExit(exit_status(error)) from None
