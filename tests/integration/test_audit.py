"""The audit file of a daemon: changes, and whoever failed to prove who they are, at every door."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import OperatorClient
from kvpool.daemon.ops.audit_file import AuditRecord, verify
from kvpool.errors import KvpoolError, NotAuthenticated
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import greet
from kvpool.transfer.stream import Stream
from kvpool.types import NamespaceRecord
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord.simple("audit", block_bytes=4096, block_tokens=16)
OPERATOR = "an operator's token of tests"
SECRET = "a secret of the peers of this test"
TENANTS = '[tenants.red]\nmemory = "4MiB"\ntoken = "a token of tenant red"\n'


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "audit.log"


@pytest.fixture
def begin(start: Callable[..., Any], path: Path) -> Callable[..., Any]:
    def one(*args: str, **settings: str) -> Any:
        environ = {"KVPOOL_OPERATOR_TOKEN": OPERATOR, "KVPOOL_CLUSTER_SECRET": SECRET}
        return start("--audit-file", str(path), *args, **environ, **settings)

    return one


def records(path: Path) -> list[AuditRecord]:
    return [record for record, _ in verify(path)]


def failures(path: Path) -> list[dict[str, Any]]:
    return [dict(each.details) for each in records(path) if each.kind == "login failed"]


def test_changes_are_kept_over_restarts_of_all_kinds(
    begin: Callable[..., Any], path: Path, until: Callable[..., Any]
) -> None:
    for life in range(3):
        daemon = begin()
        with OperatorClient(daemon.socket, operator_token=OPERATOR, timeout_s=PATIENCE_S) as client:
            ns = client.open(RECORD)
            client.put(ns, [bytes(16)], [bytes(4096)])
            client.evict([bytes(16)])
        until(lambda life=life: len(records(path)) == life + 1)
        if life == 1:
            # Workers first: they end with the control process, and nobody has their numbers any more.
            for pid in reversed(daemon.family()):
                os.kill(pid, signal.SIGKILL)
            daemon.wait_end()
        else:
            assert daemon.stop() == 0
    found = records(path)
    assert [record.number for record in found] == [1, 2, 3]
    assert {(record.kind, record.details["what"]) for record in found} == {("change", "evict")}
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "audit", "verify", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "3 records are whole" in done.stdout


def test_who_fails_at_the_socket(
    begin: Callable[..., Any], path: Path, until: Callable[..., Any]
) -> None:
    daemon = begin(config=TENANTS)
    with pytest.raises(NotAuthenticated), daemon.client(tenant="red", token="wrong") as red:
        red.open(RECORD)
    with pytest.raises(NotAuthenticated), daemon.client(tenant="blue") as blue:
        blue.open(RECORD)
    with daemon.client(operator_token="not the operator's token") as client:
        client.open(RECORD)
        with pytest.raises(KvpoolError):
            client.evict([bytes(16)])
    until(lambda: len(failures(path)) == 3)
    me = f"uid {os.getuid()}, process {os.getpid()}, tenant"
    assert [(each["door"], each["source"], each["reason"]) for each in failures(path)] == [
        ("socket", f"{me} red", "unknown tenant, or wrong token"),
        ("socket", f"{me} blue", "unknown tenant, or wrong token"),
        ("socket", f"{me} default", "wrong operator token"),
    ]
    assert "not the operator's token" not in path.read_text()
    assert daemon.stats().failed_logins == {"socket": 3}


def test_who_fails_at_the_gateway_and_as_a_peer(
    begin: Callable[..., Any], path: Path, until: Callable[..., Any]
) -> None:
    port = free_port()
    daemon = begin("--http", f"127.0.0.1:{port}", "--listen", "tcp://127.0.0.1:0")
    url = f"http://127.0.0.1:{port}/v1/cluster"

    def answered(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            return 0  # the gateway is still starting

    until(lambda: answered("") == 401)
    assert [answered("wrong") for _ in range(3)] == [401] * 3
    peer = connect(daemon)
    try:
        with pytest.raises(NotAuthenticated):
            greet(peer, Identity("another cluster", "x", "i", ClusterSecrets.of(SECRET)))
    finally:
        peer.close()
    until(lambda: sum(each["count"] for each in failures(path)) == 4)
    doors = {each["door"]: each for each in failures(path)}
    assert set(doors) == {"http", "peer"}
    assert doors["http"]["source"] == doors["peer"]["source"] == "127.0.0.1"
    assert doors["http"]["reason"] == "a wrong token", "who has sent none has tried none"
    assert "another cluster" in doors["peer"]["reason"]
    assert daemon.stats().failed_logins == {"http": 3, "peer": 1}
    token = (Path(daemon.socket).parent / "http.token").read_text().strip()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    for door, count in (("http", 3), ("peer", 1)):
        assert re.search(rf'kvpool_failed_logins_total{{[^}}]*door="{door}"[^}}]*}} {count}', text)
    assert re.search(r"kvpool_audit_records_total(\{[^}]*\})? [1-9]", text)


def connect(daemon: Any) -> Stream:
    found = re.search(r"tcp://([\d.]+):(\d+)", daemon.ready)
    assert found is not None
    sock = socket.create_connection((found[1], int(found[2])))
    return Stream(sock, Deadline(PATIENCE_S))


def test_a_file_that_cannot_be_used_is_said_at_the_start(
    start: Callable[..., Any], path: Path
) -> None:
    path.write_text("something else\n")
    daemon = start("--audit-file", str(path), ready=False)
    assert daemon.wait_end() == 1
    assert "is not one of an audit file" in daemon.stderr
