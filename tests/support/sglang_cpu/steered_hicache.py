"""The backend, steered by a test through files in the folder that KVPOOL_TEST_STEERING names.

zero: pages that were read are overwritten with zeros. hold: a read waits while the file exists, after it has made the
file `reading`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpool.engine_plugins.sglang.backend import KvpoolHiCache

HOLD_S_MAX = 60.0


class SteeredHiCache(KvpoolHiCache):
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        folder = Path(os.environ["KVPOOL_TEST_STEERING"])
        deadline = time.monotonic() + HOLD_S_MAX
        while (folder / "hold").exists() and time.monotonic() < deadline:
            (folder / "reading").touch()
            time.sleep(0.005)
        found = super().batch_get_v1(keys, host_indices, extra_info)
        if (folder / "zero").exists():
            self._zero(keys, host_indices)
        return found

    def _zero(self, keys: Sequence[str], host_indices: Any) -> None:
        pages = self._held["kv"].pages
        assert pages is not None
        for pieces in pages.views(pages.numbers(host_indices, len(keys))):
            for piece in pieces:
                piece[:] = 0
