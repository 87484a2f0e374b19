"""The commands: what they print, what they return, and that errors are one line."""

import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from kvpool import __version__, cli
from kvpool.cli import base, verbs
from kvpool.client import OperatorClient
from kvpool.config import SETTINGS, DaemonConfig, DeviceConfig, DiskConfig, settings_of
from kvpool.daemon.server.server import Started
from kvpool.errors import (
    ClusterUnavailable,
    ConfigError,
    InvalidRequest,
    KvpoolError,
    NotAuthenticated,
    Unavailable,
)
from kvpool.telemetry.node_stats import decode
from tests.support.imports import modules_after
from tests.support.stats import node_stats
from tests.unit.cli.answers import CLUSTER, DIGEST, FOUND, LEFT, STATS, draining, node


def test_version():
    for words in (["version"], ["--version"]):
        assert CliRunner().invoke(verbs.app, words).output == f"{__version__}\n"


COMMANDS = (
    "serve",
    "status",
    "doctor",
    "nodes",
    "blocks locate",
    "drain",
    "namespaces",
    "clear",
    "configure",
    "top",
    "events",
    "blocks lookup",
    "blocks list",
    "pin",
    "unpin",
    "job start evict",
    "job start warm",
    "job start scrub",
    "put",
    "get",
    "ls",
    "rm",
)


def test_a_command_is_in_a_module_of_its_own() -> None:
    found = [(each.name, each.callback) for each in verbs.app.registered_commands]
    for group in verbs.app.registered_groups:
        assert group.typer_instance is not None
        name = group.name or group.typer_instance.info.name
        found.append((name, group.typer_instance.registered_commands[0].callback))
    names = {
        (name or callback.__name__, callback.__module__) for name, callback in found if callback
    }
    assert names == {
        (command, f"kvpool.cli.{cli.MODULES.get(command, command)}") for command in cli.COMMANDS
    }


def test_help_names_the_commands():
    text = CliRunner().invoke(verbs.app, ["--help"]).output
    for command in (*COMMANDS, "version"):
        assert f" {command.split()[0]} " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command):
    words = [*command.split(), "--help"]
    text = CliRunner().invoke(verbs.app, words, env={"COLUMNS": "100"}).output
    assert f" kvpool {command}" in text
    assert "Options" in text


def test_secrets_are_no_options():
    """Every user of a machine sees the arguments of its processes."""
    for command in COMMANDS:
        words = [*command.split(), "--help"]
        text = CliRunner().invoke(verbs.app, words, env={"COLUMNS": "200"}).output
        flags = {word for word in text.split() if word.startswith("--")}
        assert "--socket" in flags
        # The path of a file, which holds digests; and whether passwords may be sent, not which.
        others = {"--http-tokens", "--plaintext-passwords", "--no-plaintext-passwords"}
        assert not {flag for flag in flags - others if "password" in flag or "token" in flag}
        assert "--cluster-secret" not in flags


@pytest.fixture
def served(monkeypatch):
    """The configurations of daemons, which are ready at once and end."""
    seen = []

    def serve(config, ready, *_):
        seen.append(config)
        ready(Started(config, 32 << 20, ["tcp://a:1", "tcp://b:2"], "a" * 16, 1))

    monkeypatch.setattr("kvpool.daemon.server.server.serve", serve)
    return seen


@pytest.mark.parametrize(
    "url", ["redis://user:hush@host", "redis://:hush@host:1/2", "rediss+cluster://u:hush@a:1,b:2"]
)
def test_a_password_on_the_command_line_is_refused(served, url):
    result = CliRunner().invoke(verbs.app, ["serve", "--directory", url])
    assert isinstance(result.exception, ConfigError)
    assert "KVPOOL_DIRECTORY_PASSWORD" in str(result.exception)
    assert "hush" not in str(result.exception)
    assert not served


@pytest.mark.parametrize(
    "url", ["redis://host:6379/2", "redis://user@host", "redis+sentinel://a:1,b:2/main"]
)
def test_other_directories_are_taken_from_the_command_line(served, url):
    result = CliRunner().invoke(verbs.app, ["serve", "--directory", url])
    assert result.exit_code == 0, result.output
    assert [config.directory for config in served] == [url]


SERVE = ["serve", "--node", "n", "--socket", "/s"]


def test_the_first_line_of_a_daemon_ends_with_its_urls(served):
    result = CliRunner().invoke(verbs.app, SERVE)
    line = f"kvpool {__version__} ready: node n, 32 MiB of DRAM, socket /s"
    assert result.stdout == f"{line}, peers at tcp://a:1, tcp://b:2\n"


def test_the_second_line_of_a_daemon_is_its_cluster(served):
    joins = ["--cluster", "prod", "--join", "etcd://user@e:1", "--listen", "tcp://a:1"]
    secrets = {"KVPOOL_DIRECTORY": "redis://:hush@r", "KVPOOL_PLAINTEXT_PASSWORDS": "true"}
    result = CliRunner().invoke(verbs.app, SERVE + joins, env=secrets)
    first, second = result.stdout.splitlines()
    assert first.rsplit("peers at ", 1)[1] == "tcp://a:1, tcp://b:2"
    assert second == (
        f"joined cluster prod as incarnation {'a' * 16}, 1 other node to pull from, with a directory"
    )


@pytest.fixture
def daemon(monkeypatch):
    """A client of a daemon that knows CLUSTER and STATS; calls are checked against the real one's."""
    double = create_autospec(OperatorClient, instance=True)
    double.__enter__.return_value = double
    double.cluster.return_value = CLUSTER
    double.stats.return_value = node_stats(**STATS)
    double.clear.return_value = 3
    monkeypatch.setattr(base, "client_of", lambda socket, tenant: double)
    return double


def run(*words: str) -> SimpleNamespace:
    """A command of tenant red: its exit status, what it printed, and its error."""
    result = CliRunner().invoke(verbs.app, [*words, "--tenant", "red"])
    error = result.exception
    if error is not None and not isinstance(error, (SystemExit, KvpoolError)):
        raise error
    # As `kvpool.cli.main` prints it.
    said = f"kvpool: {error}\n" if isinstance(error, KvpoolError) else ""
    return SimpleNamespace(
        status=result.exit_code, out=result.stdout, err=result.stderr + said, error=error
    )


def test_nodes(daemon):
    done = run("nodes")
    assert (done.status, done.err) == (0, "")
    assert "* host-1" in done.out
    assert json.loads(run("nodes", "--json").out) == CLUSTER


def test_status_names_peers_where_it_may(daemon):
    named = CLUSTER | {"nodes": [node("host-8", "b")]}
    daemon.cluster.return_value = named
    assert "host-8" in run("status").out
    daemon.cluster.side_effect = NotAuthenticated("operators only")
    done = run("status")
    assert done.status == 0
    assert "b" * 16 in done.out
    assert decode(run("status", "--json").out.encode()) == node_stats(**STATS)


def test_quiet_status_says_with_its_exit_status_whether_the_daemon_answers(daemon):
    done = run("status", "--quiet")
    assert (done.status, done.out, done.err) == (0, "", "")
    daemon.stats.side_effect = Unavailable("the daemon does not answer")
    done = run("status", "-q")
    assert done.out == ""
    assert isinstance(done.error, Unavailable)
    assert base.exit_status(done.error) == 3


def test_locate(daemon):
    def answer(message, *, node):
        asked.append((node, message.keys, message.digest))
        return FOUND if bytes(16) in message.keys else []

    asked: list = []
    daemon.ask_node.side_effect = answer
    done = run("blocks", "locate", "00" * 16)
    assert (done.status, done.err) == (0, "")
    assert "host-2" in done.out
    assert asked == [("host-1", bytes(16), b"")]
    asked.clear()
    done = run("blocks", "locate", "00" * 16, "FF" * 16, "ff" * 16, "--namespace", "0123")
    assert done.status == 1
    assert done.err.startswith(f"kvpool: not found: {'ff' * 16} (")
    assert "host-2" in done.out
    digest = bytes.fromhex(DIGEST)
    assert asked == [
        ("host-1", bytes(16) + b"\xff" * 16, digest),
        ("host-2", b"\xff" * 16, digest),
    ]
    done = run("blocks", "locate", "00" * 16, "ff" * 16, "--json")
    assert done.status == 1
    assert json.loads(done.out) == msgspec.to_builtins(FOUND)


def test_locate_goes_on_where_a_namespace_is_not_open_or_nobody_answers(daemon):
    daemon.ask_node.side_effect = [InvalidRequest("it is not open here"), FOUND]
    done = run("blocks", "locate", "00" * 16, "--namespace", "0123")
    assert (done.status, done.err) == (0, "")
    assert "host-2" in done.out
    daemon.ask_node.side_effect = [ClusterUnavailable("it hangs"), FOUND]
    done = run("blocks", "locate", "00" * 16)
    assert (done.status, done.err) == (0, "kvpool: host-1: it hangs\n")
    daemon.ask_node.side_effect = [InvalidRequest("too many keys"), InvalidRequest("so many")]
    assert str(run("blocks", "locate", "00" * 16).error) == "too many keys"


def test_locate_refuses_what_is_no_key_before_it_asks(daemon):
    assert isinstance(run("blocks", "locate", "abcd").error, InvalidRequest)
    daemon.ask_node.assert_not_called()


def test_namespaces(daemon):
    done = run("namespaces")
    assert done.status == 0
    assert DIGEST[:12] in done.out
    (row,) = json.loads(run("namespaces", "--json").out)
    assert (row["digest"], row["epoch"], row["blocks"]) == (DIGEST, 2, 700)


def test_clear(daemon):
    done = run("clear", "0123", "--yes")
    assert done.status == 0
    assert f"namespace {DIGEST} of tenant red is in epoch 3" in done.out
    assert "continue in the new epoch" in done.out
    daemon.clear.assert_called_with(bytes.fromhex(DIGEST), fence=False)
    assert "until they open it again" in run("clear", "0123", "--fence", "-y").out
    daemon.clear.assert_called_with(bytes.fromhex(DIGEST), fence=True)
    assert isinstance(run("clear", "beef").error, InvalidRequest)
    assert daemon.clear.call_count == 2


NOTHING = dict.fromkeys(
    inspect.signature(OperatorClient.configure).parameters.keys() - {"self", "digest"}
)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("--replicas 2", {"replicas": 2}),
        ("--write through", {"write": "through"}),
        ("--write none", {"write": "none"}),
        ("--write default", {"write": ""}),
        ("--ttl 12h", {"ttl_s": 43_200.0}),
        ("--ttl 0", {"ttl_s": 0.0}),
        ("--ssd-codec blosc2", {"ssd_codec": "blosc2"}),
        ("--ssd-codec none", {"ssd_codec": ""}),
        ("--write-remote none", {"write_remote": "none"}),
        ("--quota dram=20%,ssd=1GiB", {"dram_quota": 0.2, "ssd_quota": 1 << 30}),
        ("--quota ssd=none", {"ssd_quota": 0}),
        ("--ttl 7d --replicas 1", {"ttl_s": 604_800.0, "replicas": 1}),
    ],
)
def test_configure(daemon, words, change):
    done = run("configure", "0123", *words.split())
    assert (done.status, done.err) == (0, "")
    assert f"changed the settings of namespace {DIGEST} of tenant red" in done.out
    assert ("in the background" in done.out) == ("--replicas 2" in words)
    daemon.configure.assert_called_once_with(bytes.fromhex(DIGEST), **NOTHING | change)


def test_configure_refuses_what_makes_no_sense_before_it_asks(daemon):
    for words, status in (
        ("--replicas 0", 2),
        ("--replicas many", 2),
        ("", 1),
        ("--ttl 5", 1),
        ("--ttl forever", 1),
        ("--quota 20%", 1),
    ):
        done = run("configure", "0123", *words.split())
        assert done.status == status, words
        assert status == 2 or isinstance(done.error, InvalidRequest)
    daemon.configure.assert_not_called()


@pytest.mark.parametrize(
    "words",
    [("clear", "0123", "-y"), ("configure", "0123", "--replicas", "2"), ("drain", "host-2")],
)
@pytest.mark.parametrize("kind", [Unavailable, ClusterUnavailable])
def test_a_change_without_an_answer_is_in_doubt(daemon, words, kind):
    for change in (daemon.clear, daemon.configure, daemon.drain):
        change.side_effect = kind("etcd did not answer")
    error = run(*words).error
    assert type(error) is kind
    assert str(error).startswith("etcd did not answer. The command may still have taken effect")


def test_drain_to_the_end(daemon):
    daemon.cluster.side_effect = [draining(phase="done"), LEFT]
    done = run("drain", "host-2")
    assert done.status == 0
    assert done.out.startswith("host-2 is drained and has left the cluster: 120 blocks")
    assert done.err.startswith("host-2: 450 of 1,000 blocks looked at")
    daemon.drain.assert_called_once_with("host-2")


def test_a_drain_that_leaves_blocks_behind(daemon):
    daemon.cluster.side_effect = [draining(phase="done", failed=3), LEFT]
    done = run("drain", "host-2")
    assert (done.status, done.out) == (1, "")
    assert "3 blocks that only it holds found no other place" in done.err.splitlines()[-1]


def test_a_drain_that_takes_too_long(daemon):
    daemon.cluster.return_value = draining()
    done = run("drain", "host-2", "--timeout", "0")
    assert done.status == 1
    assert "not drained after 0 s" in done.err


def test_a_drain_that_nobody_waits_for(daemon):
    done = run("drain", "host-2", "--no-wait")
    assert (done.status, done.err) == (0, "")
    daemon.drain.assert_called_once_with("host-2")
    daemon.cluster.assert_not_called()


def test_a_drain_is_called_off(daemon):
    daemon.cluster.return_value = draining()
    done = run("drain", "host-2", "--cancel")
    assert done.status == 0
    assert "host-2 is no longer drained" in done.out
    daemon.drain.assert_called_once_with("host-2", wanted=False)
    daemon.cluster.return_value = CLUSTER
    assert "nobody wanted host-2 drained" in run("drain", "host-2", "--cancel").out


def test_an_interrupted_wait_leaves_the_drain_going(daemon):
    daemon.cluster.side_effect = [draining(), KeyboardInterrupt]
    done = run("drain", "host-2")
    assert done.status == base.EXIT_INTERRUPTED
    assert "the drain of host-2 continues" in done.err.splitlines()[-1]
    daemon.drain.assert_called_once_with("host-2")


def test_who_asks_is_read_from_the_environment(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "kvpool.client.OperatorClient", lambda path, **given: seen.update(given, path=path)
    )
    monkeypatch.setenv("KVPOOL_TOKEN", "mine")
    monkeypatch.setenv("KVPOOL_OPERATOR_TOKEN", "ours")
    base.client_of("/s", "red")
    assert (seen["path"], seen["tenant"]) == ("/s", "red")
    assert (seen["token"], seen["operator_token"], seen["connect"]) == ("mine", "ours", True)
    monkeypatch.delenv("KVPOOL_TOKEN")
    monkeypatch.delenv("KVPOOL_OPERATOR_TOKEN")
    base.client_of(None, "red")
    assert (seen["token"], seen["operator_token"]) == (None, "")


def test_status_without_a_daemon(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "status", "--socket", str(tmp_path / "no.sock")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == base.EXIT_NO_DAEMON
    assert done.stdout == ""
    assert done.stderr.startswith("kvpool: no kvpool daemon answers at")
    assert "kvpool serve" in done.stderr
    assert done.stderr.count("\n") == 1


def test_serve_with_a_wrong_setting(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpool.cli",
            "serve",
            "--policy",
            "astrology",
            "--memory",
            "16MiB",
            "--socket",
            str(tmp_path / "s"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == base.EXIT_ERROR
    assert "astrology" in done.stderr
    assert done.stderr.startswith("kvpool: ")
    assert done.stderr.count("\n") == 1


def test_flags_are_settings(served, tmp_path):
    """Each flag of `serve` sets the setting of its name, and wins over the file."""
    file = tmp_path / "kvpool.toml"
    file.write_text('forward = true\nreplicas_max = 2\nlabels = { zone = "z" }\nclients_max = 3')
    pem = tmp_path / "pem"
    pem.touch(0o600)
    args = (
        f"serve --config {file} --socket /s --memory 1MiB --policy lru"
        " --listen tcp://a:1 --listen tcp://b:2"
        " --advertise tcp://x:1 --advertise tcp://y:2 --rail r0 --rail - --bind-source --pull-over tcp --probe-s 3 --peer tcp://c:3 --transfer-workers 2 --data-dir /d"
        " --node n --cluster k --join etcds://u@e:1 --join-ca /1 --join-cert /2 --join-key /3"
        " --directory rediss://r:1 --directory-ca /4 --directory-cert /5 --directory-key /6"
        " --label zone=a --label rack=7 --no-forward --member-ttl-s 9 --directory-timeout-s 0.25"
        " --replicas-max 4 --namespace-unused-days 9 --replication-bandwidth 1MiB --socket-mode 660 --peers-max 5 --lease-s-max 6 --departures-max 9"
        " --ssd /e=8MiB --ssd /f=1GiB --ssd-write none --ssd-bytes-per-day 1TiB --ssd-flush-s 3"
        " --ssd-drain-s 9 --memory-wait-s 4 --encryption-secret-file /e"
        " --audit-file /a --audit-file-bytes 1MiB --audit-files 2"
        " --object-store s3://b/p --object-bytes-max 1TiB --object-instance-credentials"
        " --no-events --engines-max 3 --device cuda:0=8GiB"
        f" --tls-cert {pem} --tls-key {pem} --tls-ca {pem} --tls-crl {pem} --plaintext --cluster-secret-file /s --operated-by m --operated-by n"
        " --operator-socket /o --plaintext-passwords --no-announce --receipts-bytes 9MiB"
        f" --http 127.0.0.1:7071 --http unix:/h --http-tokens {pem} --http-rate 7"
        f" --router http://r:1 --router-ca {pem} --otlp http://c:4318 --log-level error --log-format json -v"
    )
    result = CliRunner().invoke(verbs.app, args.split())
    assert result.exit_code == 0, result.output
    config = served[-1]
    assert (config.socket, config.memory, config.policy) == ("/s", 1 << 20, "lru")
    assert (config.operator_socket, config.plaintext_passwords) == ("/o", True)
    assert (config.announce, config.receipts_bytes) == (False, 9 << 20)
    assert config.listen == ("tcp://a:1", "tcp://b:2")
    assert config.advertise == ("tcp://x:1", "tcp://y:2")
    assert config.peers == ("tcp://c:3",)
    assert (config.rails, config.bind_source, config.probe_s) == (("r0", ""), True, 3)
    assert config.pull_over == "tcp"
    assert (config.transfer_workers, config.data_dir, config.node, config.cluster) == (
        2,
        "/d",
        "n",
        "k",
    )
    assert (config.join, config.directory) == ("etcds://u@e:1", "rediss://r:1")
    assert (config.join_ca, config.join_cert, config.join_key) == ("/1", "/2", "/3")
    assert (config.directory_ca, config.directory_cert, config.directory_key) == ("/4", "/5", "/6")
    assert config.labels == {"zone": "a", "rack": "7"}
    assert (config.forward, config.replicas_max, config.replication_bandwidth) == (
        False,
        4,
        1 << 20,
    )
    assert (config.member_ttl_s, config.directory_timeout_s, config.lease_s_max) == (9, 0.25, 6)
    assert config.departures_max == 9
    assert (config.socket_mode, config.clients_max, config.peers_max) == (0o660, 3, 5)
    assert config.ssd == (DiskConfig("/e", 8 << 20), DiskConfig("/f", 1 << 30))
    assert (config.ssd_write, config.ssd_bytes_per_day, config.ssd_flush_s) == ("none", 1 << 40, 3)
    assert (config.ssd_drain_s, config.namespace_unused_days) == (9, 9)
    assert (config.object_store, config.object_bytes_max) == ("s3://b/p", 1 << 40)
    assert config.object_instance_credentials is True
    assert (config.events, config.engines_max) == (False, 3)
    assert config.device == DeviceConfig("cuda:0", 8 << 30)
    assert {config.tls_cert, config.tls_key, config.tls_ca, config.tls_crl} == {str(pem)}
    assert (config.plaintext, config.http) == (True, ("127.0.0.1:7071", "unix:/h"))
    assert (config.http_tokens, config.http_rate) == (str(pem), 7)
    assert (config.cluster_secret_file, config.operated_by) == ("/s", ("m", "n"))
    assert (config.routers, config.otlp) == (("http://r:1",), "http://c:4318")
    assert config.router_ca == str(pem)
    assert (config.log_level, config.log_format) == ("error", "json"), "-v is less than a level"
    secrets = {"cluster_secret", "join_password", "directory_password", "operator_token"}
    secrets |= {"router_token"}
    assert config.encryption_secret_file == "/e"
    audit = (config.audit_file, config.audit_file_bytes, config.audit_files)
    assert audit == ("/a", 1 << 20, 2)
    given = {word[2:].replace("-", "_") for word in args.split() if word.startswith("--")}
    given -= {"config", "peer", "label", "rail", "router", "no_forward", "no_events", "no_announce"}
    given |= {"peers", "labels", "rails", "routers", "forward", "events", "announce"}
    others = {"tenants", "publish_events", "clients_max", "encryption_secret_command"}
    assert given | secrets | others == set(SETTINGS)
    words = ["serve", "--clients-max", "7", "--forward", "--encryption-secret-command", "print it"]
    result = CliRunner().invoke(verbs.app, words)
    assert result.exit_code == 0, result.output
    assert (served[-1].clients_max, served[-1].forward) == (7, True)
    assert served[-1].encryption_secret_command == "print it"
    assert served[-1].listen == ()
    lists = {"KVPOOL_LISTEN": "tcp://a:1", "KVPOOL_HTTP": "unix:/h", "KVPOOL_LABELS": "zone=a"}
    result = CliRunner().invoke(verbs.app, ["serve", "--node", "n"], env=lists)
    assert result.exit_code == 0, result.output
    assert (served[-1].listen, served[-1].http) == (("tcp://a:1",), ("unix:/h",))
    assert served[-1].labels == {"zone": "a"}, "what is not given does not hide the environment"


def test_errors_are_one_line_and_a_status(monkeypatch, capsys):
    def fail(prog_name):
        raise ConfigError("memory = 'x': give bytes")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "kvpool: memory = 'x': give bytes\n"


def test_the_entry_point(repo_root: Path):
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["kvpool"] == "kvpool.cli:main"


def test_the_client_imports_nothing_heavy():
    """An engine's process gets neither torch nor the daemon, an event loop or a terminal library."""
    loaded = modules_after("import kvpool.client")
    for heavy in (
        "torch",
        "vllm",
        "uvloop",
        "asyncio",
        "rich",
        "typer",
        "kvpool.daemon.server.server",
    ):
        assert heavy not in loaded, heavy
    assert not any(name.startswith(("kvpool.transfer", "kvpool.daemon")) for name in loaded)


def test_a_secret_is_created_once_and_rotated(tmp_path):
    file = tmp_path / "cluster.secret"
    created = CliRunner().invoke(verbs.app, ["secret", "create", str(file)])
    assert created.exit_code == 0, created.output
    assert "copy it to every node" in created.output
    first = file.read_text().strip()
    assert len(first) == 64 and first not in created.output
    assert file.stat().st_mode & 0o777 == 0o600
    again = CliRunner().invoke(verbs.app, ["secret", "create", str(file)])
    assert isinstance(again.exception, ConfigError) and "exists already" in str(again.exception)
    rotated = CliRunner().invoke(verbs.app, ["secret", "rotate", str(file), "--keep", "2h"])
    assert rotated.exit_code == 0, rotated.output
    assert "none needs a restart" in rotated.output
    new, old = file.read_text().splitlines()
    assert len(new) == 64 and new != first
    assert old.startswith(f"{first} until 20")
    assert new not in rotated.output and first not in rotated.output


def every_command(command, path=()):
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from every_command(one, (*path, name))


def test_help_is_whole_at_80_columns():
    for path, _ in every_command(typer.main.get_command(verbs.app)):
        done = CliRunner().invoke(verbs.app, [*path, "--help"], env={"COLUMNS": "80"})
        assert done.exit_code == 0, path
        assert "…" not in done.output and "...\n" not in done.output.partition("\n")[2], path
        assert max(map(len, done.output.splitlines())) <= 80, path
    serve = CliRunner().invoke(verbs.app, ["serve", "--help"], env={"COLUMNS": "80"}).output
    words = " ".join(serve.split())
    for name, each in settings_of(DaemonConfig).items():
        if each.option:
            assert f"{each.option} " in words, name
            assert each.is_switch or f"{each.option} {each.metavar} " in words, name
