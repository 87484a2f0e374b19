"""Programs that say in their first line where they are, as processes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator

from tests.support.waiting import PATIENCE_S


@contextlib.contextmanager
def program(*words: str, **environ: str) -> Iterator[str]:
    """The first line of a module with these arguments. It ends with the `with`."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environ},
    )
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert readable
        yield process.stdout.readline().decode()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
