"""`kvpool router` as a process: how it begins, says what is wrong, and ends."""

import contextlib
import http.client
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.pki import Pki
from tests.support.waiting import PATIENCE_S, until

COMMAND = [sys.executable, "-m", "kvpool.cli", "router", "--no-daemon"]


@contextmanager
def started(
    *flags: str, environ: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*COMMAND, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVPOOL_ROUTER_TOKEN": "", **(environ or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_serves_without_an_engine_and_ends_when_it_is_told(number: signal.Signals) -> None:
    with started("--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(
            r"kvpool \S+ ready: router at (http://127\.0\.0\.1:\d+), 0 engines\n", line
        )
        assert ready
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{ready[1]}/health", timeout=PATIENCE_S)
        assert caught.value.code == 503 and b"no decode engine" in caught.value.read()
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--listen", "0.0.0.0:0"), "KVPOOL_ROUTER_TOKEN"),
        (("--engine", "ftp://a"), "ftp://a"),
    ],
)
def test_what_is_wrong_is_one_line(flags: tuple[str, ...], word: str) -> None:
    with started(*flags) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.startswith("kvpool: ") and errors.count("\n") == 1 and word in errors


def test_a_port_that_is_taken_is_named() -> None:
    with started("--listen", "127.0.0.1:0") as first:
        assert first.stdout is not None
        port = first.stdout.readline().split("127.0.0.1:")[1].split(",")[0]
        with started("--listen", f"127.0.0.1:{port}") as second:
            _, errors = second.communicate(timeout=PATIENCE_S)
            assert second.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in errors


def test_clients_connect_by_tls_and_new_certificates_are_taken(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    files = pki.files("router")
    flags = ("--tls-cert", files.cert, "--tls-key", files.key)
    environ = {"KVPOOL_ROUTER_TOKEN": "a token of these tests"}
    with started("--listen", "0.0.0.0:0", *flags, environ=environ) as process:
        assert process.stdout is not None
        ready = re.fullmatch(
            r"kvpool \S+ ready: router at https://0\.0\.0\.0:(\d+), 0 engines\n",
            process.stdout.readline(),
        )
        assert ready
        port = int(ready[1])

        def ask(ca: Path, token: str = "") -> tuple[int, object]:
            context = ssl.create_default_context(cafile=str(ca))
            connection = http.client.HTTPSConnection(
                "localhost", port, timeout=PATIENCE_S, context=context
            )
            with contextlib.closing(connection):
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                connection.connect()
                assert isinstance(connection.sock, ssl.SSLSocket)
                shown = connection.sock.getpeercert() or {}
                connection.request("GET", "/v1/models", headers=headers)
                answer = connection.getresponse()
                answer.read()
                return answer.status, shown["serialNumber"]

        status, serial = ask(pki.ca, environ["KVPOOL_ROUTER_TOKEN"])
        assert status == 200
        assert ask(pki.ca)[0] == 401
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(Pki(tmp_path / "other").ca)
        plain = http.client.HTTPConnection("localhost", port, timeout=PATIENCE_S)
        with contextlib.closing(plain):
            plain.request("GET", "/health")
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                plain.getresponse()
        assert pki.files("router").cert == files.cert
        until(lambda: ask(pki.ca)[1] != serial)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
