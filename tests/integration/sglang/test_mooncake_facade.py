"""SGLang's own Mooncake backend, and the test of it that SGLang ships, over the pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import runpy, sys
from kvpool.engine_plugins.mooncake import install_if_asked
install_if_asked()
module = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"
sys.argv = [module]
runpy.run_module(module, run_name="__main__")
"""


def test_the_backends_own_test_passes(kit: Any, tmp_path: Path) -> None:
    with kit.run_daemon(tmp_path) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={
                **os.environ,
                "KVPOOL_MOONCAKE": "1",
                "KVPOOL_SOCKET": daemon.socket,
                "MOONCAKE_MASTER": "nobody:1",
            },
            capture_output=True,
            text=True,
            timeout=kit.PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert "All tests passed" in done.stdout + done.stderr
        assert "failed" not in (done.stdout + done.stderr).lower()
        assert daemon.counters().committed > 0
