"""See the package. Exit status 1 if anything was found; the inputs are written into a folder."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.fuzz import plain, targets

GREW_KIB_MAX = 64 << 10
SLICE = 20_000  # inputs between two looks at the memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, default=1_000_000, help="inputs for all targets together"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--target", action="append", choices=sorted(targets.TARGETS))
    parser.add_argument(
        "--plain", action="store_true", help="without guidance, also where atheris is there"
    )
    parser.add_argument(
        "--findings", type=Path, default=Path(".fuzz"), help="a folder for what is found"
    )
    options = parser.parse_args()
    names = options.target or sorted(targets.TARGETS)
    guided = not options.plain and importlib.util.find_spec("atheris") is not None
    each = max(1, options.count // len(names) // (2 if guided else 1))
    how = "half of them guided" if guided else "none guided"
    print(
        f"seed {options.seed}: {each * len(names) * (2 if guided else 1)} inputs, {how}", flush=True
    )
    began = time.monotonic()
    found = 0
    with ProcessPoolExecutor(os.cpu_count() or 1) as pool:
        for name, findings, grew in pool.map(
            _plain, names, [each] * len(names), [options.seed] * len(names)
        ):
            found += len(findings) + (grew > GREW_KIB_MAX)
            _tell(name, findings, grew, options.findings)
        if guided:
            for name, text in pool.map(
                _guided, names, [each] * len(names), [options.seed] * len(names)
            ):
                if text:
                    found += 1
                    print(f"{name}: guided:\n{text}")
                else:
                    print(f"{name}: {each} guided, nothing", flush=True)
    print(f"{found} findings, {time.monotonic() - began:.0f} s")
    return 1 if found else 0


def _plain(name: str, count: int, seed: int) -> tuple[str, list[plain.Finding], int]:
    """In a process of the pool: the findings, and by how many KiB it grew after its first slice."""
    logging.disable()
    findings: list[plain.Finding] = []
    before = None
    for number, at in enumerate(range(0, count, SLICE)):
        findings += plain.fuzz(name, min(SLICE, count - at), seed + number)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if before is None else before
    grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - (before or 0)
    return name, findings, grew


def _guided(name: str, count: int, seed: int) -> tuple[str, str]:
    """A process of its own, which atheris ends: what it said if it found something; empty: nothing."""
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
                *("-timeout=20", f"-artifact_prefix={folder}/", folder),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    return name, "" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]


def _tell(name: str, findings: list[plain.Finding], grew: int, folder: Path) -> None:
    print(f"{name}: {len(findings)} findings, grew by {grew >> 10} MiB", flush=True)
    for number, finding in enumerate(findings):
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}-{number}"
        path.write_bytes(finding.data)
        print(f"{path}: {finding.trace}")


if __name__ == "__main__":
    sys.exit(main())
