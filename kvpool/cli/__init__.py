"""The command line: reads the configuration, wires the parts together, prints for people.

One module a command; importing it registers it. A command imports its own only: the parser of all commands
takes longer to make than most commands to run.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from kvpool.cli.base import app, complain, exit_status
from kvpool.errors import KvpoolError

# In the order of `kvpool --help`.
COMMANDS = (
    *("serve", "router", "status", "tiers", "nodes", "namespaces", "locate", "lookup", "blocks"),
    *("top", "events", "drain", "clear", "configure", "pin", "unpin"),
    *("evict", "warm", "move", "scrub", "jobs", "explain", "sim", "plan"),
    *("doctor", "version", "config", "bench", "completion", "certs", "token"),
)
# The module of a command, where it has another name.
MODULES = {"serve": "serving", "unpin": "pin"}


def load(command: str) -> None:
    """Register one command, or all where there is none of that name."""
    module = MODULES.get(command, command) if command in COMMANDS else "verbs"
    import_module(f"kvpool.cli.{module}")


def main() -> None:
    """Entry point: errors that are expected are one line, not a traceback."""
    if "_KVPOOL_COMPLETE" in os.environ:
        from kvpool.cli.render.completion import prepare

        prepare()
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    load(first)
    try:
        app(prog_name="kvpool")
    except KvpoolError as error:
        complain(str(error))
        raise SystemExit(exit_status(error)) from None
