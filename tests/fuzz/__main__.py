"""See the package. Exit status 1 if anything was found; the inputs are written into a folder."""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.fuzz import plain, targets
from tests.fuzz.runs import guided_run, plain_run

GREW_KIB_MAX = 64 << 10


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
    with ProcessPoolExecutor(os.cpu_count() or 1, max_tasks_per_child=1) as pool:
        for name, findings, grew in pool.map(
            plain_run, names, [each] * len(names), [options.seed] * len(names)
        ):
            found += len(findings) + (grew > GREW_KIB_MAX)
            _tell(name, findings, grew, options.findings)
        if guided:
            options.findings.mkdir(exist_ok=True)
            places = [options.findings.resolve()] * len(names)
            for name, text in pool.map(
                guided_run, names, [each] * len(names), [options.seed] * len(names), places
            ):
                if text:
                    found += 1
                    print(f"{name}: guided:\n{text}")
                else:
                    print(f"{name}: {each} guided, nothing", flush=True)
    print(f"{found} findings, {time.monotonic() - began:.0f} s")
    return 1 if found else 0


def _tell(name: str, findings: list[plain.Finding], grew: int, folder: Path) -> None:
    print(f"{name}: {len(findings)} findings, grew by {grew >> 10} MiB", flush=True)
    for number, finding in enumerate(findings):
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}-{number}"
        path.write_bytes(finding.data)
        print(f"{path}: {finding.trace}")


if __name__ == "__main__":
    sys.exit(main())
