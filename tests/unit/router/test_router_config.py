"""What `kvpool router` may be told, and where it may listen."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.router.config import engine_flag, load
from kvpool.types import Intent

TOKEN = "0123456789abcdef-operator"


def secret(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_nothing_need_be_said() -> None:
    config, secrets = load(environ={"KVPOOL_SOCKET": "/run/x.sock"})
    assert config.address == ("127.0.0.1", 8080)
    assert config.socket == "/run/x.sock" and config.daemon
    assert secrets.token == "" and not secrets.tenants


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path / "router.toml",
        'deadline_s = 5\nretries_max = 0\n[[engines]]\nurl = "http://a:1"\nrole = "prefill"\n',
    )
    config, _ = load(file=file, environ={})
    assert (config.deadline_s, config.retries_max, config.engines[0].role) == (5, 0, "prefill")
    config, _ = load(
        file=file, flags={"deadline_s": 7.0, "engines": ["http://b:2,max_len=9"]}, environ={}
    )
    assert (config.deadline_s, config.retries_max) == (7.0, 0)
    assert [(e.url, e.max_len) for e in config.engines] == [("http://b:2", 9)]


def test_models_have_names_with_slashes(tmp_path: Path) -> None:
    file = written(tmp_path / "router.toml", '[models."org/Model-8B"]\ntokenizer = "/models/8b"\n')
    config, _ = load(file=file, environ={})
    assert {name: each.tokenizer for name, each in config.models.items()} == {
        "org/Model-8B": "/models/8b"
    }


@pytest.mark.parametrize(
    "text",
    [
        "nonsense = 1",
        'deadline_s = "soon"',
        "deadline_s = 0",
        "deadline_s = 9000",
        "retries_max = -1",
        "requests_max = 1.5",
        'policy = "luck"',
        'record_full = "stop"',
        'listen = "8080"',
        'listen = "localhost:70000"',
        "backoff_s = 2",
        "[[engines]]",
        '[[engines]]\nurl = "ftp://a"',
        '[[engines]]\nurl = "http://user@a"',
        '[[engines]]\nurl = "http://a:99999"',
        '[[engines]]\nurl = "http://a"\nrole = "cook"',
        '[[engines]]\nurl = "http://a"\nnamespace = "xyz"',
        '[[engines]]\nurl = "http://a"\n[[engines]]\nurl = "http://a"',
        '[[engines]]\nurl = "http://a"\n[[engines]]\nurl = "http://a/"',
        '[[engines]]\nurl = "http://a"\nevents = "tcp://a"',
        '[[engines]]\nurl = "http://a"\nevents = "tcp://*:5557"',
        '[[engines]]\nurl = "http://a"\nreplay = "ipc://path"',
        '[[engines]]\nurl = "http://a"\nrank = -1',
        '[[engines]]\nurl = "http://a"\nrank = 4096',
        '[[engines]]\nurl = "http://a"\nrank = 1\n[[engines]]\nurl = "http://a"\nrank = 1',
        '[[engines]]\nurl = "http://a"\nrank = 1\n[[engines]]\nurl = "http://a"',
        '[[engines]]\nurl = "http://a"\nrank = 1\ndata_parallel_size = 2',
        '[[engines]]\nurl = "http://a"\ndata_parallel_size = 0',
        '[[engines]]\nurl = "http://a"\ndata_parallel_size = 2\nevents = "ipc:///e"',
        '[[engines]]\nurl = "http://a"\ndata_parallel_size = 9\nevents = "tcp://a:65530"',
        '[[engines]]\nurl = "http://a"\nrank = 0\n[[engines]]\nurl = "http://a"\nrank = 1\napi_key_file = "k"',
        '[[engines]]\nurl = "http://a"\ngroups = [-1]',
        '[[engines]]\nurl = "http://a"\ngroups = [64]',
        '[[engines]]\nurl = "http://a"\nname = "x"\n[[engines]]\nurl = "http://b"\nname = "x"',
        "[tenants.x]",
        '[tenants."../x"]\ntoken_file = "y"',
        "[models.x]",
        '[models.x]\ntokenizer = ""',
        '[models.x]\ntokenizer = "/y"\nmore = 1',
        '[models.""]\ntokenizer = "/y"',
        "not toml",
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    file = written(tmp_path / "router.toml", text)
    with pytest.raises(ConfigError) as caught:
        load(file=file, environ={})
    assert str(caught.value)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://a:1/v1", "/v1"),
        ("http://a:1/v1/", "/v1"),
        ("http://a:1/prefix/v1", "/v1"),
        ("http://a:1/v1/chat/completions", "/v1/chat/completions"),
        ("http://a:1/v1/models/", "/v1/models"),
    ],
)
def test_the_path_of_the_api_is_to_be_left_out_of_a_url(
    tmp_path: Path, url: str, path: str
) -> None:
    file = written(tmp_path / "router.toml", f'[[engines]]\nurl = "{url}"\n')
    others = written(tmp_path / "others.toml", f'routers = ["http://b:1", "{url}"]\n')
    asked: list[dict[str, Any]] = [
        {"file": file},
        {"file": others},
        {"flags": {"engines": (f"{url},role=decode",)}},
    ]
    for each in asked:
        with pytest.raises(ConfigError, match=re.escape(f"leave out {path}")) as caught:
            load(**each, environ={})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://a:1", "http://a:1/", "http://a:1/prefix", "http://v1:1", "http://a:1/v1/gpu-7"]
)
def test_other_paths_of_urls_stay(tmp_path: Path, url: str) -> None:
    file = written(tmp_path / "router.toml", f'[[engines]]\nurl = "{url}"\n')
    config, _ = load(file=file, environ={})
    assert [table.url for table in config.engines] == [url]


def test_ranks_are_configured_together_or_each_by_itself(tmp_path: Path) -> None:
    file = written(
        tmp_path / "router.toml",
        '[[engines]]\nurl = "http://a"\nrank = 0\n[[engines]]\nurl = "http://a/"\nrank = 1\n'
        '[[engines]]\nurl = "http://b"\ndata_parallel_size = 2\nevents = "tcp://b:65534"\n',
    )
    config, _ = load(file=file, environ={})
    assert [(e.rank, e.data_parallel_size) for e in config.engines] == [
        (0, None),
        (1, None),
        (None, 2),
    ]
    config, _ = load(flags={"engines": ["http://b,data_parallel_size=2"]}, environ={})
    assert config.engines[0].data_parallel_size == 2


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(file="/nowhere/router.toml", environ={})


@pytest.mark.parametrize("listen", ["0.0.0.0:80", "10.0.0.1:80", "[::]:80", "router.example:80"])
def test_off_loopback_only_with_a_token(listen: str) -> None:
    with pytest.raises(ConfigError, match="KVPOOL_ROUTER_TOKEN"):
        load(flags={"listen": listen}, environ={})
    flags: dict[str, object] = {"listen": listen}
    environ = {"KVPOOL_ROUTER_TOKEN": TOKEN}
    with pytest.raises(ConfigError, match=r"(?s)encrypted in transit.*kvpool certs.*--plaintext"):
        load(flags=flags, environ=environ)
    for safe in ({"plaintext": True}, {"tls_cert": "/cert", "tls_key": "/key"}):
        _, secrets = load(flags=flags | safe, environ=environ)
        assert secrets.token == TOKEN
    with pytest.raises(ConfigError, match="set both, or none"):
        load(flags=flags | {"tls_cert": "/cert"}, environ=environ)


@pytest.mark.parametrize("listen", ["127.0.0.1:80", "localhost:80", "[::1]:0", "127.9.9.9:1"])
def test_loopback_needs_none(listen: str) -> None:
    load(flags={"listen": listen}, environ={})


def test_tokens_and_keys_are_in_files_that_others_cannot_read(tmp_path: Path) -> None:
    operator = secret(tmp_path / "operator", TOKEN + "\n")
    alice = secret(tmp_path / "alice", "alice-0123456789")
    key = secret(tmp_path / "key", "engine-key")
    file = written(
        tmp_path / "router.toml",
        f'listen = "0.0.0.0:80"\nplaintext = true\ntoken_file = "{operator}"\n[tenants.alice]\ntoken_file = "{alice}"\n'
        f'[[engines]]\nurl = "http://a/"\napi_key_file = "{key}"\n[[engines]]\nurl = "http://b"\n',
    )
    config, secrets = load(file=file, environ={"KVPOOL_ENGINE_API_KEY": "common"})
    assert secrets.token == TOKEN and secrets.tenants == {"alice-0123456789": "alice"}
    assert [secrets.api_key_of(e.url) for e in config.engines] == ["engine-key", "common"]
    assert secrets.api_key_of("http://a") == "engine-key"
    assert secrets.api_key_of("http://announced:8000") == "", "it may be anybody"
    for hidden in (TOKEN, "alice-0123456789", "engine-key", "common"):
        assert hidden not in repr(secrets) + repr(config)


@pytest.mark.parametrize(
    ("text", "mode"),
    [(TOKEN, 0o644), (TOKEN, 0o640), ("short", 0o600), ("", 0o600), (TOKEN + "\nmore", 0o600)],
)
def test_tokens_that_are_not_safe(tmp_path: Path, text: str, mode: int) -> None:
    path = secret(tmp_path / "token", text, mode)
    with pytest.raises(ConfigError) as caught:
        load(flags={"token_file": path}, environ={})
    assert not text or text not in str(caught.value)


def test_a_tenant_may_want_what_its_table_lists_where_caches_are_apart(tmp_path: Path) -> None:
    alice, bob = (
        secret(tmp_path / name, f"{name}-0123456789-0123456789") for name in ("alice", "bob")
    )
    salt = secret(tmp_path / "isolate", "secret-of-the-isolation-0123456789")
    apart = f'isolate = true\nisolate_secret_file = "{salt}"\n'
    tables = f'[tenants.alice]\ntoken_file = "{alice}"\nintents = %s\n[tenants.bob]\ntoken_file = "{bob}"\n'
    file = written(tmp_path / "router.toml", apart + tables % '["keep", "drop"]')
    config, _ = load(file=file, environ={})
    assert config.tenants["alice"].intents == (Intent.KEEP, Intent.DROP)
    assert config.tenants["bob"].intents == (), "none, unless they are listed"
    for text, says in (
        (apart + tables % '["hold"]', "intents"),
        (apart + tables % '"keep"', "intents"),
        (tables % '["keep"]', "tenants.alice.intents.* set isolate"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(file=written(tmp_path / "wrong.toml", text), environ={})


def test_tenants_have_tokens_of_their_own(tmp_path: Path) -> None:
    same = secret(tmp_path / "same", TOKEN)
    file = written(
        tmp_path / "router.toml",
        f'[tenants.a]\ntoken_file = "{same}"\n[tenants.b]\ntoken_file = "{same}"\n',
    )
    with pytest.raises(ConfigError, match="each tenant"):
        load(file=file, environ={})


@pytest.mark.parametrize("text", ["http://a,role", "http://a,color=red", "http://a,url=http://b"])
def test_flags_of_engines_that_say_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="--engine"):
        engine_flag(text)
