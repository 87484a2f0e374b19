"""What TLS and keyed frames between daemons cost: pulls of 1 MiB x 32 on loopback, with and without, in turns.

    .venv/bin/python bench/tls.py

`plain`: no tags. `keyed`: a tag behind each frame and each group of bytes, as without TLS.
Two daemons' worth of transports in processes of their own (transfer workers), so that neither shares an interpreter with the
other. The limit beside them is AES-256-GCM in records of 16 KiB by `openssl speed`, one core, one way.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from array import array
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from harness import Report, in_turns, median, parse_arguments

from kvpool.security.credentials import TlsFiles
from kvpool.transfer.base import Stop
from kvpool.wire.worker import PartRows, PullBlocks
from tests.contract.suites.transport import DIGEST, SEGMENT, key_of
from tests.support.pki import Pki
from tests.support.transfer_worker import WORKER, MoverSide

SHAPES = {"1 MiB x 32": (1 << 20, 32), "64 KiB x 64": (64 << 10, 64), "4 KiB x 128": (4096, 128)}
KEYED_LEAST = 0.9  # of what goes without, at 1 MiB
TLS_LEAST = 0.2  # of what goes without, at 1 MiB: two cores encrypt and decrypt at half of what one plain stream carries


class Pair:
    """An owner and a reader, over TLS where there are files. module: what their processes run."""

    def __init__(
        self, stack: ExitStack, files: TlsFiles | None = None, module: str = WORKER
    ) -> None:
        url = "tcp://127.0.0.1:0"
        self.owner = MoverSide(url, tls=files, module=module)
        stack.callback(self.owner.transport.close)
        self.reader = MoverSide(url, tls=files, module=module)
        stack.callback(self.reader.transport.close)
        self.url = self.owner.transport.listen(url)

    def fill(self, nbytes: int, count: int) -> None:
        self.owner.source.blocks.clear()
        self.owner.source.stride = nbytes
        rng = np.random.default_rng(nbytes)
        for number in range(count):
            self.owner.source.put(key_of(number), number, rng.bytes(nbytes))
        keys = b"".join(map(key_of, range(count)))
        rows = array("I", range(count)).tobytes()
        part = PartRows(0, nbytes, nbytes, keys, rows)
        self.order = PullBlocks(self.url, "default", DIGEST, SEGMENT, [part], 60.0)

    def pull(self) -> None:
        pulled = self.reader.transport.pull(self.order, Stop())
        assert pulled.status == b"\1" * len(pulled.status), pulled.error


def cipher_speed() -> float | None:
    """Bytes a second of one core; None where there is no openssl."""
    command = ["openssl", "speed", "-seconds", "1", "-bytes", "16384", "-evp", "aes-256-gcm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"AES-256-GCM\s+([\d.]+)k", done.stdout)
    return float(found[1]) * 1000 if found else None


def pulls(report: Report, pairs: dict[str, Pair]) -> None:
    print("pulls, plain, keyed and with TLS")
    for shape, (nbytes, count) in SHAPES.items():
        for pair in pairs.values():
            pair.fill(nbytes, count)
        # More to warm up than elsewhere: how many connections a pull takes is learnt from pulls.
        rounds = 15 if report.quick else 61
        times = in_turns(rounds, *(pair.pull for pair in pairs.values()), warmup=12)
        speeds = {
            name: nbytes * count / median(taken) / 1e9
            for name, taken in zip(pairs, times, strict=True)
        }
        ratios = {name: speeds[name] / speeds["plain"] for name in ("keyed", "tls")}
        report.row(
            shape,
            **{f"{name}_gb_s": speed for name, speed in speeds.items()},
            **{f"{name}_ratio": ratio for name, ratio in ratios.items()},
        )
        if nbytes == 1 << 20:
            report.check("keyed_vs_plain_1m", ratios["keyed"], at_least=KEYED_LEAST)
            report.check("tls_vs_plain_1m", ratios["tls"], at_least=TLS_LEAST)


def main() -> int:
    report, _ = parse_arguments(__doc__ or "")
    if speed := cipher_speed():
        report.row("aes-256-gcm, one core", gb_s=speed / 1e9)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        files = Pki(folder / "ca").files("node")
        plain = Pair(stack, module="tests.support.unkeyed_transfer_worker")
        pulls(report, {"plain": plain, "keyed": Pair(stack), "tls": Pair(stack, files)})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
