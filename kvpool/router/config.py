"""The router's configuration: one TOML file, flags and a few secrets of the environment, read once, then frozen.

Later ones win: defaults, file, flags. Secrets come from the environment or from files that only this user
may read: `KVPOOL_ROUTER_TOKEN`, `KVPOOL_ENGINE_API_KEY`, `token_file`, `api_key_file`; `KVPOOL_ROUTER_TOKEN_FILE`
and `KVPOOL_ENGINE_API_KEY_FILE` name files whose content they are. Nothing prints them.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvpool.config import default_socket_path, otlp_endpoint, secret_of
from kvpool.errors import ConfigError
from kvpool.loopback import is_loopback
from kvpool.placement.engine_blocks import GROUPS_MAX
from kvpool.scheduler.policies import DEFAULT_POLICY, POLICIES

TOKEN_CHARACTERS_MIN = 16
TOKEN_ENVIRON = "KVPOOL_ROUTER_TOKEN"  # noqa: S105  (the variable's name)
API_KEY_ENVIRON = "KVPOOL_ENGINE_API_KEY"
SECRET_FILE_BYTES_MAX = 4096
FOLLOW_S_MAX = 600
"""What the vLLM plugin takes."""

_ENDPOINT = re.compile(r"tcp://[^\s/*]+:[1-9]\d{0,4}|ipc://[/@][^*\0]+")

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 34)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")]


class EngineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[engines]]`: what is said of an engine. What is left out is what the engine announced itself.

    url: of its HTTP server. name: its host and port if left out. node: the kvpool node that it runs on.
    flexible: whether it may change between prefill and decode, as the load has it.
    events, replay, topic: where its KV events are. namespace: the digest of its blocks' namespace, hex.
    hash, hash_seed: how it hashes blocks, and its PYTHONHASHSEED. api_key_file: what it asks callers for.
    """

    url: str
    name: Name | None = None
    node: str | None = None
    role: Literal["both", "prefill", "decode"] | None = None
    flexible: bool | None = None
    labels: dict[str, str] | None = None
    kind: str | None = None
    events: str | None = None
    replay: str | None = None
    topic: str | None = None
    namespace: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32})?\Z")] | None = None
    groups: tuple[int, ...] | None = None
    block_tokens: Tokens | None = None
    hash: str | None = None
    hash_seed: str | None = None
    capacity_tokens: Tokens | None = None
    step_tokens: Tokens | None = None
    block_bytes: Bytes | None = None
    follows_max: Annotated[int, msgspec.Meta(ge=0, le=1024)] | None = None
    max_len: Tokens | None = None
    api_key_file: str | None = None


class TenantTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[tenants.NAME]`: who shows the token in `token_file`.

    weight: of its share of the engines, beside others'. priority_max: the highest that it may ask for.
    """

    token_file: str
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    priority_max: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of `kvpool router`.

    listen: HOST:PORT; anything but loopback takes a token. token_file: the operator's token, who may ask for
    everything. tenants: further tokens, for requests only.
    engines: those that are configured; others are found through the daemon.
    daemon: whether this host's daemon is asked for engines and for what the pool holds; socket: where it is.
    policy: which engine computes a prompt.
    deadline_s: a request's, unless it says otherwise; deadline_s_max: the most it may say.
    body_bytes_max, answer_bytes_max: of a request; of an answer that is not streamed.
    requests_max: in flight, waiting ones included. queue_max: of those that wait.
    connect_s: to an engine. answer_s: an engine that has not begun to answer so long after it was expected to
    counts as failed. stall_s: so does one that stops in the middle. client_stall_s: a client that does not
    read for so long is given up.
    retries_max: engines that are tried after the first one failed.
    probe_s, probe_timeout_s: how often engines are asked whether they are well, and the wait for that.
    failures_max: after so many failures in a row an engine gets nothing for backoff_s, twice that the next
    time, and so on up to backoff_s_max; then one request or probe shows how it is.
    drain_s: how long requests in flight may still take when the router is told to end.
    ttft_slo_s, tpot_slo_s: what is not expected to be met is refused at once; None: nothing is.
    output_tokens: how long an answer is expected to be that names no limit.
    follow_s: how long a decode engine waits for blocks while another one computes them.
    priority_max: the highest that requests without a tenant may ask for.
    role_dwell_s: between two changes of the roles of engines of one kind; role_smooth_s: over how long the load is
    looked at for that.
    decisions_max: requests that /explain remembers.
    otlp: where a collector takes traces by OTLP over HTTP; empty: none are recorded. trace_share: of the requests that
    come without a trace context, how many begin a trace then.
    """

    listen: str = "127.0.0.1:8080"
    token_file: str = ""
    tenants: dict[Name, TenantTable] = {}
    engines: tuple[EngineTable, ...] = ()
    daemon: bool = True
    socket: str = ""
    policy: str = DEFAULT_POLICY
    deadline_s: Seconds = 600.0
    deadline_s_max: Seconds = 3600.0
    body_bytes_max: Bytes = 16 << 20
    answer_bytes_max: Bytes = 64 << 20
    requests_max: Count = 2048
    queue_max: Count = 1024
    connect_s: Seconds = 2.0
    answer_s: Seconds = 30.0
    stall_s: Seconds = 30.0
    client_stall_s: Seconds = 60.0
    retries_max: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    probe_s: Seconds = 2.0
    probe_timeout_s: Seconds = 2.0
    failures_max: Count = 3
    backoff_s: Seconds = 1.0
    backoff_s_max: Seconds = 30.0
    drain_s: Seconds = 60.0
    ttft_slo_s: Seconds | None = None
    tpot_slo_s: Seconds | None = None
    output_tokens: Tokens = 512
    follow_s: Annotated[float, msgspec.Meta(gt=0, le=FOLLOW_S_MAX)] = 60.0
    priority_max: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 100
    role_dwell_s: Seconds = 60.0
    role_smooth_s: Seconds = 30.0
    decisions_max: Count = 1024
    otlp: str = ""
    trace_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01

    @property
    def address(self) -> tuple[str, int]:
        return _address(self.listen)


class Secrets(msgspec.Struct, frozen=True):
    """What must not be shown. token: the operator's; empty: none is asked for. tenants: names by token.

    api_keys: by URL of the engine. api_key: for engines that have none of their own.
    """

    token: str
    tenants: Mapping[str, str]
    api_key: str
    api_keys: Mapping[str, str]

    def __repr__(self) -> str:
        return "Secrets()"

    def api_key_of(self, url: str) -> str:
        return self.api_keys.get(url.rstrip("/"), self.api_key)


SETTINGS = tuple(field.name for field in msgspec.structs.fields(RouterConfig))


def load(
    *,
    file: str | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[RouterConfig, Secrets]:
    """The configuration. `flags` that are None were not given; an `engine` is URL[,KEY=VALUE...].

    Raises `ConfigError` for a file that cannot be read, an unknown name or a value that is not right;
    the message names the place.
    """
    values: dict[str, Any] = {} if file is None else _read(file)
    config = _convert(values, file or "the configuration")
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    if engines := given.pop("engines", None):
        given["engines"] = [engine_flag(text) for text in engines]  # type: ignore[attr-defined]
    config = _convert({**values, **given}, "the flags") if given else config
    _check(config)
    if not config.socket:
        config = msgspec.structs.replace(config, socket=default_socket_path(environ))
    secrets = _secrets(config, environ)
    host, _ = config.address
    if not is_loopback(host) and not (secrets.token or secrets.tenants):
        raise ConfigError(
            f"listen: {config.listen} is not loopback, so whoever asks must show a token: set {TOKEN_ENVIRON}, "
            f"or token_file, at least {TOKEN_CHARACTERS_MIN} characters (`openssl rand -hex 32` makes one)"
        )
    return config, secrets


def engine_flag(text: str) -> dict[str, object]:
    """`http://127.0.0.1:8000,role=decode,node=b` as an `[[engines]]` table has it."""
    url, *pairs = text.split(",")
    table: dict[str, object] = {"url": url}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in _ENGINE_FIELDS or key == "url":
            raise ConfigError(
                f"--engine: {pair!r}: KEY=VALUE with one of {', '.join(_ENGINE_FIELDS[1:])}"
            )
        table[key] = int(value) if key in _ENGINE_NUMBERS and value.isdecimal() else value
    return table


_ENGINE_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(EngineTable)
    if field.name not in {"labels", "groups", "flexible"}
)
_ENGINE_NUMBERS = frozenset(
    ("block_tokens", "capacity_tokens", "step_tokens", "block_bytes", "follows_max", "max_len")
)


def _convert(values: Mapping[str, object], where: str) -> RouterConfig:
    try:
        return msgspec.convert(values, RouterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check(config: RouterConfig) -> None:
    _address(config.listen)
    otlp_endpoint(config.otlp, "otlp")
    if config.policy not in POLICIES:
        raise ConfigError(f"policy = {config.policy!r}: one of {', '.join(POLICIES)}")
    if config.deadline_s > config.deadline_s_max:
        raise ConfigError("deadline_s is more than deadline_s_max")
    if config.backoff_s > config.backoff_s_max:
        raise ConfigError("backoff_s is more than backoff_s_max")
    for table in config.engines:
        _check_events(table)
    urls = [table.url.rstrip("/") for table in config.engines]
    for url in urls:
        parts = urlsplit(url)
        try:
            good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good or parts.username or parts.query or parts.fragment:
            raise ConfigError(f"engines: {url!r} is not a URL such as http://10.0.0.5:8000")
    names = [table.name for table in config.engines if table.name is not None]
    if len(set(urls)) < len(urls) or len(set(names)) < len(names):
        raise ConfigError("engines: each URL and each name once")


def _check_events(table: EngineTable) -> None:
    for name in ("events", "replay"):
        endpoint = getattr(table, name)
        if endpoint and not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(
                f"engines: {table.url}: {name} = {endpoint!r}: tcp://HOST:PORT or ipc:///PATH"
            )
    if not all(0 <= group < GROUPS_MAX for group in table.groups or ()):
        raise ConfigError(f"engines: {table.url}: groups are from 0 to {GROUPS_MAX - 1}")


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"listen = {listen!r}: HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080")
    return host, int(port)


def _secrets(config: RouterConfig, environ: Mapping[str, str]) -> Secrets:
    token = secret_of(TOKEN_ENVIRON, environ) or ""
    if config.token_file and not token:
        token = _secret_file(config.token_file, "token_file")
    tokens = {"": token} if token else {}
    for name, tenant in config.tenants.items():
        tokens[name] = _secret_file(tenant.token_file, f"tenants.{name}.token_file")
    for name, text in tokens.items():
        if len(text) < TOKEN_CHARACTERS_MIN:
            raise ConfigError(
                f"the token {f'of tenant {name}' if name else 'of the operator'} has fewer than "
                f"{TOKEN_CHARACTERS_MIN} characters: `openssl rand -hex 32` makes one"
            )
    tenants = {text: name for name, text in tokens.items() if name}
    if len(tenants) < len(config.tenants) or token in tenants:
        raise ConfigError("tokens: each tenant has one of its own")
    keys = {
        table.url.rstrip("/"): _secret_file(
            table.api_key_file, f"engines: {table.url}: api_key_file"
        )
        for table in config.engines
        if table.api_key_file
    }
    return Secrets(token, tenants, secret_of(API_KEY_ENVIRON, environ) or "", keys)


def _secret_file(path: str, name: str) -> str:
    """What a file holds that nobody else may read."""
    try:
        with open(path, "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ConfigError(f"{name}: {path} can be read by others: chmod 600 {path}")
            text = file.read(SECRET_FILE_BYTES_MAX).decode().strip()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {path} is not text") from None
    if not text or any(ord(character) < 33 or ord(character) > 126 for character in text):
        raise ConfigError(f"{name}: {path}: one line of printable characters")
    return text


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
