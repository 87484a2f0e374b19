"""The version of kvpool before this one, out of the history of this checkout."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from kvpool.errors import ConfigError
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "13dfc03e98176bdfa99c8c5c7b2b538d7036c8f8"
"""The last commit of the protocol before this one."""


def unpack(folder: Path) -> dict[str, str]:
    """Into a folder; returns the environment in which Python finds it there, and not the folder that it is started in.

    Raises `ConfigError` where the history does not go back so far.
    """
    command = ["git", "-C", str(ROOT), "archive", BEFORE, "kvpool", "storage", "engine_plugins"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"the version before is not in this checkout's history: {error}"
        ) from None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
