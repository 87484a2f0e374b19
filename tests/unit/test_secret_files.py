"""Secrets that stand in files: what KVPOOL_NAME_FILE names, for all who read secrets."""

import os
from pathlib import Path

import pytest

from kvpool.cli.base import client_of
from kvpool.config import SECRETS, SETTINGS, load, secret_of
from kvpool.daemon.cluster.joining import open_secrets
from kvpool.errors import ConfigError, KvpoolError
from kvpool.router import config as router_config
from kvpool.secret_files import SECRET_FILE_BYTES_MAX

LONG = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def a_file(tmp_path: Path):
    def write(content: bytes, name: str = "secret") -> str:
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(0o600)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"abc", "abc"),
        (b"abc\n", "abc"),
        (b"abc\n\n", "abc\n"),
        (b" abc \n", " abc "),
        (b"", ""),
        ("ä\n".encode(), "ä"),
    ],
)
def test_the_value_is_the_content_less_one_newline(a_file, content, value):
    assert secret_of("KVPOOL_X", {"KVPOOL_X_FILE": a_file(content)}) == value


def test_without_a_file_the_variable_counts():
    assert secret_of("KVPOOL_X", {"KVPOOL_X": "abc\n"}) == "abc\n"
    assert secret_of("KVPOOL_X", {}) is None


def test_both_at_once_are_refused(a_file):
    both = {"KVPOOL_X": "hush", "KVPOOL_X_FILE": a_file(b"quiet")}
    with pytest.raises(ConfigError, match="KVPOOL_X and KVPOOL_X_FILE are both set") as caught:
        secret_of("KVPOOL_X", both)
    assert "hush" not in str(caught.value) and "quiet" not in str(caught.value)


def test_files_that_cannot_be_taken(a_file, tmp_path):
    for path, message in (
        (str(tmp_path / "absent"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (a_file(b"\xff\xfe", "bytes"), "not UTF-8 text"),
        (
            a_file(b"x" * (SECRET_FILE_BYTES_MAX + 1), "long"),
            f"more than {SECRET_FILE_BYTES_MAX} bytes",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            secret_of("KVPOOL_X", {"KVPOOL_X_FILE": path})
        assert path in str(caught.value)
    assert len(secret_of("KVPOOL_X", {"KVPOOL_X_FILE": a_file(b"x" * 4096)})) == 4096


@pytest.mark.parametrize("name", sorted(set(SECRETS) - {"cluster_secret"}))
def test_each_secret_of_the_daemon(a_file, name):
    path = a_file(f"{LONG}\n".encode())
    config = load(environ={f"KVPOOL_{name.upper()}_FILE": path})
    assert getattr(config, name) == LONG
    # The file goes before the TOML file, as the variable does.
    toml = a_file(f'{name} = "{LONG[::-1]}"\n'.encode(), "kvpool.toml")
    assert getattr(load(file=toml, environ={}), name) == LONG[::-1]
    assert getattr(load(file=toml, environ={f"KVPOOL_{name.upper()}_FILE": path}), name) == LONG


def test_what_is_read_from_a_file_is_checked_as_any_value(a_file):
    with pytest.raises(ConfigError, match="at least 16 random characters"):
        load(environ={"KVPOOL_OPERATOR_TOKEN_FILE": a_file(b"short\n")})


def test_the_clusters_secrets_stay_in_their_file(a_file):
    """They are read again when it changes."""
    path = a_file(f"{LONG}\n".encode())
    config = load(environ={"KVPOOL_CLUSTER_SECRET_FILE": path})
    assert (config.cluster_secret, config.cluster_secret_file) == ("", path)
    assert open_secrets(config).current() == (LONG.encode(),)
    environ = {"KVPOOL_CLUSTER_SECRET_FILE": path, "KVPOOL_CLUSTER_SECRET": LONG}
    with pytest.raises(ConfigError, match="cluster_secret is set as well"):
        load(environ=environ)


def test_other_settings_take_no_file(a_file):
    others = set(SETTINGS) - set(SECRETS) - {"tenants"}
    assert {"memory", "listen", "node"} <= others
    environ = {f"KVPOOL_{name.upper()}_FILE": a_file(b"nothing") for name in others}
    assert load(environ=environ) == load(environ={})


def test_the_routers_secrets(a_file):
    token, key = a_file(f"{LONG}\n".encode(), "token"), a_file(b"key\n", "key")
    environ = {"KVPOOL_ROUTER_TOKEN_FILE": token, "KVPOOL_ENGINE_API_KEY_FILE": key}
    flags = {"listen": "0.0.0.0:0", "plaintext": True, "engines": ["http://a:1"]}
    _, secrets = router_config.load(flags=flags, environ=environ)
    assert (secrets.token, secrets.api_key_of("http://a:1")) == (LONG, "key")


def test_commands_read_their_tokens_from_files(a_file, tmp_path, monkeypatch):
    asked = {}

    class Asked(KvpoolError):
        pass

    def client(socket, **arguments):
        asked.update(arguments)
        raise Asked("enough")

    monkeypatch.setattr("kvpool.client.OperatorClient", client)
    for name in [name for name in os.environ if name.startswith("KVPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVPOOL_TOKEN_FILE", a_file(b"of the tenant\n", "one"))
    monkeypatch.setenv("KVPOOL_OPERATOR_TOKEN_FILE", a_file(b"of the operator\n", "two"))
    with pytest.raises(Asked):
        client_of(str(tmp_path / "sock"), "red")
    assert (asked["token"], asked["operator_token"]) == ("of the tenant", "of the operator")
