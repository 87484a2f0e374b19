"""What a newcomer's first hour costs: installing, the demos, the first request of a fresh daemon, the README.

    .venv/bin/python bench/first_hour.py [--quick] [--json FILE]

Installs kvpool into an empty environment and runs `kvpool demo` there. Compares the first client of a daemon that has
just become ready with the tenth one, each in a process of its own, from opening a namespace to having read what it put.
Runs the commands that show something, 80 columns wide, on a cluster in use, and counts the lines that do not fit.
`make demo`'s environment is measured where it is. `--quick`: installs nothing, fewer daemons.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from harness import REPO, Report, daemon, median, parse_arguments

from tests.support.local_cluster import LocalCluster
from tests.support.traffic import traffic

LIGHT_S, LIGHT_MB, DEMO_MB = 10.0, 400, 2600
FIRST_VS_TENTH = 1.5
README_WORDS = 700
MEMORY = "4GiB"
CLIENTS = 10
COMMAND_S = 600
TRAFFIC_S = 10.0
SHOWING = (
    *("nodes", "status", "status --all", "namespaces", "top --once", "events", "receipts"),
    *("config show", "doctor", "plan memory", "job list", "sessions list", "--help"),
)
"""Commands that show something of a cluster in use."""
CLIENT = """
import sys, time
from kvpool.client import Client
from kvpool.types import NamespaceRecord

first = int(sys.argv[2])
keys = [(first + n).to_bytes(16, "big") for n in range(8)]
begun = time.perf_counter()
with Client(sys.argv[1]) as client:
    ns = client.open(NamespaceRecord.simple("m", block_bytes=65536, block_tokens=32))
    client.put(ns, keys, [bytes(65536)] * 8)
    assert client.match(ns, keys) == 8 and None not in client.get(ns, keys)
    print(time.perf_counter() - begun)
"""


def megabytes(folder: Path) -> float:
    done = subprocess.run(["du", "-sm", folder], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0])


def install_and_demo(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        place = Path(folder) / "venv"
        begun = time.monotonic()
        venv.create(place, with_pip=True)
        pip = str(place / "bin" / "pip")
        subprocess.run([pip, "install", "-qq", "."], cwd=REPO, check=True, timeout=COMMAND_S)
        report.row("pip install .", seconds=time.monotonic() - begun, mb=megabytes(place))
        begun = time.monotonic()
        subprocess.run(
            [place / "bin" / "kvpool", "demo"],
            cwd=folder,
            check=True,
            timeout=COMMAND_S,
            stdout=subprocess.DEVNULL,
        )
        report.check("demo_light_s", time.monotonic() - begun, at_most=LIGHT_S)
        report.check("demo_light_mb", megabytes(place), at_most=LIGHT_MB)


def demo_environment(report: Report) -> None:
    places = [REPO / ".venv-vllm", REPO / ".servers"]
    if (places[0] / ".kvpool-tests").exists() or not places[0].exists():
        why = "needs the environment as `make demo` makes it in a fresh clone"
        report.not_run("demo_mb", why, at_most=DEMO_MB)
        return
    report.check(
        "demo_mb",
        sum(map(megabytes, (place for place in places if place.exists()))),
        at_most=DEMO_MB,
    )


def first_client(report: Report, daemons: int) -> None:
    firsts, tenths = [], []
    for number in range(daemons):
        with (
            tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
            daemon(Path(folder), f"d{number}", MEMORY) as running,
        ):
            times = [
                float(
                    subprocess.run(
                        [sys.executable, "-c", CLIENT, running.socket, str(turn * 100)],
                        capture_output=True,
                        text=True,
                        check=True,
                        cwd=REPO,
                    ).stdout
                )
                for turn in range(CLIENTS)
            ]
        firsts.append(times[0])
        tenths.append(times[-1])
    report.row("client", first_ms=median(firsts) * 1e3, tenth_ms=median(tenths) * 1e3)
    ratio = median(firsts) / median(tenths)
    report.check("first_client_after_ready_vs_tenth", ratio, at_most=FIRST_VS_TENTH)


def over_80_columns(report: Report) -> None:
    environ = {**os.environ, "COLUMNS": "80"}
    over = []
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        LocalCluster(Path(folder), memory="64MiB", ssd="256MiB") as cluster,
        traffic(cluster.nodes),
    ):
        cluster.wait_acquainted()
        time.sleep(TRAFFIC_S)
        for command in SHOWING:
            done = subprocess.run(
                [sys.executable, "-m", "kvpool.cli", *command.split()],
                capture_output=True,
                text=True,
                check=True,
                cwd=REPO,
                env={**environ, "KVPOOL_SOCKET": cluster.nodes[0].socket},
            )
            over += [f"{command}: {line}" for line in done.stdout.splitlines() if len(line) > 80]
    for line in over:
        report.row(line)
    report.check("columns_over_80", len(over), at_most=0)


def prose_words(markdown: str) -> int:
    """Words of rendered prose: without tables, code and addresses."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return len(re.findall(r"\w[\w'.,/-]*", text))


def main() -> int:
    report, given = parse_arguments(__doc__.splitlines()[0])
    if not given.quick:
        install_and_demo(report)
    demo_environment(report)
    first_client(report, 3 if given.quick else 11)
    over_80_columns(report)
    words = prose_words((REPO / "README.md").read_text())
    report.check("readme_words", words, at_most=README_WORDS)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
