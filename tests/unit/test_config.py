"""Settings: where they come from, which one wins, and what is said of wrong ones."""

import os
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.config import (
    SETTINGS,
    DaemonConfig,
    DeviceConfig,
    DiskConfig,
    StreamConfig,
    TenantConfig,
    default_socket_path,
    load,
    parse_size,
)
from kvpool.config.parse import LABELS_MAX, SOCKET_PATH_MAX
from kvpool.errors import ConfigError

SECRETS = (
    *("cluster_secret", "directory", "directory_password", "join_password", "operator_token"),
    "router_token",
)


def from_file(tmp_path, text: str, **flags) -> DaemonConfig:
    path = tmp_path / "kvpool.toml"
    path.write_text(text)
    path.chmod(0o600)
    return load(file=str(path), flags=flags, environ={})


def test_no_configuration_at_all():
    config = load(environ={})
    assert config.socket == default_socket_path({})
    assert config.memory == 0.1
    assert config.listen == config.peers == ()
    assert config.node
    assert config.all_tenants() == (TenantConfig("default", 0.1, announce=True),)


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"KVPOOL_SOCKET": "/a/b"}, "/a/b"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/kvpool/kvpool.sock"),
        ({"KVPOOL_SOCKET": "/a/b", "XDG_RUNTIME_DIR": "/x"}, "/a/b"),
    ],
)
def test_where_daemon_and_clients_meet(environ, path):
    assert default_socket_path(environ) == path
    assert load(environ=environ).socket == path


def test_where_they_meet_without_any_hint(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert default_socket_path({}) == "/run/kvpool/kvpool.sock"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert default_socket_path({}) == "/tmp/kvpool-1000/kvpool.sock"


def test_later_ones_win(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('node = "file"\nmemory = "1MiB"\ntransfer_workers = 2\n')
    environ = {"KVPOOL_CONFIG": str(path), "KVPOOL_MEMORY": "2MiB", "KVPOOL_TRANSFER_WORKERS": "3"}
    config = load(flags={"transfer_workers": 4, "policy": None}, environ=environ)
    assert (config.node, config.memory, config.transfer_workers) == ("file", 2 << 20, 4)
    other = tmp_path / "other.toml"
    other.write_text('node = "other"')
    assert load(file=str(other), environ=environ).node == "other"


@pytest.fixture
def tls_files(tmp_path):
    """A path for each of the settings that name files of TLS, of which nothing but that they are there is looked at."""
    paths = {}
    for name in ("tls_cert", "tls_key", "tls_ca", "tls_crl"):
        path = tmp_path / f"{name}.pem"
        path.touch(mode=0o600)
        paths[name] = str(path)
    return paths


def test_every_setting_can_come_from_the_file(tmp_path, tls_files):
    config = from_file(
        tmp_path,
        "".join(f'{name} = "{path}"\n' for name, path in tls_files.items())
        + f'http_tokens = "{tls_files["tls_key"]}"\n'
        + f'router_ca = "{tls_files["tls_ca"]}"\n'
        + """
plaintext = true
operator_socket = "/o"
plaintext_passwords = true
socket = "/s"
socket_mode = 0o660
memory = "40%"
policy = "lru"
listen = ["tcp://127.0.0.1:7070", "tcp://[::1]:7071"]
advertise = ["tcp://outside:1", "tcp://outside:2"]
rails = ["r0", "r1"]
bind_source = true
pull_over = "nixl"
probe_s = 2.5
peers = ["tcp://other:7070"]
cluster = "c"
cluster_secret = "hush hush hush hush"
operated_by = ["m", "n"]
join = "etcds://user@etcd:2379"
join_password = "jp"
join_ca = "/ca"
join_cert = "/cert"
join_key = "/key"
member_ttl_s = 8
directory = "rediss://redis:6379"
directory_password = "dp"
directory_ca = "/dca"
directory_cert = "/dcert"
directory_key = "/dkey"
directory_timeout_s = 0.25
labels = { zone = "a", rack = "7" }
replicas_max = 3
namespace_unused_days = 7
replication_bandwidth = "1MiB"
forward = false
operator_token = "ot ot ot ot ot ot"
announce = false
ssd = ["/e=8MiB", "/f=1GiB"]
ssd_write = "through"
ssd_bytes_per_day = "1TiB"
encryption_secret_file = "/encryption.secret"
audit_file = "/audit.log"
audit_file_bytes = "1MiB"
audit_files = 3
ssd_flush_s = 3
ssd_drain_s = 9
object_store = "file:///shared/kvpool"
object_bytes_max = "1TiB"
object_instance_credentials = true
device = "cuda:1=8GiB"
events = false
transfer_workers = 2
data_dir = "/d"
receipts_bytes = "9MiB"
node = "n"
clients_max = 5
memory_wait_s = 4
peers_max = 6
engines_max = 7
lease_s_max = 7
departures_max = 8
log_level = "debug"
log_format = "json"
otlp = "https://collector:4318/tenant/"
http = ["127.0.0.1:7071", "10.0.0.5:7071", "unix:/h"]
http_rate = 7
routers = ["http://r:8080/"]
router_token = "rt rt rt rt rt rt"
[tenants.red]
memory = 4096
token = "t t t t t t t t t"
announce = true
[tenants.default]
memory = "50%"
[publish_events.one]
model = "m"
endpoint = "ipc:///run/events"
[publish_events.two]
model = "m/n"
endpoint = "tcp://127.0.0.1:5557"
replay = "tcp://[::1]:5558"
topic = "kv@a@m"
tenant = "red"
""",
    )
    assert config == DaemonConfig(
        socket="/s",
        operator_socket="/o",
        plaintext_passwords=True,
        socket_mode=0o660,
        memory=0.4,
        policy="lru",
        listen=("tcp://127.0.0.1:7070", "tcp://[::1]:7071"),
        advertise=("tcp://outside:1", "tcp://outside:2"),
        rails=("r0", "r1"),
        bind_source=True,
        pull_over="nixl",
        probe_s=2.5,
        peers=("tcp://other:7070",),
        cluster="c",
        cluster_secret="hush hush hush hush",
        operated_by=("m", "n"),
        **tls_files,
        plaintext=True,
        join="etcds://user@etcd:2379",
        join_password="jp",
        join_ca="/ca",
        join_cert="/cert",
        join_key="/key",
        member_ttl_s=8.0,
        directory="rediss://redis:6379",
        directory_password="dp",
        directory_ca="/dca",
        directory_cert="/dcert",
        directory_key="/dkey",
        directory_timeout_s=0.25,
        labels={"zone": "a", "rack": "7"},
        replicas_max=3,
        namespace_unused_days=7,
        replication_bandwidth=1 << 20,
        forward=False,
        operator_token="ot ot ot ot ot ot",
        announce=False,
        tenants=(
            TenantConfig("red", 4096, "t t t t t t t t t", announce=True),
            TenantConfig("default", 0.5, announce=True),
        ),
        publish_events=(
            StreamConfig("one", "m", "ipc:///run/events"),
            StreamConfig("two", "m/n", "tcp://127.0.0.1:5557", "tcp://[::1]:5558", "kv@a@m", "red"),
        ),
        ssd=(DiskConfig("/e", 8 << 20), DiskConfig("/f", 1 << 30)),
        ssd_write="through",
        ssd_bytes_per_day=1 << 40,
        ssd_drain_s=9.0,
        ssd_flush_s=3.0,
        encryption_secret_file="/encryption.secret",
        audit_file="/audit.log",
        audit_file_bytes=1 << 20,
        audit_files=3,
        object_store="file:///shared/kvpool",
        object_bytes_max=1 << 40,
        object_instance_credentials=True,
        device=DeviceConfig("cuda:1", 8 << 30),
        events=False,
        transfer_workers=2,
        data_dir="/d",
        receipts_bytes=9 << 20,
        node="n",
        clients_max=5,
        memory_wait_s=4.0,
        peers_max=6,
        engines_max=7,
        lease_s_max=7.0,
        departures_max=8,
        log_level="debug",
        log_format="json",
        otlp="https://collector:4318/tenant",
        http=("127.0.0.1:7071", "10.0.0.5:7071", "unix:/h"),
        http_tokens=tls_files["tls_key"],
        http_rate=7.0,
        routers=("http://r:8080",),
        router_ca=tls_files["tls_ca"],
        router_token="rt rt rt rt rt rt",
    )
    red, default = config.all_tenants()
    assert red == config.tenants[0]
    assert default == TenantConfig("default", 0.5), "the file has said what the default one gets"
    unset = DaemonConfig(socket="")
    same = [name for name in SETTINGS if getattr(config, name) == getattr(unset, name)]
    # One of two, of which only one may be set.
    assert same == ["cluster_secret_file", "encryption_secret_command"], "not changed by this test"
    given = from_file(tmp_path, 'cluster_secret_file = "/secret"')
    assert (given.cluster_secret, given.cluster_secret_file) == ("", "/secret")


def test_every_setting_but_tenants_can_come_from_the_environment(tls_files):
    values = {
        **tls_files,
        "plaintext": "true",
        "socket": "/s",
        "operator_socket": "/o",
        "plaintext_passwords": "true",
        "socket_mode": "660",
        "memory": "1g",
        "policy": "lru",
        "listen": "tcp://a:1, tcp://b:2",
        "advertise": "tcp://c:1,tcp://c:2",
        "rails": "r0,-",
        "bind_source": "1",
        "pull_over": "tcp",
        "probe_s": "0",
        "peers": "",
        "cluster": "c",
        "cluster_secret_file": "/secret",
        "operated_by": "m,n",
        "join": "etcd://user@e1:2379,e2:2379",
        "join_password": "jp",
        "join_ca": "/ca",
        "join_cert": "/cert",
        "join_key": "/key",
        "member_ttl_s": "2.5",
        "directory": "redis+cluster://r1:1,r2:2",
        "directory_password": "dp",
        "directory_ca": "/dca",
        "directory_cert": "/dcert",
        "directory_key": "/dkey",
        "directory_timeout_s": ".1",
        "labels": "zone=a,rack=7",
        "replicas_max": "3",
        "replication_bandwidth": "64k",
        "forward": "false",
        "operator_token": "ot ot ot ot ot ot",
        "announce": "false",
        "ssd": "/e=8MiB, /f=1GiB",
        "ssd_write": "none",
        "ssd_bytes_per_day": "0",
        "ssd_drain_s": "0",
        "ssd_flush_s": "0",
        "encryption_secret_file": "",
        "audit_file": "/audit.log",
        "audit_file_bytes": "64KiB",
        "namespace_unused_days": "0",
        "audit_files": "1",
        "encryption_secret_command": "print-it --now",
        "object_store": "s3://bucket/prefix",
        "object_bytes_max": "2TiB",
        "object_instance_credentials": "true",
        "device": "cpu=2MiB",
        "events": "0",
        "transfer_workers": "2",
        "data_dir": "/d",
        "receipts_bytes": "9MiB",
        "node": "n",
        "clients_max": "5",
        "memory_wait_s": "4.5",
        "peers_max": "6",
        "engines_max": "64",
        "lease_s_max": "7.5",
        "departures_max": "0",
        "log_level": "error",
        "log_format": "json",
        "otlp": "http://127.0.0.1:4318",
        "http": "[::1]:7071, unix:/h",
        "http_tokens": tls_files["tls_key"],
        "http_rate": ".5",
        "routers": "http://r:8080,https://s:1/",
        "router_ca": tls_files["tls_ca"],
        "router_token": "rt rt rt rt rt rt",
    }
    assert values.keys() | {"tenants", "publish_events", "cluster_secret"} == set(SETTINGS)
    config = load(environ={f"KVPOOL_{name.upper()}": value for name, value in values.items()})
    assert config.socket_mode == 0o660
    assert config.memory == 1 << 30
    assert config.listen == ("tcp://a:1", "tcp://b:2")
    assert config.advertise == ("tcp://c:1", "tcp://c:2")
    assert config.peers == ()
    assert (config.rails, config.bind_source, config.probe_s) == (("r0", ""), True, 0.0)
    assert config.pull_over == "tcp"
    assert config.operated_by == ("m", "n")
    assert config.ssd == (DiskConfig("/e", 8 << 20), DiskConfig("/f", 1 << 30))
    assert config.device == DeviceConfig("cpu", 2 << 20)
    assert (config.ssd_bytes_per_day, config.ssd_flush_s, config.ssd_drain_s) == (0, 0.0, 0.0)
    assert (config.object_store, config.object_bytes_max) == ("s3://bucket/prefix", 2 << 40)
    assert config.object_instance_credentials is True
    assert config.encryption_secret_command == "print-it --now"
    audit = (config.audit_file, config.audit_file_bytes, config.audit_files)
    assert audit == ("/audit.log", 64 << 10, 1)
    assert config.namespace_unused_days == 0
    assert config.labels == {"zone": "a", "rack": "7"}
    assert config.replication_bandwidth == 64 << 10
    assert config.forward is False
    assert (config.events, config.engines_max) == (False, 64)
    assert (config.member_ttl_s, config.directory_timeout_s) == (2.5, 0.1)
    assert (config.lease_s_max, config.departures_max) == (7.5, 0)
    assert (config.log_level, config.log_format) == ("error", "json")
    assert config.otlp == "http://127.0.0.1:4318"
    assert (config.http, config.http_rate) == (("[::1]:7071", "unix:/h"), 0.5)
    assert config.routers == ("http://r:8080", "https://s:1")
    assert config.router_ca == tls_files["tls_ca"]
    assert (config.http_tokens, config.router_token) == (
        values["http_tokens"],
        values["router_token"],
    )
    assert config.plaintext is True
    assert {name: getattr(config, name) for name in tls_files} == tls_files
    texts = [name for name in values if name.startswith(("join", "operator", "directory"))]
    for name in set(texts) - {"directory_timeout_s"}:
        assert getattr(config, name) == values[name]


def test_secrets_are_not_printed():
    config = DaemonConfig(
        socket="/s", tenants=(TenantConfig("red", 1, "hush"),), **dict.fromkeys(SECRETS, "hush")
    )
    assert "hush" not in repr(config)


@pytest.mark.parametrize(
    "url",
    [
        "bucket",
        "s3://",
        "s3:///prefix",
        "file:///",
        "ftp://host/x",
        "s3://key:topsecret@bucket/x",
        "s3://bucket/x?secret_access_key=topsecret",
        "s3://bucket/x#topsecret",
        "s3://[bucket/topsecret",
    ],
)
def test_where_object_storage_begins_and_nothing_more(url):
    with pytest.raises(ConfigError, match="OBJECT_STORE") as refused:
        load(environ={"KVPOOL_OBJECT_STORE": url, "KVPOOL_DATA_DIR": "/d"})
    assert "topsecret" not in str(refused.value)


def test_a_lone_node_with_object_storage_remembers_epochs():
    with pytest.raises(ConfigError, match="data-dir"):
        load(environ={"KVPOOL_OBJECT_STORE": "s3://bucket"})
    assert (
        load(environ={"KVPOOL_OBJECT_STORE": "s3://b", "KVPOOL_DATA_DIR": "/d"}).object_store
        == "s3://b"
    )
    joined = {"KVPOOL_JOIN": "etcd://e", "KVPOOL_LISTEN": "tcp://a:1"}
    assert load(environ={"KVPOOL_OBJECT_STORE": "gs://b/p", **joined}).object_store == "gs://b/p"
    with pytest.raises(ConfigError, match="64MiB"):
        load(environ={"KVPOOL_OBJECT_BYTES_MAX": "1MiB"})


def test_frozen():
    with pytest.raises(AttributeError):
        load(environ={}).transfer_workers = 3


# ---- sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("1", 1),
        ("17B", 17),
        ("4k", 4096),
        ("4 KiB", 4096),
        ("4kb", 4096),
        ("1.5GiB", 3 << 29),
        (" 8GiB ", 8 << 30),
        ("2T", 2 << 40),
        ("25%", 0.25),
        ("100%", 1.0),
        ("0.5 %", 0.005),
    ],
)
def test_sizes(text, size):
    assert parse_size(text, "memory") == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        0,
        -1,
        "-1",
        "0%",
        "101%",
        "nan%",
        "inf%",
        "%",
        "GiB",
        "1e9",
        "1 2",
        "0.1",
        True,
        0.25,
        None,
        [],
        "8GiBB",
    ],
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"memory = .*8GiB.*25%"):
        parse_size(text, "memory")


@settings(deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text):
    try:
        assert parse_size(text, "memory") > 0
    except ConfigError:
        pass


# ---- the cluster ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        ("zone=a,rack=7", {"zone": "a", "rack": "7"}),
        ("zone=a,", {"zone": "a"}),
        ("", {}),
        (["zone=a", "rack=7"], {"zone": "a", "rack": "7"}),
        (("zone=a", "zone=b"), {"zone": "b"}),
        ({"zone": "a"}, {"zone": "a"}),
        ({}, {}),
        ([f"l{n}=x" for n in range(LABELS_MAX)], {f"l{n}": "x" for n in range(LABELS_MAX)}),
    ],
)
def test_labels(value, labels):
    assert load(flags={"labels": value}, environ={}).labels == labels


@pytest.mark.parametrize(
    "value",
    [
        "zone",
        "zone=",
        "=a",
        "zone=a=b",
        "a b=c",
        "zone=a b",
        ["zone"],
        [7],
        {"zone": 7},
        7,
        {f"l{n}": "x" for n in range(LABELS_MAX + 1)},
    ],
)
def test_what_are_no_labels(value):
    with pytest.raises(ConfigError, match="--label"):
        load(flags={"labels": value}, environ={})


@pytest.mark.parametrize(
    ("value", "forward"),
    [("true", True), ("TRUE", True), ("1", True), ("false", False), ("0", False), (True, True)],
)
def test_switches(value, forward):
    assert load(flags={"forward": value}, environ={}).forward is forward


def test_other_urls_for_others():
    told = {"listen": ["tcp://0.0.0.0:7070"], "advertise": ["tcp://10.0.0.5:7070"]}
    assert load(flags=told, environ={}).advertise == ("tcp://10.0.0.5:7070",)
    for listen in ([], ["tcp://a:1", "tcp://b:2"]):
        with pytest.raises(ConfigError, match="advertise: give one URL for each of listen"):
            load(flags=told | {"listen": listen}, environ={})


def test_who_joins_has_to_listen():
    environ = {"KVPOOL_JOIN": "etcd://e:2379"}
    with pytest.raises(ConfigError, match="set --listen"):
        load(environ=environ)
    config = load(environ=environ, flags={"listen": ["tcp://a:1"]})
    assert (config.join, config.listen) == ("etcd://e:2379", ("tcp://a:1",))


def test_a_table_of_labels_from_the_file_gives_way_to_flags(tmp_path):
    text = '[labels]\nzone = "a"\nrack = "7"'
    assert from_file(tmp_path, text).labels == {"zone": "a", "rack": "7"}
    assert from_file(tmp_path, text, labels=["zone=b"]).labels == {"zone": "b"}


def test_the_documented_file_is_right(tmp_path, repo_root):
    text = (repo_root / "docs" / "config.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    token = tmp_path / "research.token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    config = from_file(tmp_path, example.replace("/etc/kvpool/research.token", str(token)))
    assert config.all_tenants()[1].announce and config.all_tenants()[1].token == "a" * 32
    assert config.memory == 64 << 30
    assert config.labels == {"zone": "a", "rack": "7"}
    assert config.join.startswith("etcds://")


# ---- what is wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('memroy = "1GiB"', "memroy.*no such setting.*memory"),
        ("memory = 0", "memory"),
        ("transfer_workers = 0", "1 to 64"),
        ("transfer_workers = 65", "1 to 64"),
        ("transfer_workers = true", "1 to 64"),
        ("transfer_workers = 1.5", "1 to 64"),
        ('transfer_workers = "many"', "1 to 64"),
        ("lease_s_max = 0", "seconds"),
        ('log_level = "loud"', "debug, info, warning, error"),
        ('log_format = "xml"', "text, json"),
        *[
            (
                f"otlp = {wrong!r}",
                "collector that accepts OTLP over HTTP, such as http://127.0.0.1:4318",
            )
            for wrong in (
                "collector:4318",
                "grpc://a:4317",
                "http://",
                "http://a:0",
                "http://u:p@a:1",
                "http://a:1?b",
            )
        ],
        ("lease_s_max = nan", "seconds"),
        ("lease_s_max = inf", "seconds"),
        ('lease_s_max = "soon"', "seconds"),
        ("socket_mode = 0o1000", "octal"),
        ('socket_mode = "rw"', "octal"),
        ('socket_mode = "888"', "octal"),
        ("socket_mode = -1", "octal"),
        ('node = ""', "letters"),
        ('node = "a b"', "letters"),
        ('node = "-x"', "letters"),
        ('cluster = "a/b"', "letters"),
        ("policy = 1", "text"),
        ("join = 1", "join.*text"),
        ("join_ca = []", "join_ca.*text"),
        ("member_ttl_s = 0", "member_ttl_s.*seconds"),
        ("member_ttl_s = 86401", "member_ttl_s.*seconds"),
        ('pull_over = "rdma"', "auto, nixl, tcp"),
        ("probe_s = [1]", "probe_s.*seconds"),
        ("probe_s = -1", "probe_s.*seconds"),
        ("probe_s = false", "probe_s.*seconds"),
        ("ssd_drain_s = {}", "ssd_drain_s.*seconds"),
        ("ssd_bytes_per_day = [1]", "ssd_bytes_per_day"),
        ('directory_timeout_s = "long"', "directory_timeout_s.*seconds"),
        ("replicas_max = 0", "1 to 64"),
        ("replicas_max = 65", "1 to 64"),
        ('replication_bandwidth = "10%"', "bytes a second"),
        ("replication_bandwidth = 0", "replication_bandwidth"),
        ('replication_bandwidth = "fast"', "replication_bandwidth"),
        ('forward = "maybe"', "true or false"),
        ('device = "cuda:0"', "DEVICE=SIZE"),
        ('device = "cuda=8GiB"', "DEVICE=SIZE"),
        ('device = "gpu0=8GiB"', "DEVICE=SIZE"),
        ('device = "cuda:0=10%"', "DEVICE=SIZE"),
        ('device = "cuda:0=1MiB"', "at least 2MiB"),
        ('device = "cuda:0=much"', "must be bytes"),
        ("device = 8", "device.*text"),
        ('events = "tcp://127.0.0.1:5557"', "true or false"),
        ("engines_max = 65", "from 1 to 64"),
        ("forward = 2", "true or false"),
        ('labels = "zone"', "labels"),
        ("labels = { zone = 7 }", "labels.zone"),
        ('advertise = ["10.0.0.5:7070"]', "tcp://127.0.0.1:7070"),
        ('policy = "a\\u0000b"', "text"),
        ('socket = ""', "path"),
        (f'socket = "/{"x" * SOCKET_PATH_MAX}"', str(SOCKET_PATH_MAX)),
        ('listen = "7070"', "tcp://127.0.0.1:7070"),
        ('listen = ["tcp://host"]', "tcp://127.0.0.1:7070"),
        ('listen = ["tcp://:7070"]', "tcp://127.0.0.1:7070"),
        ('listen = ["tcp://host:99999"]', "tcp://127.0.0.1:7070"),
        ('listen = ["tcp://[::1:7070"]', "tcp://127.0.0.1:7070"),
        ("listen = [1]", "text"),
        ("listen = 7", "list"),
        ("tenants = 7", r"\[tenants.NAME\]"),
        ("publish_events = 7", r"\[publish_events.NAME\]"),
        ("publish_events.a = 7", "endpoint, model, replay, tenant, topic"),
        ('[publish_events.a]\nendpoint = "ipc:///e"', "publish_events.a.model is missing"),
        ('[publish_events.a]\nmodel = "m"', "publish_events.a.endpoint is missing"),
        ('[publish_events.a]\nmodel = "m"\nendpoint = 7', "publish_events.a.endpoint"),
        ('[publish_events.a]\nmodel = "m"\nendpoint = "tcp://*:5557"', "on this machine only"),
        (
            '[publish_events.a]\nmodel = "m"\nendpoint = "tcp://10.0.0.1:5557"',
            "on this machine only",
        ),
        ('[publish_events.a]\nmodel = "m"\nendpoint = "ipc://e"', "on this machine only"),
        (
            '[publish_events.a]\nmodel = "m"\nendpoint = "ipc:///e"\nreplay = "tcp://0.0.0.0:1"',
            "publish_events.a.replay",
        ),
        (
            '[publish_events.a]\nmodel = "m"\nendpoint = "ipc:///e"\nreplay = "ipc:///e"',
            "addresses of its own",
        ),
        ("tenants.red = 7", "announce, memory, ssd, token, token_file"),
        ("[tenants.red]", "tenants.red.memory is missing"),
        ('[tenants.red]\nmemory = 1\ntokn = "x"', "announce, memory, ssd, token, token_file"),
        ("[tenants.red]\nmemory = 1\ntoken = 7", "tenants.red.token"),
        ("[tenants.red]\nmemory = 0", "tenants.red.memory"),
        ('[tenants."a b"]\nmemory = 1', "letters"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, hint):
    with pytest.raises(ConfigError, match=f"(?s){hint}") as caught:
        from_file(tmp_path, line)
    assert str(tmp_path / "kvpool.toml") in str(caught.value)


def test_wrong_variables_and_flags_are_named():
    with pytest.raises(ConfigError, match="KVPOOL_MEMORY = 'much'"):
        load(environ={"KVPOOL_MEMORY": "much"})
    with pytest.raises(ConfigError, match="--data-dir"):
        load(flags={"data_dir": "a\0b"}, environ={})
    with pytest.raises(ConfigError, match="--nonsense"):
        load(flags={"nonsense": 1}, environ={})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load(file=str(tmp_path / "absent.toml"), environ={})
    with pytest.raises(ConfigError, match="directory"):
        load(file=str(tmp_path), environ={})
    with pytest.raises(ConfigError, match="not TOML"):
        from_file(tmp_path, "memory = ")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load(file=str(tmp_path / "binary"), environ={})


@pytest.mark.parametrize("host", ["", "---", "a b.c", "ünïcode", "x" * 200, "..."])
def test_whatever_the_machine_is_called(monkeypatch, host):
    monkeypatch.setattr("socket.gethostname", lambda: host)
    config = load(environ={})
    assert load(flags={"node": config.node}, environ={}).node == config.node


def test_nixl_stands_beside_tcp():
    config = load(flags={"listen": "tcp://a:1,nixl://a:2"}, environ={})
    assert config.listen == ("tcp://a:1", "nixl://a:2")
    for listen in ("nixl://a:2", "tcp://a:1,nixl://a:2,nixl://a:3"):
        with pytest.raises(
            ConfigError, match="at most one nixl:// URL, together with a tcp:// URL"
        ):
            load(flags={"listen": listen}, environ={})
    with pytest.raises(ConfigError, match=r"peers: give tcp:// URLs"):
        load(flags={"peers": "tcp://b:1,nixl://b:2"}, environ={})


# ---- TLS -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_files_of_tls_come_together(tls_files, missing):
    del tls_files[missing]
    with pytest.raises(ConfigError, match=f"{missing}: not set.*kvpool certs node"):
        load(flags=tls_files, environ={})


def test_a_list_of_revoked_certificates_is_not_needed(tls_files):
    del tls_files["tls_crl"]
    assert load(flags=tls_files, environ={}).tls_crl == ""


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca", "tls_crl"])
def test_files_of_tls_that_cannot_be_read(tls_files, name):
    os.unlink(tls_files[name])
    with pytest.raises(ConfigError, match=f"{name}: cannot read .*No such file"):
        load(flags=tls_files, environ={})


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666])
def test_a_key_that_every_user_can_open(tls_files, mode):
    os.chmod(tls_files["tls_key"], mode)
    with pytest.raises(ConfigError, match=r"tls_key: other users can access.*chmod 600"):
        load(flags=tls_files, environ={})
    os.chmod(tls_files["tls_key"], 0o640)  # a group of those who may
    assert load(flags=tls_files, environ={}).tls_key == tls_files["tls_key"]


def test_nixl_beside_tls_is_chosen_by_name(tls_files):
    both = tls_files | {"listen": "tcp://a:1,nixl://a:2"}
    with pytest.raises(ConfigError, match="NIXL transfers are not encrypted"):
        load(flags=both, environ={})
    assert load(flags=both | {"plaintext": True}, environ={}).plaintext
    assert load(flags=both | {"pull_over": "nixl"}, environ={}).pull_over == "nixl"


DISKS = (DiskConfig("/e", 300), DiskConfig("/f", 100))


@pytest.mark.parametrize(
    ("parts", "shares"),
    [
        ({"a": None, "b": None, "c": None}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}),
        ({"a": 0.5, "b": None, "c": None}, {"a": 0.5, "b": 0.25, "c": 0.25}),
        ({"a": 100, "b": 0.5, "c": None}, {"a": 0.25, "b": 0.5, "c": 0.25}),
        ({"a": 0.5, "b": 199}, {"a": 0.5, "b": 0.4975}),
        ({"a": 0.25, "b": 0.25}, {"a": 0.25, "b": 0.25}),
    ],
)
def test_tenants_parts_of_the_disks(parts, shares):
    """Whatever the memory is: that may be a share of what is free at the start."""
    tenants = tuple(TenantConfig(name, 1 << 20, ssd=part) for name, part in parts.items())
    default = TenantConfig("default", 4096, ssd=1e-6)
    config = DaemonConfig(socket="/s", ssd=DISKS, tenants=(*tenants, default))
    found = config.ssd_shares()
    assert found.pop("default") == 1e-6
    assert found == pytest.approx(shares, abs=1e-5)
    assert DaemonConfig(socket="/s", tenants=tenants).ssd_shares() == {}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((0.6, 0.6), "120%"),
        ((300, 200), "125%"),
        ((0.5, 0.5, None), "1 more tenants have no part set"),
    ],
)
def test_parts_of_the_disks_that_are_not_there(parts, words):
    names = ("default", "b", "c")
    tenants = tuple(
        TenantConfig(name, 4096, ssd=part) for name, part in zip(names, parts, strict=False)
    )
    with pytest.raises(ConfigError, match=words):
        DaemonConfig(socket="/s", ssd=DISKS, tenants=tenants).ssd_shares()


def test_a_tenants_part_of_the_disks_can_come_from_the_file(tmp_path):
    config = from_file(
        tmp_path,
        '[tenants.a]\nmemory = "1GiB"\nssd = "30%"\n[tenants.b]\nmemory = 4096\nssd = "2GiB"',
    )
    assert [tenant.ssd for tenant in config.tenants] == [0.3, 2 << 30]


def test_how_never_and_lists_of_names_may_be_written():
    environ = {"KVPOOL_LISTEN": "tcp://a:1,tcp://b:2", "KVPOOL_RAILS": "a, -"}
    assert load(environ=environ).rails == ("a", "")
    for text in ("0", "0.0", "0e0"):
        assert load(environ={"KVPOOL_PROBE_S": text}).probe_s == 0.0
    assert load(flags={"probe_s": 0.0}, environ={}).probe_s == 0.0


@pytest.mark.parametrize(
    ("rails", "message"),
    [
        (["a"], "one name for each of listen"),
        (["a", "b", "c"], "one name for each of listen"),
        (["a", ""], "--rail"),
        (["a", "a b"], "--rail"),
        (7, "--rail"),
    ],
)
def test_rails_are_names_one_for_each_address(rails, message):
    flags = {"listen": ["tcp://a:1", "tcp://b:2"], "rails": rails}
    with pytest.raises(ConfigError, match=message):
        load(flags=flags, environ={})


@pytest.mark.parametrize(
    "address",
    [
        "",
        "7071",
        "host",
        "host:",
        ":7071",
        "host:70000",
        "http://h:1",
        "a@h:1",
        "h:1/x",
        "unix:",
        "h:x",
    ],
)
def test_what_is_no_address_of_a_gateway(address):
    if address:
        with pytest.raises(ConfigError, match="http"):
            load(flags={"http": [address]}, environ={})
    else:
        assert load(flags={"http": [address]}, environ={}).http == ()


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "127.0.0.1.nip.io:1"]
)
def test_a_gateway_off_loopback_takes_tokens_and_tls(address, tls_files):
    tokens = {"http": [address], "http_tokens": tls_files["tls_key"]}
    for flags, text in (
        ({"http": [address]}, "kvpool token"),
        ({"http": [address], "plaintext": True}, "kvpool token"),
        ({"http": [address], **tls_files}, "kvpool token"),
        (tokens, "kvpool certs"),
        ({"http": [address], "http_tokens": "/nowhere"}, "cannot read"),
    ):
        with pytest.raises(ConfigError, match=text):
            load(flags=flags, environ={})
    assert load(flags={**tokens, **tls_files}, environ={}).http == (address,)
    assert load(flags={**tokens, "plaintext": True}, environ={}).http == (address,)
    for local in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/h"):
        assert load(flags={"http": [local]}, environ={}).http == (local,)


# ---- files with secrets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        'cluster_secret = "hush hush hush hush"',
        'operator_token = "hush hush hush hush"',
        'directory = "redis://user:hush@127.0.0.1:6379"',
        'join_password = "hush"',
        '[tenants.red]\nmemory = "8MiB"\ntoken = "hush hush hush hush"',
    ],
)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o602])
def test_a_file_with_secrets_that_others_can_reach_is_refused(tmp_path, line, mode):
    path = tmp_path / "kvpool.toml"
    path.write_text(line)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        load(file=str(path), environ={})
    assert "hush" not in str(caught.value)
    path.chmod(0o600)
    load(file=str(path), environ={})


def test_a_file_without_secrets_may_be_read_by_others(tmp_path):
    path = tmp_path / "kvpool.toml"
    path.write_text(
        'memory = "8MiB"\ndirectory = "redis://127.0.0.1:6379"\noperator_token = ""\n'
        '[tenants.red]\nmemory = "8MiB"\n'
    )
    path.chmod(0o644)
    assert load(file=str(path), environ={}).memory == 8 << 20


def test_a_tenants_token_may_be_in_a_file_of_its_own(tmp_path):
    token = tmp_path / "token"
    token.write_text("red-token-red-token\n")
    token.chmod(0o600)
    table = f'[tenants.red]\nmemory = "8MiB"\ntoken_file = "{token}"\n'
    (_, red) = from_file(tmp_path, table).all_tenants()
    assert red == TenantConfig("red", 8 << 20, "red-token-red-token")
    assert "red-token" not in repr(red)
    with pytest.raises(ConfigError, match="not both"):
        from_file(tmp_path, table + 'token = "red-token-red-token"')
    token.chmod(0o640)
    with pytest.raises(ConfigError, match="other users can access"):
        from_file(tmp_path, table)
    token.chmod(0o600)
    for wrong in ("short", "", "two words and more than that"):
        token.write_text(wrong)
        with pytest.raises(ConfigError):
            from_file(tmp_path, table)


@pytest.mark.parametrize("token", ["", "short", "fifteen letters"])
def test_tokens_have_a_minimum_length(tmp_path, token):
    with pytest.raises(ConfigError, match=r"tenants\.red\.token"):
        from_file(tmp_path, f'[tenants.red]\nmemory = "8MiB"\ntoken = "{token}"')
    if token:
        with pytest.raises(ConfigError, match="operator_token"):
            from_file(tmp_path, f'operator_token = "{token}"')


def test_who_may_announce_engines(tmp_path):
    def may(text: str) -> dict[str, bool]:
        return {each.name: each.announce for each in from_file(tmp_path, text).all_tenants()}

    red, default = '[tenants.red]\nmemory = "8MiB"\n', '[tenants.default]\nmemory = "8MiB"\n'
    assert may(red) == {"default": True, "red": False}
    assert may(red + "announce = true\n") == {"default": True, "red": True}
    assert may("announce = false\n" + red) == {"default": False, "red": False}
    assert may(default + red) == {"default": True, "red": False}
    assert may("announce = false\n" + default) == {"default": False}
    assert may(default + "announce = false\n") == {"default": False}
    with pytest.raises(ConfigError, match="true or false"):
        may(red + "announce = 1\n")


def test_the_operators_socket_is_beside_the_clients_unless_set(tmp_path):
    assert from_file(tmp_path, 'socket = "/run/a.sock"').operators_at() == "/run/a.sock.operator"
    set_apart = 'socket = "/run/a.sock"\noperator_socket = "/run/o/a.sock"'
    assert from_file(tmp_path, set_apart).operators_at() == "/run/o/a.sock"
    with pytest.raises(ConfigError, match="another path"):
        from_file(tmp_path, 'socket = "/run/a.sock"\noperator_socket = "/run/a.sock"')
    long = "/" + "x" * (SOCKET_PATH_MAX - 5)
    with pytest.raises(ConfigError, match="operator_socket"):
        from_file(tmp_path, f'socket = "{long}"')
    assert from_file(tmp_path, f'socket = "{long}"\noperator_socket = "/o"').operators_at() == "/o"


@pytest.mark.parametrize(
    "lines",
    [
        'join = "etcd://user@10.0.0.1:2379"\njoin_password = "hush"',
        'join = "etcd://user@127.0.0.1:2379,10.0.0.1:2379"\njoin_password = "hush"',
        'directory = "redis://10.0.0.1:6379"\ndirectory_password = "hush"',
        'directory = "redis://user:hush@10.0.0.1:6379/1"',
        'directory = "redis://:hush@redis"',
        'directory = "redis+cluster://10.0.0.1:6379,10.0.0.2:6379"\ndirectory_password = "hush"',
        'directory = "redis+sentinel://user:hush@127.0.0.1:1,sentinel:2/main"',
    ],
)
def test_passwords_go_over_the_network_in_the_clear_only_if_somebody_says_so(tmp_path, lines):
    text = f'listen = "tcp://127.0.0.1:7070"\n{lines}\n'
    with pytest.raises(ConfigError, match="plaintext_passwords") as caught:
        from_file(tmp_path, text)
    assert "hush" not in str(caught.value)
    from_file(tmp_path, text + "plaintext_passwords = true\n")
    from_file(tmp_path, text.replace("etcd://", "etcds://").replace('"redis', '"rediss'))


@pytest.mark.parametrize(
    "lines",
    [
        'join = "etcd://user@127.0.0.1:2379,[::1]:2379"\njoin_password = "hush"',
        'join = "etcd://10.0.0.1:2379"',
        'directory = "redis://user:hush@localhost:6379/1"',
        'directory = "redis://10.0.0.1:6379"',
    ],
)
def test_without_a_password_or_on_this_machine_nothing_has_to_be_said(tmp_path, lines):
    from_file(tmp_path, f'listen = "tcp://127.0.0.1:7070"\n{lines}\n')


def test_streams_are_of_tenants_that_there_are(tmp_path) -> None:
    path = tmp_path / "kvpool.toml"
    stream = '[publish_events.a]\nmodel = "m"\nendpoint = "ipc:///e"\ntenant = "red"\n'
    path.write_text(stream)
    with pytest.raises(ConfigError, match=r"publish_events\.a\.tenant: there is no tenant 'red'"):
        load(file=str(path), environ={})
    path.write_text(f"{stream}[tenants.red]\nmemory = 4096\n")
    (found,) = load(file=str(path), environ={}).publish_events
    assert found.tenant == "red"
