"""The command line elsewhere: what it asks a cluster's gateway, what a token may do there, and what goes wrong."""

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.admin.tokens import add_token
from tests.integration.admin.conftest import Gate
from tests.integration.cluster.conftest import PLAIN, keys_of
from tests.integration.test_cluster_cli import Commands
from tests.support.pki import Pki
from tests.support.servers.etcd import free_port

DIGEST = PLAIN.digest().hex()


def hexes(some: list[int]) -> list[str]:
    return [each.hex() for each in keys_of(some)]


class Shell:
    """`kvpool` of a user who has tokens of gateways, and no daemon."""

    def __init__(self, environ: dict[str, str], home: Path) -> None:
        self._commands = Commands(environ)
        self._home = home
        self._gateways: dict[str, tuple[str, dict[str, str]]] = {}

    def add(self, name: str, url: str, token: str, ca: str = "", tenant: str = "") -> None:
        file = self._home / f"{name}.token"
        file.write_text(token)
        environ = {"KVPOOL_GATEWAY": url, "KVPOOL_GATEWAY_TOKEN_FILE": str(file)}
        if ca:
            environ["SSL_CERT_FILE"] = ca
        self._gateways[name] = tenant, environ

    def __call__(self, name: str, *words: str, **environ: str) -> SimpleNamespace:
        """At the gateway of this name, with its tenant unless the words name one."""
        tenant, gateway = self._gateways[name]
        if tenant and "--tenant" not in words:
            words = (*words, "--tenant", tenant)
        done = self._commands.alone(*words, **{**gateway, **environ})
        assert "Traceback" not in done.err, done.err
        return done

    def json(self, name: str, *words: str) -> Any:
        done = self(name, *words, "--json")
        assert (done.status, done.err) == (0, ""), done
        return json.loads(done.out)

    def alone(self, *words: str, **environ: str) -> SimpleNamespace:
        return self._commands.alone(*words, **environ)


@pytest.fixture
def shell(clean_environ: Callable[..., dict[str, str]], tmp_path: Path) -> Shell:
    environ = clean_environ(tmp_path)
    for name in ("COLUMNS", "XDG_CONFIG_HOME"):
        environ.pop(name, None)
    return Shell(environ, tmp_path)


@pytest.fixture
def kvpool(shell: Shell, gate: Gate) -> Shell:
    """With the token of each of the gateway's principals, by its name."""
    for name, token in gate.tokens.items():
        tenant = next((each for each in ("red", "blue") if name.startswith(each)), "")
        shell.add(name, f"http://127.0.0.1:{gate.port}", token, tenant=tenant)
    return shell


def steady(value: Any) -> Any:
    """Without what changes from one look to the next: fractions, such as times and rates."""
    if isinstance(value, dict):
        return {name: steady(each) for name, each in value.items()}
    if isinstance(value, list):
        return [steady(each) for each in value]
    return 0 if isinstance(value, float) else value


# ---- the same answers as on the spot -------------------------------------------------------------


def test_looking_from_elsewhere_shows_what_the_node_shows(kvpool, two, seat_of, numbers, until):
    a, g = seat_of("a"), seat_of("g")
    some = numbers(6)
    a.put(some)
    g.put(some[:2])
    g.client.sessions.turn(g.ns, "conversation-9", keys_of(some[:2]))
    until(lambda: g.holders(some[3]) == {"a"})
    keys = hexes(some)
    socket = two.node("g").socket
    looks = (
        ("nodes",),
        ("namespaces",),
        ("status", "--node", "a"),
        ("status", "--all"),
        ("blocks", "list", DIGEST[:6], "--node", "a"),
        ("blocks", "lookup", DIGEST[:6], *keys),
        ("blocks", "locate", *keys[:3]),
        ("config", "show"),
        ("job", "list"),
        ("sessions", "list"),
        ("sessions", "show", "conversation-9"),
        ("plan", "memory"),
        ("events", "--limit", "5"),
    )
    for words in looks:

        def same(words=words) -> bool:
            here = kvpool.alone(*words, "--socket", socket, "--json")
            there = kvpool("root", *words, "--json")
            assert (here.status, here.err) == (there.status, there.err) == (0, ""), (words, there)
            return steady(json.loads(here.out)) == steady(json.loads(there.out))

        until(same, f"both say the same of {words}")
    done = kvpool("root", "status")
    assert (done.status, done.err) == (0, ""), done
    assert done.out.startswith("node g ")
    assert kvpool("root", "status", "--quiet").status == 0
    assert {each["node"] for each in kvpool.json("eye", "top", "--once")["nodes"]} == {"a", "g"}
    assert kvpool("root", "receipts", "--format", "json").status == 0
    done = kvpool("root", "blocks", "lookup", DIGEST[:6], "ff" * 16)
    assert done.status == 1


def test_changes_from_elsewhere_are_made_there(kvpool, seat_of, numbers, until):
    a, g = seat_of("a"), seat_of("g")
    some = numbers(8)
    keys = hexes(some)
    a.put(some)
    until(lambda: g.holders(some[0]) == {"a"})
    done = kvpool("op", "job", "start", "warm", DIGEST[:6], *keys[:4])
    assert done.status == 0, done
    assert "4 blocks brought" in done.out
    done = kvpool("op", "pin", keys[0])
    assert (done.status, done.err) == (0, ""), done
    assert kvpool("op", "unpin", keys[0]).status == 0
    found = kvpool.json("op", "job", "start", "evict", *keys[:4], "--node", "g")
    job = found["job"]
    assert job in kvpool("eye", "job", "list").out
    assert kvpool("op", "job", "stop", job).out == f"job {job} is not running: it has ended\n"
    assert (
        kvpool(
            "op", "job", "start", "warm", DIGEST[:6], "--from", "a", "--move", "--node", "g"
        ).status
        == 0
    )
    until(lambda: a.holders(some[5]) == {"g"})
    done = kvpool("op", "intend", "keep", *keys[4:], "--namespace", DIGEST, "--for", "15m")
    assert (done.status, done.err) == (0, ""), done
    assert kvpool("op", "job", "start", "scrub").status == 0
    done = kvpool("root", "config", "set", "ssd_flush_s=7", "--node", "g")
    assert (done.status, done.err) == (0, ""), done
    assert kvpool("root", "configure", DIGEST[:6], "--ttl", "12h").status == 0
    done = kvpool("root", "clear", DIGEST[:6])
    assert done.status == 2  # there is no terminal
    assert re.match(r"kvpool: At http://127\.0\.0\.1:\d+: ", done.err)
    assert kvpool("root", "clear", DIGEST[:6], "--yes").status == 0
    until(lambda: g.holders(some[5]) == set())
    by = [each["details"].get("by") for each in kvpool.json("root", "events", "--kind", "change")]
    assert any("root" in (each or "") for each in by)


def test_a_node_is_drained_and_comes_back(kvpool, until):
    done = kvpool("op", "drain", "a")
    assert done.status == 0
    assert "a is drained" in done.out + done.err
    until(lambda: {"a"} - {each["node"] for each in kvpool.json("op", "nodes")["nodes"]})
    done = kvpool("op", "drain", "a", "--cancel")
    assert (done.status, done.err) == (0, ""), done
    until(lambda: {"a"} & {each["node"] for each in kvpool.json("op", "nodes")["nodes"]})


# ---- what a token may do -------------------------------------------------------------------------

CHANGES = {
    "operator": (
        ("pin", "ff" * 16),
        ("job", "start", "evict", "ff" * 16, "--yes"),
        ("intend", "keep", "ff" * 16, "--namespace", DIGEST),
        ("sessions", "end", "nobody"),
        ("drain", "a", "--no-wait"),
        (
            "job",
            "start",
            "scrub",
        ),
    ),
    "admin": (
        ("clear", DIGEST, "--yes"),
        ("configure", DIGEST, "--replicas", "2"),
        ("config", "set", "ssd_flush_s=7"),
    ),
}


@pytest.mark.parametrize(
    ("name", "role", "wanted"), [("eye", "viewer", "operator"), ("op", "operator", "admin")]
)
def test_a_role_that_is_too_small(kvpool, name, role, wanted):
    for words in CHANGES[wanted]:
        done = kvpool(name, *words)
        assert (done.status, done.out) == (4, ""), (words, done)
        assert f"requires the role {wanted}" in done.err, done
        assert f"has the role {role}" in done.err


def test_a_limited_token_sees_and_changes_its_own_tenant_only(kvpool, seat_of, numbers, until):
    red, blue = seat_of("g", "red"), seat_of("g", "blue")
    red.put(numbers(3))
    blue.put(some := numbers(2))
    job = kvpool.json("blue", "job", "start", "evict", *hexes(some[:1]), "--node", "g")["job"]

    def others(*words: str) -> set[str]:
        """The tenants that stand in an answer."""
        return set(re.findall(r'"(red|blue|default)"', kvpool("redeye", *words, "--json").out))

    until(lambda: "red" in others("namespaces"))
    for words in (("namespaces",), ("status",), ("nodes",), ("job", "list"), ("events",)):
        assert others(*words) <= {"red"}, words
    assert set(kvpool.json("redeye", "status")["tenants"]) == {"red"}
    assert kvpool("redeye", "config", "show").status == 4
    # As for a tenant that is not there: who others are is not this token's to know.
    for change in (("blocks", "lookup", DIGEST, "ff" * 16), ("clear", DIGEST, "--yes")):
        done = kvpool("red", *change, "--tenant", "blue")
        assert (done.status, done.out) == (1, ""), (change, done)
        assert "there is no tenant 'blue'" in done.err
    for wider in (
        ("drain", "a", "--no-wait"),
        (
            "job",
            "start",
            "scrub",
        ),
        ("config", "set", "ssd_flush_s=7"),
    ):
        done = kvpool("red", *wider)
        assert (done.status, done.out) == (4, ""), (wider, done)
    assert job in kvpool("blue", "job", "list").out
    assert job not in kvpool("redop", "job", "list").out
    done = kvpool("redop", "job", "stop", job)
    assert (done.status, done.out) == (1, "")
    assert blue.holders(some[1]) == {"g"}


# ---- what goes wrong -----------------------------------------------------------------------------


def test_a_token_that_is_not_known(shell, gate):
    shell.add("wrong", f"http://127.0.0.1:{gate.port}", "t" * 40)
    done = shell("wrong", "nodes")
    assert (done.status, done.out) == (4, "")
    assert "does not know this token" in done.err


def test_nobody_at_the_address(shell):
    shell.add("gone", f"http://127.0.0.1:{free_port()}", "t" * 40)
    done = shell("gone", "status")
    assert (done.status, done.out) == (3, "")
    assert done.err.startswith("kvpool: no gateway answers at http://127")


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """A server that answers POST and GET as told; its URL."""
    begun = []

    def begin(post: tuple[int, str, bytes], get: tuple[int, str, bytes]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self, said: tuple[int, str, bytes]) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, media, body = said
                self.send_response(status)
                self.send_header("Content-Type", media)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.answer(post)

            def do_GET(self) -> None:
                self.answer(get)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        begun.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield begin
    for server, thread in begun:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_is_no_gateway(shell, serve):
    page = (200, "text/html", b"<html>hello</html>")
    shell.add("page", serve(page, page), "t" * 40)
    done = shell("page", "nodes")
    assert (done.status, done.out) == (1, "")
    assert "is not a kvpool gateway" in done.err


def test_a_gateway_that_is_older(shell, serve):
    problem = {"detail": "there is nothing here", "code": "not_found"}
    post = (404, "application/problem+json", json.dumps(problem).encode())
    described = (200, "application/json", b'{"paths": {"/v1/nodes": {}}}')
    shell.add("old", serve(post, described), "t" * 40)
    done = shell("old", "nodes")
    assert (done.status, done.out) == (1, "")
    assert "is of another version than this command" in done.err


def test_an_authority_is_named_or_not_trusted(shell, start, tmp_path, until):
    pki = Pki(tmp_path / "pki")
    files = pki.files("n")
    tokens, port = tmp_path / "tokens.toml", free_port()
    token = add_token(tokens, "ci", "viewer", [])
    start(
        *("--http", f"0.0.0.0:{port}", "--http-tokens", str(tokens)),
        *("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca),
        KVPOOL_CLUSTER="test",
        KVPOOL_NODE="n",
    )
    shell.add("right", f"https://localhost:{port}", token, ca=str(pki.ca))
    shell.add("unknown", f"https://localhost:{port}", token)
    shell.add("other", f"https://localhost:{port}", token, ca=str(Pki(tmp_path / "other").ca))
    until(lambda: shell("right", "status", "--quiet").status == 0)
    for name in ("unknown", "other"):
        done = shell(name, "status")
        assert (done.status, done.out) == (4, "")
        assert "the certificate of https://" in done.err and "SSL_CERT_FILE" in done.err


# ---- which one -----------------------------------------------------------------------------------


def test_a_socket_and_commands_of_this_machine(kvpool, two):
    assert kvpool("eye", "nodes", "--socket", two.node("a").socket).status == 0
    assert kvpool.alone("nodes").status == 3
    for words in (("rm", "x"), ("ls",)):
        done = kvpool("eye", *words)
        assert (done.status, done.out) == (1, "")
        assert done.err.startswith(f"kvpool: {words[0]} works with this machine's daemon only")
    done = kvpool.alone("nodes", KVPOOL_GATEWAY="http://127.0.0.1:1")
    assert done.status == 1 and "KVPOOL_GATEWAY_TOKEN" in done.err
    done = kvpool("eye", "nodes", KVPOOL_GATEWAY="http://10.0.0.1:7071")
    assert done.status == 1 and "in clear" in done.err
