"""Connections that nobody has authenticated keep out neither a health probe nor those with a token."""

import http.client
import socket
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.admin.gateway import LIMITS
from kvpool.admin.tokens import add_token
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def gateway(start, tmp_path, until):
    tokens, port = tmp_path / "tokens.toml", free_port()
    token = add_token(tokens, "ci", "viewer", [])
    start("--http", f"127.0.0.1:{port}", "--http-tokens", str(tokens))

    def answers():
        try:
            return ask(port) == 200
        except ConnectionRefusedError:
            return False

    until(answers)
    return port, token


def ask(port, path="/healthz", token="", connection=None):
    used = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        used.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = used.getresponse()
        answer.read()
        return answer.status
    finally:
        if connection is None:
            used.close()


def parse_metrics(text):
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nHost: x"])
def test_conns_idle_strangers_do_not_keep_out_a_health_probe(gateway, said):
    """512 of them once had every further connection closed, probes too."""
    port, token = gateway
    with ExitStack() as stack:
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        stack.callback(kept.close)
        assert ask(port, "/v1/me", token, kept) == 200
        sock = kept.sock
        for _ in range(LIMITS.connections + 50):
            stranger = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            )
            stranger.sendall(said)
        for _ in range(3):
            assert ask(port) == 200
            assert ask(port, "/v1/me", token) == 200
        assert ask(port, "/v1/me", token, kept) == 200
        assert kept.sock is sock, "who has shown a token makes way for no stranger"
        kept.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        metrics = parse_metrics(kept.getresponse().read())
        assert metrics["kvpool_http_connections_dropped_total"] >= 50
