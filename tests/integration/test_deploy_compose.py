"""A node as deploy/compose.yaml has it, without Docker: what `setup` made, its environment, and what asks it."""

import importlib.util
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
TOKEN = "a token of Prometheus, made at random"


@pytest.fixture
def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the service `setup` leaves for its nodes."""
    path = DEPLOY / "compose" / "setup.py"
    spec = importlib.util.spec_from_file_location("setup_of_compose", path)
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    for name in ("authority", "nodes/node-a", "public", "run/secrets"):
        (folder / name).mkdir(parents=True)
    (folder / "run/secrets/metrics_token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    mask = os.umask(0o022)
    try:
        setup.main(["node-a"], folder, os.getuid())
    finally:
        os.umask(mask)
    return folder


def test_a_node_of_compose_is_asked_over_tls_with_a_token(made, start, until):
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    given = services["node-a"]["environment"]
    node, port = made / "nodes" / "node-a", free_port()
    (made / "secret").write_text("0123456789abcdef0123456789abcdef\n")
    (made / "secret").chmod(0o600)
    own = {
        "KVPOOL_MEMORY": "16MiB",
        "KVPOOL_SSD": f"{made}/ssd=64MiB",
        "KVPOOL_HTTP": f"127.0.0.1:{port}",
        "KVPOOL_LISTEN": "tcp://0.0.0.0:0",
        "KVPOOL_CLUSTER_SECRET_FILE": str(made / "secret"),
        "KVPOOL_ROUTER_TOKEN_FILE": str(made / "secret"),
    }
    # Of a node that is alone: there is no etcd and no Redis here.
    left_out = {"KVPOOL_JOIN", "KVPOOL_DIRECTORY", "KVPOOL_DIRECTORY_PASSWORD_FILE"}
    assert left_out | set(own) <= set(given)
    environ = {
        name: value.replace("/etc/kvpool/node", str(node)) for name, value in given.items()
    } | own
    start(**{name: value for name, value in environ.items() if name not in left_out})

    trusted = ssl.create_default_context(cafile=str(made / "public" / "ca.pem"))

    def ask(path: str, token: str = "") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"https://localhost:{port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, context=trusted, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""
        except urllib.error.URLError:  # it does not listen yet
            return 0, ""

    until(lambda: ask("/healthz")[0] == 200, what="the gateway answers")
    until(lambda: ask("/readyz")[0] == 200, what="its daemon answers it")
    assert ask("/metrics")[0] == ask("/metrics", "another token")[0] == 401
    status, text = ask("/metrics", TOKEN)
    assert status == 200
    assert 'kvpool_node_state{state="serving"} 1' in text
    assert 'node="node-a"' in text
