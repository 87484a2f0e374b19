"""`kvpool audit`: checks an audit file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import argument, option
from kvpool.errors import ConfigError, ProtocolError

audit = base.group(
    "audit", "Check that an audit file is whole: no record changed, removed or put in between."
)


@audit.command("verify")
def audit_verify(
    file: Annotated[
        Path,
        argument(
            "The file, as in the setting audit_file. Its rotated files are read too.",
            metavar="FILE",
        ),
    ],
    contains: Annotated[
        str,
        option(
            "The hash that an earlier run has printed: its record must be there still.",
            metavar="HASH",
        ),
    ] = "",
) -> None:
    """Follow the chain of hashes through all records, and print where it ends.

    Keep the last hash on another machine: records that were cut off at the end are found by it alone. Exit status 1
    if the chain is broken; the message names the file and the line.

    Example: kvpool audit verify /var/log/kvpool/audit.log
    """
    from kvpool.daemon.ops.audit_file import files_of, verify

    if not files_of(file):
        raise ConfigError(f"{file} is not there")
    seen, end, first = False, None, ""
    for record, end in verify(file):
        first = first or f"record {record.number} of {record.at}"
        seen = seen or end.hash == contains
    if contains and not seen:
        raise ProtocolError(
            f"{file}: no record has the hash {contains:.64}: records were removed, or rotated away"
        )
    if end is None:
        print(f"{file} has no records.")
        return
    print(f"{end.lines} records are whole: from {first} to record {end.number} of {record.at}.")
    print(f"Last hash: {end.hash}")
