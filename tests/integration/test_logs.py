"""What a daemon and its workers log, as whoever collects it sees it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any


def test_each_line_is_json_and_tells_the_worker(
    start: Callable[..., Any], until: Callable[..., Any]
) -> None:
    daemon = start("--listen", "tcp://127.0.0.1:0", "-v", KVPOOL_LOG_FORMAT="json")
    with daemon.client(connect=True) as client:
        (worker,) = client.stats().transfer_workers
    port = int(worker.listening[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: "a peer was refused" in daemon.log.read_text())
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.stderr.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (refused,) = [line for line in lines if "a peer was refused" in line["message"]]
    assert (refused["worker"], refused["logger"]) == ("transfer", "kvpool.transfer")
    (joined,) = [line for line in lines if line["message"] == "node joined"]
    assert joined["logger"] == "kvpool.events" and joined["node"] == joined["details"]["of"]
