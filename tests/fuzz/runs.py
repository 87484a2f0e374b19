"""One target's inputs, in a process of its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import plain, targets

SLICES = 4  # of a target's inputs: the memory is looked at after the first and after the last


def plain_run(name: str, count: int, seed: int) -> tuple[str, list[plain.Finding], int]:
    """In a process of its own: the findings, and by how many KiB it grew after its first slice."""
    logging.disable()
    findings: list[plain.Finding] = []
    before = None
    for number in range(SLICES):
        findings += plain.fuzz(name, max(1, count // SLICES), seed + number)
        before = _resident_kib() if before is None else before
    return name, findings, _resident_kib() - (before or 0)


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 10


def guided_run(name: str, count: int, seed: int, findings: Path) -> tuple[str, str]:
    """A process of its own, which atheris ends: what it said if it found something; empty: nothing.

    The input is written into `findings` then.
    """
    with tempfile.TemporaryDirectory(prefix="kvpool-fuzz-") as folder:
        for number, data in enumerate(targets.TARGETS[name].seeds):
            (Path(folder) / str(number)).write_bytes(data)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz.guided", name),
                *(
                    f"-runs={count}",
                    f"-seed={seed % (1 << 31) or 1}",
                    "-max_len=8192",
                    "-rss_limit_mb=2048",
                ),
                *("-timeout=20", f"-artifact_prefix={findings}/{name}-", folder),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    return name, "" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]
