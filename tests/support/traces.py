"""Writes traces for tests."""

import json
from collections.abc import Sequence
from pathlib import Path

from kvpool.simulator.traces import Entry


def write_trace(entries: Sequence[Entry], path: Path) -> None:
    """In Mooncake's format."""
    with path.open("w") as lines:
        for entry in entries:
            document = {
                "timestamp": round(entry.timestamp_s * 1e3),
                "input_length": entry.tokens,
                "output_length": entry.output_tokens,
                "hash_ids": entry.keys,
            }
            lines.write(json.dumps(document) + "\n")
