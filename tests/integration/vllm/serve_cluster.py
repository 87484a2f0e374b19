"""Nodes with a real etcd and Redis, until standard input ends: `serve_cluster.py FOLDER NODES [traced]`.

A program of its own, since what daemons need to be several is not installed where vLLM is. Prints one
line, JSON: for each node its name, socket and process id. `traced`: they export traces, and each line of
standard input is answered with one line, JSON: all spans that came so far. The daemons are
`UNHURRIED`: no test of an engine is about a directory or a membership that is late.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.support.local_cluster import UNHURRIED, LocalCluster
from tests.support.otlp_collector import Collector


def main() -> None:
    folder, nodes = Path(sys.argv[1]), int(sys.argv[2])
    traced = sys.argv[3:] == ["traced"]
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(Collector()) if traced else None
        environ = dict(UNHURRIED)
        if collector is not None:
            environ["KVPOOL_OTLP"] = collector.url
        cluster = stack.enter_context(
            LocalCluster(folder, nodes=nodes, memory="128MiB", environ=environ)
        )
        cluster.wait_acquainted()
        found = [
            {"name": node.name, "socket": node.socket, "pid": node.pid} for node in cluster.nodes
        ]
        _say(found)
        for _ in sys.stdin:
            _say([] if collector is None else [asdict(span) for span in collector.spans()])


def _say(found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
