"""Who may do what: tokens, roles, tenants, hosts, sockets; and what is refused at the start."""

import json
import os
import re
import select
import socket
import subprocess
import sys

import pytest

from kvpool.admin.tokens import add_token
from kvpool.secret_files import write_whole
from tests.integration.admin.conftest import Gate, gateway_pid, open_gate
from tests.integration.cluster.conftest import PLAIN, key
from tests.support.servers.etcd import free_port

DIGEST = PLAIN.digest().hex()
ROLES = ("viewer", "operator", "admin")
OPEN = {("get", "/healthz"), ("get", "/readyz")}
NAMED = {
    "{node}": "a",
    "{digest}": DIGEST,
    "{key}": "0" * 32,
    "{job}": "nobody",
    "{name}": "nobody",
    "{id}": "nobody",
    "{session}": "nobody",
}


def routes(gate):
    """(method, path, role, whole) of all that is described."""
    for path, methods in gate.get("/openapi.json")["paths"].items():
        for method, about in methods.items():
            role = re.search(
                r"Takes (?:role (\w+)|no token)(, a token for all)?", about["description"]
            )
            yield method, path, role[1], bool(role[2])


def filled(path):
    for name, value in NAMED.items():
        path = path.replace(name, value)
    return path


def test_no_token_no_answer(gate):
    """Every route but two; so also with a token that nobody has."""
    seen = 0
    for method, path, _, _ in routes(gate):
        answer = gate.stranger().ask(method.upper(), filled(path))
        if (method, path) in OPEN:
            assert answer.status == 200
        else:
            assert (answer.status, answer.code) == (401, "not_authenticated"), (method, path)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            seen += 1
    assert seen > 30


def test_wrong_tokens_are_asked_to_wait_and_right_ones_are_not(start_cluster, tmp_path):
    gate = open_gate(start_cluster(nodes=1), tmp_path, KVPOOL_HTTP_RATE="5")  # a wrong one a minute
    stranger = gate.stranger("not the token")
    root, op = (
        Gate(gate.port, gate.tokens[name], source=stranger.source) for name in ("root", "op")
    )
    assert root.get("/v1/me")["name"] == "root"
    codes = [stranger.ask("GET", "/v1/me").status for _ in range(30)]
    assert codes[0] == 401 and codes[-1] == 429 and set(codes) == {401, 429}
    assert "retry-after" in stranger.ask("GET", "/v1/me").headers
    assert root.get("/v1/me")["name"] == "root", "it was right from here before"
    assert op.ask("GET", "/v1/me").status == 429, "it might be a guess"
    assert gate.of("op").ask("GET", "/v1/me").status == 200, "from elsewhere it is none"
    assert stranger.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize("name", ["eye", "op"])
def test_roles(gate, name):
    """What takes more than the token's role is refused, before anything is looked at."""
    mine = {"eye": "viewer", "op": "operator"}[name]
    seen = set()
    for method, path, role, _ in routes(gate):
        if role is None or path == "/v1/events":
            continue
        answer = gate.of(name).ask(method.upper(), filled(path))
        allowed = ROLES.index(role) <= ROLES.index(mine)
        assert (answer.status == 403) is not allowed, (method, path, answer)
        seen.add(role)
    assert seen == set(ROLES)


def test_a_tenants_token_does_not_reach_what_is_nobodys(gate):
    seen = 0
    for method, path, _, whole in routes(gate):
        if whole:
            assert gate.of("red").ask(method.upper(), filled(path)).status == 403, path
            seen += 1
    assert seen >= 8


@pytest.fixture
def blues(seat_of, numbers):
    """Blocks of blue's at node a, in a namespace that red has open too, by the same name."""
    blue, red = seat_of("a", "blue"), seat_of("a", "red")
    some = numbers(10)
    blue.put(some)
    mine = numbers(4)
    red.put(mine)
    return blue, some, red, mine


def hexed(numbers):
    return [key(number).hex() for number in numbers]


@pytest.mark.parametrize("named", ["?tenant=blue", "?tenant=default", "?tenant=nobodys"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/v1/namespaces/{DIGEST}", None),
        ("GET", f"/v1/namespaces/{DIGEST}/blocks", None),
        ("PATCH", f"/v1/namespaces/{DIGEST}", {"ttl_s": 1}),
        ("POST", f"/v1/namespaces/{DIGEST}/clear", {}),
        ("POST", "/v1/blocks", {"namespace": DIGEST, "keys": ["{key}"]}),
        ("POST", "/v1/operator/prefixes", {"namespace": DIGEST, "keys": ["{key}"], "wait_s": 1}),
        ("POST", "/v1/why", {"namespace": DIGEST, "keys": ["{key}"]}),
        ("GET", "/v1/memory", None),
        ("POST", "/v1/pins", {"namespace": DIGEST, "keys": ["{key}"], "kind": "hard"}),
        ("POST", "/v1/jobs", {"spec": {"kind": "evict", "everything": True}}),
        ("POST", "/v1/jobs", {"spec": {"kind": "evict", "keys": ["{key}"]}}),
        ("POST", "/v1/jobs", {"spec": {"kind": "warm", "namespace": DIGEST, "source": "a"}}),
        ("GET", "/v1/namespaces", None),
        ("GET", "/v1/tenants", None),
        ("GET", "/v1/jobs", None),
        ("GET", "/v1/engines", None),
    ],
)
def test_another_tenant_is_as_if_there_were_none(gate, blues, method, path, body, named):
    """The answer is the same for a tenant that exists and for one that does not."""
    blue, some, _, _ = blues
    one = hexed(some)[0]
    path = path.replace("{key}", one)
    body = body and json.loads(json.dumps(body).replace("{key}", one))
    answer = gate.of("red").ask(method, path + named, body)
    assert (answer.status, answer.code) == (404, "not_found")
    tenant = named.partition("=")[2]
    assert answer.json["detail"] == f"there is no tenant '{tenant}'"
    assert blue.here(some) == 10
    assert "blue" not in answer.body.decode().replace("'blue'", "")


def test_another_tenants_blocks_are_not_guessed(gate, blues, until):
    """With the same namespace and the right keys, in one's own name."""
    blue, some, red, mine = blues
    eye = gate.of("redeye")
    until(lambda: eye.ask("GET", f"/v1/namespaces/{DIGEST}?tenant=red").status == 200)
    body = {"namespace": DIGEST, "keys": hexed(some)}
    assert not any(eye.change("POST", "/v1/blocks", body)["nodes"].values())
    assert eye.change("POST", "/v1/operator/locate?node=a", body) == []
    assert eye.change("POST", "/v1/operator/prefixes", {**body, "wait_s": 1}) == {}
    why = eye.change("POST", "/v1/why", body)["nodes"]
    assert [each["missing"]["reason"] for each in why.values()] == ["never_stored"] * len(why)
    listed = eye.every(f"/v1/namespaces/{DIGEST}/blocks")
    assert {each["key"] for each in listed}.isdisjoint(hexed(some))
    assert set(hexed(mine)) <= {each["key"] for each in listed}
    op = gate.of("redop")
    pins = op.change("POST", "/v1/pins", {**body, "kind": "hard"})
    assert set(pins["nodes"].values()) == {0}
    for spec in ({"kind": "evict", "keys": hexed(some)}, {"kind": "evict", "least_bytes": 1 << 30}):
        job = op.change("POST", "/v1/jobs", {"spec": spec})["job"]
        until(lambda job=job: op.get(f"/v1/jobs/{job}")["state"] == "done")
    assert blue.here(some) == 10
    assert red.here(mine) == 0, "these are one's own"


def test_lists_show_a_tenant_its_own(gate, blues, until):
    red = gate.of("redeye")
    until(lambda: red.get("/v1/namespaces")["items"])
    assert {each["tenant"] for each in red.get("/v1/namespaces")["items"]} == {"red"}
    assert [each["tenant"] for each in red.get("/v1/tenants")["items"]] == ["red"]
    one = red.get("/v1/nodes/a")
    assert set(one["sections"]) == {"tenants"}
    assert all(set(section) == {"red"} for section in one["sections"].values())
    assert one["node"]["tiers"] == [] and red.get("/v1/cluster")["tiers"] == []
    body = {"spec": {"kind": "evict", "keys": ["0" * 32]}}
    theirs = gate.of("blue").change("POST", "/v1/jobs", body)["job"]
    assert gate.get(f"/v1/jobs/{theirs}")["tenant"] == "blue"
    for method in ("GET", "DELETE"):
        assert gate.of("red").ask(method, f"/v1/jobs/{theirs}").code == "not_found"
    assert theirs not in {each["job"] for each in red.every("/v1/jobs")}
    assert gate.of("redop").patient("POST", "/v1/jobs", {"spec": {"kind": "scrub"}}).status == 403
    audit = gate.of("red").get("/v1/audit")["items"]
    assert {each["details"]["tenant"] for each in audit} <= {"red"}


def test_who_has_changed_something_is_told(gate, two, numbers, until):
    gate.of("redop").change("POST", "/v1/pins?tenant=red", {"keys": ["1" * 32], "kind": "soft"})

    def told():
        return [
            each
            for each in gate.get("/v1/audit?limit=1000")["items"]
            if each["details"].get("by", "").startswith("token redop")
        ]

    found = until(lambda: [each for each in told() if each["details"]["what"] == "pin"])
    assert found[0]["details"]["tenant"] == "red"
    spec = {"kind": "evict", "keys": ["1" * 32, "2" * 32], "tiers": ["dram"]}
    body = {"spec": spec, "nodes": ["a"]}
    dry = gate.of("redop").change("POST", "/v1/jobs?tenant=red", {**body, "dry_run": True})["job"]
    job = gate.of("redop").change("POST", "/v1/jobs?tenant=red", body)["job"]
    began = until(lambda: [each for each in told() if each["details"].get("job") == job])
    assert [(each["node"], each["details"]["what"]) for each in began] == [("a", "evict")]
    assert dry not in {each["details"].get("job") for each in told()}, "it changes nothing"
    kept = {name: began[0]["details"][name] for name in ("tenant", "job", "keys", "tiers")}
    assert kept == {"tenant": "red", "job": job, "keys": 2, "tiers": ["dram"]}
    assert gate.of("op").ask("GET", "/v1/audit").status == 403
    pages = gate.every("/v1/audit", limit=2)
    names = [(each["node"], each["number"]) for each in pages]
    assert len(set(names)) == len(names)
    assert [each["at_s"] for each in pages] == sorted(
        (each["at_s"] for each in pages), reverse=True
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:80"}, 421),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:7071"}, 200),
        ({"Host": "a b"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1", "Host": "localhost:1"}, 200),
    ],
)
def test_pages_of_other_sites(gate, headers, status):
    for path in ("/v1/me", "/healthz"):
        assert gate.ask("GET", path, **headers).status == status


@pytest.mark.parametrize(
    "value", ["Basic x", "Bearer", "Bearer ", "x" * 2000, "Bearer \xff\xfe", "Bearer a b c"]
)
def test_what_is_no_token(gate, value):
    assert gate.stranger().ask("GET", "/v1/me", Authorization=value).status == 401


def test_a_rate_for_each_token(start_cluster, tmp_path):
    world = start_cluster(nodes=1)
    gate = open_gate(world, tmp_path, KVPOOL_HTTP_RATE="0.5")
    answers = [gate.of("eye").ask("GET", "/v1/me") for _ in range(20)]
    assert answers[0].status == 200
    refused = [answer for answer in answers if answer.status == 429]
    assert refused[0].code == "limit" and int(refused[0].headers["retry-after"]) >= 1
    assert gate.of("op").ask("GET", "/v1/me").status == 200


def test_new_tokens_and_old_ones(start_cluster, tmp_path, until):
    world = start_cluster(nodes=1)
    gate = open_gate(world, tmp_path)
    (file,) = tmp_path.glob("tokens-*.toml")
    fresh = add_token(file, "late", "viewer", [])
    until(lambda: gate.of(fresh).ask("GET", "/v1/me").status == 200)
    good = file.read_text()
    file.write_text("[[token]\n")
    file.write_text("not toml [[")

    def refused():
        assert gate.get("/v1/me")["name"] == "root"
        return "the tokens stay as they were" in world.node("g").said

    until(refused)
    write_whole(file, good.partition("\n\n")[2].encode())  # without root
    until(lambda: gate.stranger(gate.token).ask("GET", "/v1/me").status == 401)
    assert gate.of("op").get("/v1/me")["role"] == "operator"


def test_without_tokens_the_daemon_makes_one(start, until):
    port = free_port()
    daemon = start("--http", f"127.0.0.1:{port}")
    path = daemon.folder / "http.token"
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text().strip()
    gate = Gate(port, token).wait()
    assert gate.get("/v1/me") == {"name": "local", "role": "admin", "tenants": ["*"]}
    said = daemon.process.stdout.readline().decode()
    assert str(path) in said and token not in said
    assert daemon.stop() == 0
    again = start("--http", f"127.0.0.1:{port}")
    assert path.read_text().strip() == token
    Gate(port, token).wait()
    assert again.stop() == 0
    path.chmod(0o644)
    refused = start("--http", f"127.0.0.1:{port}", ready=False)
    assert refused.wait_end() == 1
    assert "delete it" in refused.stderr


def test_a_unix_socket_knows_its_user(start, folder):
    path = folder / "http.sock"
    daemon = start("--http", f"unix:{path}")
    gate = Gate(0, unix=str(path)).wait()
    assert gate.get("/v1/me") == {"name": "local", "role": "admin", "tenants": ["*"]}
    assert gate.of("a wrong token").ask("GET", "/v1/me").status == 401
    assert path.stat().st_mode & 0o777 == 0o600
    daemon.kill()
    daemon = start("--http", f"unix:{path}")
    Gate(0, unix=str(path)).wait()
    assert daemon.stop() == 0
    assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_unix_socket_and_another_user(start, folder):
    path = folder / "http.sock"
    start("--http", f"unix:{path}", "--socket-mode", "666")
    Gate(0, unix=str(path)).wait()
    folder.chmod(0o755)
    code = f"""
import os, socket
os.setuid(12345)
s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})
s.sendall(b"GET /v1/me HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
print(s.recv(1000).split(b"\\r\\n")[0].decode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "401" in done.stdout


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "kvpool token NAME"),
        ({"KVPOOL_HTTP_TOKENS": "{tokens}"}, "kvpool certs init"),
        ({"KVPOOL_PLAINTEXT": "true"}, "kvpool token NAME"),
        ({"KVPOOL_HTTP_TOKENS": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_off_loopback_not_without_tokens_and_tls(start, tmp_path, settings, text):
    file = tmp_path / "tokens.toml"
    add_token(file, "ci", "admin", [])
    environ = {name: value.replace("{tokens}", str(file)) for name, value in settings.items()}
    for address in ("0.0.0.0:0", "[::]:0", "10.1.2.3:7071", "example.org:80"):
        daemon = start("--http", address, ready=False, name=f"n-{address[:3]}", **environ)
        assert daemon.wait_end() == 1
        assert text in daemon.stderr and daemon.stderr.count("\n") == 1


def test_off_loopback_with_tokens_in_a_network_that_is_trusted(start, tmp_path):
    file, port = tmp_path / "tokens.toml", free_port()
    token = add_token(file, "ci", "admin", [])
    start("--http", f"0.0.0.0:{port}", "--http-tokens", str(file), "--plaintext")
    gate = Gate(port, token).wait()
    # It may be called by any name, but not by another site's page.
    assert gate.ask("GET", "/v1/me", Host="pool.example").status == 421, "this came over loopback"
    assert gate.ask("GET", "/v1/me", Origin="http://x").status == 403


def test_a_token_of_the_command_line(tmp_path):
    file = tmp_path / "tokens.toml"

    def token(*args):
        return subprocess.run(
            [sys.executable, "-m", "kvpool.cli", "token", *args, "--file", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )

    made = token("ci", "--role", "operator", "--tenant", "red", "--tenant", "blue")
    assert made.returncode == 0, made.stderr
    assert len(made.stdout.strip()) >= 40 and made.stdout.strip() not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert 'tenants = ["red", "blue"]' in file.read_text()
    assert token("other").returncode == 0
    assert "already" in token("ci").stderr
    assert "already" in token("local").stderr, "the daemon's own has this name"
    assert "must be one of viewer, operator, admin" in token("x", "--role", "king").stderr
    assert "name" in token("a b").stderr
    file.chmod(0o644)
    assert "chmod 600" in token("x").stderr
    assert file.read_text().count("[[token]]") == 2


def test_no_secret_is_in_sight(start_cluster, tmp_path):
    """Neither in arguments, nor in the environment of the gateway beyond what its daemon's has, nor in logs."""
    world = start_cluster(nodes=1)
    gate = open_gate(
        world,
        tmp_path,
        KVPOOL_OPERATOR_TOKEN="an operator's secret token",
        KVPOOL_ROUTER_TOKEN="a router's secret token",
    )
    gate.get("/v1/nodes")
    gate.of("a guess of mine").ask("GET", "/v1/me")
    shown = json.dumps(gate.get("/v1/config"))
    pid = gateway_pid(world.node("g"))
    assert pid
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        arguments = file.read().decode()
    secrets = ["an operator's secret token", "a router's secret token", "a guess of mine"]
    secrets += gate.tokens.values()
    for text in (arguments, world.node("g").said, shown, json.dumps(gate.get("/v1/nodes/g"))):
        assert not any(secret in text for secret in secrets)


def test_an_address_is_printed_once_it_answers(start, until):
    """One that another process has is not: the daemon serves, and says what is wrong."""
    port = free_port()  # nobody else's when it is given up
    address = f"127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)):
        daemon = start("--http", address)
        assert "HTTP" not in daemon.ready
        until(lambda: f"cannot listen on {address}" in daemon.stderr)
        assert not select.select([daemon.process.stdout], [], [], 0)[0]
    line = daemon.process.stdout.readline().decode()
    assert line.startswith(f"HTTP gateway at http://{address}, dashboard at /ui/, token in ")
