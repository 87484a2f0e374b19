"""Every number that the plugin counts, and a thread-safe tally of them.

`prometheus.py` gives them to vLLM, which shows them as `vllm:kvpool_<name>` with its own labels.
"""

from __future__ import annotations

import threading

COUNTERS = {
    "lookups": "Requests looked up in the pool",
    "failed_lookups": "Lookups that the daemon refused",
    "hit_blocks": "Blocks that lookups found, a block of all ranks counted once",
    "pulls": "Lookups that asked other nodes for what their own one lacked",
    "follows": "Those of the pulls that waited for a prompt which was being computed elsewhere",
    "bad_requests": "Requests whose kv_transfer_params for the pool were not understood, and ignored",
    "late_pulls": "Pulls that were not answered in the time that requests wait",
    "pulled_blocks": "Blocks that lookups gained by pulls, a block of all ranks counted once",
    "pull_wait_seconds": "Time that pulls took, or were waited for",
    "prefill_tokens": "Tokens of the steps by which the engine's prefill speed is measured",
    "prefill_seconds": "Time of these steps' forward passes",
    "declined_blocks": "Blocks that lookups found and that were computed, which was quicker than loading so few",
    "loads": "Loads that ended well, counted on every rank",
    "loaded_blocks": "Parts of blocks loaded from the pool: one a block, cache group and shard of KV heads, on every rank that loads it",
    "loaded_bytes": "Bytes loaded from the pool",
    "device_blocks": "Those of the loaded parts of blocks that were read from the daemon's device memory",
    "device_bytes": "Those of the loaded bytes that were read from the daemon's device memory",
    "load_seconds": "Time that loads took, summed over ranks",
    "failed_loads": "Loads that failed and were recomputed, counted on every rank that failed",
    "saved_blocks": "Parts of blocks newly stored: one a block, cache group and shard of KV heads",
    "saved_bytes": "Bytes newly stored",
    "failed_saves": "Saves that the pool did not take, or not before the engine used their blocks again, counted on every rank",
    "measured_blocks": "Saved parts of blocks whose loss by the codec was measured: one in 64",
    "measured_error": "Relative RMS errors of the measured parts, summed",
    "nonfinite_blocks": "Parts that were to be measured and hold infinities or NaNs",
    "dropped_saves": "Blocks not saved because saves may pin only a share of the engine's blocks, or the engine used them again first",
    "resets": "Resets, after which the engine looks which weights it has",
    "new_weights": "Those of the resets after which it had other weights than at its start, or unknown ones",
    "failed_resets": "Resets while the engine held blocks, or whose namespace was refused: it leaves the pool alone",
    "shut_out": "Times that the epoch of this engine's namespace was ended from outside",
}


class Counters:
    """What was counted since the last `take`. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                assert name in COUNTERS, name
                if amount:
                    self._tally[name] = self._tally.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """The tally, which starts anew; empty when nothing was counted."""
        with self._lock:
            tally, self._tally = self._tally, {}
        return tally
