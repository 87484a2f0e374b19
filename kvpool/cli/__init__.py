"""The command line: reads the configuration, wires the parts together, prints for people.

One module per command; importing it registers it. A command imports only its own module: building the parser of
all commands takes longer than running most of them.
"""

from __future__ import annotations

import sys
from importlib import import_module

from kvpool.cli.base import EXIT_INTERRUPTED, app, complain, exit_status
from kvpool.errors import KvpoolError
from kvpool.signals import unwind_on_ending

# In the order of `kvpool --help`.
COMMANDS = (
    *("demo", "serve", "router", "status", "nodes", "namespaces", "blocks"),
    *("sessions", "receipts", "put", "get", "ls", "rm"),
    *("top", "events", "drain", "clear", "configure", "pin", "unpin", "intend"),
    *("job", "explain", "sim", "plan"),
    *("doctor", "version", "config", "certs", "secret", "token", "audit"),
)
# The module of a command, if its name differs.
MODULES = {
    "serve": "serving",
    "unpin": "pin",
    **dict.fromkeys(("put", "get", "ls", "rm"), "objects"),
}


def load(command: str) -> None:
    """Register one command, or all if no command has that name."""
    module = MODULES.get(command, command) if command in COMMANDS else "verbs"
    import_module(f"kvpool.cli.{module}")


def main() -> None:
    """Entry point: expected errors are printed as one line, without a traceback."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        unwind_on_ending()
        load(first)
        app(prog_name="kvpool")
    except KeyboardInterrupt:  # outside of a command, which ends with the same status
        raise SystemExit(EXIT_INTERRUPTED) from None
    except KvpoolError as error:
        complain(str(error))
        raise SystemExit(exit_status(error)) from None
