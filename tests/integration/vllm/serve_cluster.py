"""Nodes with a real etcd and Redis, until standard input ends: `serve_cluster.py FOLDER NODES`.

A program of its own, since what daemons need to be several is not installed where vLLM is. Prints one
line, JSON: for each node its name, socket and process id.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvpool.testing.local import LocalCluster


def main() -> None:
    folder, nodes = Path(sys.argv[1]), int(sys.argv[2])
    with LocalCluster(folder, nodes=nodes, memory="128MiB") as cluster:
        cluster.wait_acquainted()
        found = [
            {"name": node.name, "socket": node.socket, "pid": node.pid} for node in cluster.nodes
        ]
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
