"""The command line: reads the configuration, wires the parts together, prints for people.

One module a group of verbs; importing it registers them. A command imports its own only: the parser of all verbs
takes longer to make than most commands to run.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from kvpool.cli.base import app, complain, exit_status
from kvpool.errors import KvpoolError

# Module → its verbs.
VERBS = {
    "serving": ("serve",),
    "fronting": ("router",),
    "showing": ("blocks", "locate", "lookup", "namespaces", "nodes", "status", "tiers"),
    "watching": ("events", "top"),
    "changing": ("configure", "drain", "pin", "reset", "unpin"),
    "working": ("evict", "jobs", "move", "scrub", "warm"),
    "explaining": ("explain",),
    "planning": ("plan", "sim"),
    "checking": ("bench", "completion", "config", "doctor", "version"),
    "certificates": ("certs",),
    "tokens": ("token",),
}


def main() -> None:
    """Entry point: errors that are expected are one line, not a traceback."""
    if "_KVPOOL_COMPLETE" in os.environ:
        from kvpool.status.completion import prepare

        prepare()
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    import_module("kvpool.cli." + next((name for name in VERBS if first in VERBS[name]), "verbs"))
    try:
        app(prog_name="kvpool")
    except KvpoolError as error:
        complain(str(error))
        raise SystemExit(exit_status(error)) from None
