"""What systemd is told, on real sockets of datagrams."""

import logging
import socket
import uuid
from pathlib import Path

import pytest

from kvpool.cli.supervisor import tell_ready


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_it_is_told_that_the_service_is_ready(tmp_path: Path, kind: str) -> None:
    name = str(tmp_path / "s") if kind == "path" else f"@kvpool-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0", 1) if kind == "abstract" else name)
        listening.setblocking(False)
        tell_ready({"NOTIFY_SOCKET": name})
        assert listening.recv(100) == b"READY=1"


def test_nobody_is_told_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "socket")
    tell_ready({})
    tell_ready({"NOTIFY_SOCKET": ""})


def test_who_is_not_there_stops_no_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tell_ready({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert f"cannot tell {tmp_path}/gone that the service is ready" in caplog.text
