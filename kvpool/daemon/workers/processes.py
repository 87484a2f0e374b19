"""Resource usage of this process and its children."""

from __future__ import annotations

import os
from pathlib import Path

from kvpool.telemetry.node_stats import ProcessStats

_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def family() -> list[ProcessStats]:
    """Resource usage of this process (`control`) and its children, by module. A few reads each.

    resident_bytes: including shared memory such as segments; private_bytes: without.
    """
    own = os.getpid()
    found = [_usage(own, "control")]
    children = Path(f"/proc/{own}/task/{own}/children")
    # The kernel lists children only with CONFIG_PROC_CHILDREN, as in all distributions.
    for word in children.read_text().split() if children.exists() else []:
        try:
            command = Path(f"/proc/{word}/cmdline").read_bytes().split(b"\0")
            module = command[command.index(b"-m") + 1].decode() if b"-m" in command else "other"
            found.append(_usage(int(word), module.rpartition(".")[2]))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended meanwhile
    return found


def _usage(pid: int, kind: str) -> ProcessStats:
    # The name, in parentheses, may have spaces.
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return ProcessStats(
        kind=kind,
        pid=pid,
        cpu_s=(int(words[11]) + int(words[12])) / _TICKS_S,
        resident_bytes=int(resident) * _PAGE,
        private_bytes=(int(resident) - int(shared)) * _PAGE,
    )
