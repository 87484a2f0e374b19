"""Dynamo's indexer of KV events, which answers questions on standard input: nobody here has written how it reads events.

It listens on all addresses, so it is run in a network of its own where the machine allows that; its port is the first argument.
A question is a line of JSON, [path, body or null], and so is its answer, [status, body].
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

INDEXER = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 1, 64
PATIENCE_S = 180.0


def loopback_up() -> None:
    """A new network has its loopback down."""
    with socket.socket() as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP | IFF_RUNNING))
        except PermissionError:
            pass  # the machine's network, where it is up


def ask(port: str, path: str, body: Any) -> list[Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return [answer.status, answer.read().decode()]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode()]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    loopback_up()
    port = sys.argv[1]
    process = subprocess.Popen(
        [sys.executable, "-c", INDEXER, "--port", port, "--threads", "1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                ask(port, "/health", None)
                break
            except urllib.error.URLError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        say("ready")
        for line in sys.stdin:
            path, body = json.loads(line)
            say(json.dumps(ask(port, path, body)))
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
