"""`make cluster`: three daemons with an etcd and a Redis until Ctrl-C, and traffic with `TRAFFIC=1`.

Says every few seconds what it waits for. A node that is killed is named, and the others go on. The logs of the last
cluster stay in `.cluster/`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from kvpool.daemon.workers.gateway import TOKEN_FILE
from tests.support.local_cluster import LocalCluster
from tests.support.saying import saying
from tests.support.traffic import traffic

LOGS = Path(".cluster")
LOOK_S = 0.5


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-cluster-")))
        stack.callback(keep_logs, folder)
        cluster = LocalCluster(folder, ssd="256MiB", http=True)
        with saying("starting an etcd, a Redis and three daemons"):
            stack.enter_context(cluster)
            cluster.wait_acquainted()
        show(cluster, folder)
        if os.environ.get("TRAFFIC"):
            stack.enter_context(traffic(cluster.nodes))
            print("Traffic runs as of engines on each node.")
        print("Ctrl-C stops it all.", flush=True)
        watch(cluster)


def show(cluster: LocalCluster, folder: Path) -> None:
    first = cluster.nodes[0]
    token = (folder / TOKEN_FILE).read_text().strip()
    print(f"etcd   {cluster.etcd.url}")
    print(f"redis  {cluster.directory_url}")
    for node in cluster.nodes:
        print(f"node {node.name}  {node.url}  http://{node.http}  socket {node.socket}")
    print(f"\nDashboard: http://{first.http}/ui/#token={token}")
    print(f"Try: .venv/bin/kvpool nodes --socket {first.socket}")
    print(f"Logs: {folder}/*.log, afterwards in {LOGS}/")


def watch(cluster: LocalCluster) -> None:
    """Say which nodes end, until none is left."""
    living = list(cluster.nodes)
    while living:
        for node in [node for node in living if node.process and node.process.poll() is not None]:
            living.remove(node)
            assert node.process is not None
            print(
                f"node {node.name} has ended with status {node.process.returncode}; "
                f"{len(living)} of {len(cluster.nodes)} go on",
                flush=True,
            )
        time.sleep(LOOK_S)


def keep_logs(folder: Path) -> None:
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
    for log in folder.rglob("*.log"):
        shutil.copy(log, LOGS)


if __name__ == "__main__":
    main()
