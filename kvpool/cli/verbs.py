"""All commands: importing this registers them, in the order of `kvpool --help`."""

from __future__ import annotations

from kvpool.cli import COMMANDS, load
from kvpool.cli.base import app

for _command in COMMANDS:
    load(_command)

__all__ = ["app"]
