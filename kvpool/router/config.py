"""The router's configuration: one TOML file, flags and a few secrets of the environment, read once, then frozen.

Precedence, lowest first: defaults, file, flags. Secrets come from the environment or from files that only this
user may read: `KVPOOL_ROUTER_TOKEN`, `KVPOOL_ENGINE_API_KEY`, `token_file`, `api_key_file`;
`KVPOOL_ROUTER_TOKEN_FILE` and `KVPOOL_ENGINE_API_KEY_FILE` name files that contain them. They are never printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from kvpool.config import (
    LogFormat,
    LogLevel,
    default_socket_path,
    from_file,
    from_flags,
    kind,
    otlp_endpoint,
    secret_of,
    setting,
    settings_of,
)
from kvpool.config.parse import Seconds
from kvpool.errors import ConfigError
from kvpool.net import is_loopback
from kvpool.placement.kv_events.engine_blocks import GROUPS_MAX
from kvpool.router.upstream.engine_hosts import LOOPBACK, parse_entries
from kvpool.router.upstream.specs import by_rank
from kvpool.scheduler.policies import DEFAULT_POLICY, POLICIES
from kvpool.secret_files import read_secret_file
from kvpool.types import DATA_PARALLEL_RANKS_MAX, Intent, api_path_of

TOKEN_CHARACTERS_MIN = 16
TOKEN_ENVIRON = "KVPOOL_ROUTER_TOKEN"  # noqa: S105  (the variable's name)
API_KEY_ENVIRON = "KVPOOL_ENGINE_API_KEY"

_ENDPOINT = re.compile(r"tcp://[^\s/*]+:[1-9]\d{0,4}|ipc://[/@][^*\0]+")

Count = Annotated[int, kind(ge=1, le=1 << 20)]
Bytes = Annotated[int, kind(ge=1, le=1 << 34)]
Tokens = Annotated[int, kind(ge=1, le=1 << 30)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")]

ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class EngineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[engines]]` table. Missing fields are taken from the engine's announcement.

    url: of its HTTP server. name: its host and port if left out. node: the kvpool node that it runs on.
    flexible: whether it may change between prefill and decode with the load.
    events, replay, topic: addresses of its KV events. namespace: the digest of its blocks' namespace, hex.
    data_parallel_size: its ranks, each an engine for the router; events of the first one, the others' are at the next
    ports. rank: this is one of them, described by itself. hash, hash_seed: how it hashes blocks, and its PYTHONHASHSEED. api_key_file: the key that it requires.
    """

    url: str
    name: Name | None = None
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=DATA_PARALLEL_RANKS_MAX)] | None = None
    rank: Annotated[int, msgspec.Meta(ge=0, lt=DATA_PARALLEL_RANKS_MAX)] | None = None
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
    steps_at_once: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    block_bytes: Bytes | None = None
    follows_max: Annotated[int, msgspec.Meta(ge=0, le=1024)] | None = None
    max_len: Tokens | None = None
    api_key_file: str | None = None


class TenantTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[tenants.NAME]`: requests with the token in `token_file`.

    weight: its share of the engines relative to other tenants. priority_max: the highest priority it may request.
    region: with `isolate`, tenants of one region share caches; empty: it is alone. intents: with `isolate`, what it
    may want for the blocks of its prompts.
    """

    token_file: str
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    priority_max: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    region: Name | Literal[""] = ""
    intents: tuple[Intent, ...] = ()


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[models."NAME"]`, by the name in requests. tokenizer: a folder with the model's `tokenizer.json`."""

    tokenizer: Annotated[str, msgspec.Meta(min_length=1)]


_ENGINE_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(EngineTable)
    if field.name not in {"labels", "groups", "flexible"}
)


def engine_flag(text: str) -> dict[str, object]:
    """Convert `http://127.0.0.1:8000,role=decode,node=b` to an `[[engines]]` table."""
    url, *pairs = text.split(",")
    table: dict[str, object] = {"url": url}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in _ENGINE_FIELDS or key == "url":
            raise ConfigError(
                f"--engine: {pair!r}: must be KEY=VALUE with one of {', '.join(_ENGINE_FIELDS[1:])}"
            )
        table[key] = value
    return table


def _engines(value: object, where: str) -> object:
    """Tables, or texts in the form of the option."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where}: write one table per engine, [[engines]]")
    return [engine_flag(item) if isinstance(item, str) else item for item in value]


def parse_routers(value: object, where: str) -> object:
    """A list of URLs, or one text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(each, str) for each in items):
        raise ConfigError(f'{where}: must be a list such as ["http://10.0.0.5:8080"]')
    found = tuple(each.strip().rstrip("/") for item in items for each in item.split(","))
    for url in found:
        _check_url(url, where, "http://10.0.0.5:8080")
    return found


def _check_url(url: str, where: str, example: str) -> None:
    """Check the URL of a server: without credentials; a path may follow, but not that of the API."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        more = bool(parts.username or parts.query or parts.fragment)
    except ValueError:
        good, more = False, False
    if not good or more:
        raise ConfigError(f"{where}: {url!r} is not a URL such as {example}")
    if path := api_path_of(url):
        raise ConfigError(
            f"{where}: {url}: leave out {path}: the router adds the path of a request"
        )


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of `kvpool router`. A value that is made directly is not checked; `load` checks."""

    listen: Annotated[
        str,
        kind(metavar="HOST:PORT"),
        setting(
            "HOST:PORT where the router listens. Port 0 takes any free port. Off loopback a token is required."
        ),
    ] = "127.0.0.1:8080"
    own_listen: Annotated[
        str,
        kind(metavar="HOST:PORT"),
        setting(
            "A second HOST:PORT, of this process alone, where several share `listen` (`reuse_port`): for `routers` and "
            "for scrapes. The same holds for it as for `listen`."
        ),
    ] = ""
    token_file: Annotated[
        str,
        kind(metavar="FILE"),
        setting(
            "A file of mode 0600 with the operator's token, at least 16 characters. `KVPOOL_ROUTER_TOKEN` takes "
            "precedence. If set, every request must send `Authorization: Bearer TOKEN`."
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        kind(metavar="FILE"),
        setting(
            "The router's certificate, PEM, such as from `kvpool certs node`: clients connect by TLS. Replaced files "
            "are read again. Off loopback this, or `plaintext`, is required."
        ),
    ] = ""
    tls_key: Annotated[
        str, kind(metavar="FILE"), setting("The private key of `tls_cert`, PEM.")
    ] = ""
    plaintext: Annotated[
        bool,
        setting(
            "Listen off loopback without TLS: whoever sees the network reads prompts, answers and tokens, and may "
            "use these. For a trusted network, or behind a proxy with TLS."
        ),
    ] = False
    tenants: Annotated[
        dict[Name, TenantTable],
        setting(
            "`[tenants.NAME]`: `token_file`, `weight` of its share of the engines under load (1), `priority_max` "
            "(0), `region` (none), [`intents`](router.md#intents) that it may have (none).",
            file_only=True,
        ),
    ] = {}
    isolate: Annotated[
        bool,
        setting(
            "Keep tenants' caches apart: [isolation](router.md#isolation). Tenants of one `region` share them."
        ),
    ] = False
    isolate_secret_file: Annotated[
        str,
        kind(metavar="FILE"),
        setting(
            "A file of mode 0600 with the secret of the isolation, the same for all routers of these engines: `kvpool "
            "secret create` makes one. Required with `isolate`. Another secret is another cache."
        ),
    ] = ""
    models: Annotated[
        dict[ModelName, ModelTable],
        setting(
            '`[models."NAME"]`: `tokenizer`, the folder with this model\'s `tokenizer.json`, so that the router '
            "[tokenises its prompts itself](router.md#tokenizers). Needs the package's extra `tokenizer`.",
            file_only=True,
        ),
    ] = {}
    engines: Annotated[
        tuple[EngineTable, ...],
        kind(parse=_engines, metavar="URL"),
        setting(
            "An engine's URL and its properties: `http://10.0.0.5:8000,role=decode,node=b`. In the file "
            "`[[engines]]`, see below.",
            option="--engine",
        ),
    ] = ()
    announced_from: Annotated[
        tuple[str, ...],
        kind(parse=parse_entries, metavar="NETWORK"),
        setting(
            "Where [announced engines](router.md#engines) may be: networks (`10.0.0.0/8`), names, or ends of names "
            "(`*.engines.local`). Others get no requests. Engines that are configured may be anywhere.",
            option="--announced-from",
        ),
    ] = LOOPBACK
    daemon: Annotated[
        bool, setting("Ask this host's daemon for engines and for the pool's contents.")
    ] = True
    socket: Annotated[
        str,
        kind(metavar="PATH"),
        setting("Path of the daemon's control socket.", default="as the daemon's"),
    ] = ""
    routers: Annotated[
        tuple[str, ...],
        kind(parse=parse_routers, metavar="URL"),
        setting(
            "The other routers of these engines, of which [one schedules for all](router.md#several-routers): URLs of "
            "hosts, or of a name that has all their addresses. This router's own may be among them.",
            option="--router",
        ),
    ] = ()
    routers_ca: Annotated[
        str,
        kind(metavar="FILE"),
        setting(
            "With `routers` by `https`: the certificate authority of their certificates, PEM. Default: the system's.",
            file_only=True,
        ),
    ] = ""
    policy: Annotated[
        str, setting("The [policy](scheduling.md#policies) that chooses the engine for a prompt.")
    ] = DEFAULT_POLICY
    deadline_s: Annotated[
        Seconds, setting("A request's deadline, unless its header sets another.")
    ] = 600.0
    body_bytes_max: Annotated[
        Bytes,
        setting("The largest body of a request. Larger ones are refused: 413.", file_only=True),
    ] = 16 << 20
    requests_max: Annotated[
        Count,
        setting(
            "Active requests, including waiting ones, and request bodies being received; more of either are "
            "refused: 429.",
            file_only=True,
        ),
    ] = 2048
    stall_s: Annotated[
        Seconds,
        setting(
            "An answer that has begun ends with an error when its engine's probes fail and it has sent nothing for this "
            "long.",
            file_only=True,
        ),
    ] = 30.0
    retries_max: Annotated[
        int,
        setting(
            "How often a request is retried after its engine failed.", ge=0, le=16, file_only=True
        ),
    ] = 2
    probe_s: Annotated[
        Seconds, setting("How often each engine's `/health` is requested.", file_only=True)
    ] = 2.0
    drain_s: Annotated[Seconds, setting("How long active requests may continue after SIGTERM.")] = (
        60.0
    )
    reuse_port: Annotated[
        bool,
        setting(
            "Share the port with other routers of the same user (SO_REUSEPORT), so that the next one can start before "
            "this one ends: after SIGTERM this one accepts no connections, and serves those that it has."
        ),
    ] = False
    ttft_slo_s: Annotated[
        Seconds | None,
        kind("seconds, above 0 and at most 86400", metavar="SECONDS"),
        setting(
            "A request whose estimated time to first token is longer is refused: 429.",
            file_only=True,
        ),
    ] = None
    tpot_slo_s: Annotated[
        Seconds | None,
        kind("seconds, above 0 and at most 86400", metavar="SECONDS"),
        setting(
            "A request whose estimated time per token is longer is refused: 429.", file_only=True
        ),
    ] = None
    priority_max: Annotated[
        int,
        setting(
            "The highest priority of requests without a tenant.", ge=-100, le=100, file_only=True
        ),
    ] = 100
    log_level: Annotated[
        LogLevel, setting("The lowest level that is logged. `-v` is short for `info`.")
    ] = "warning"
    log_format: Annotated[
        LogFormat,
        setting("One line of text per record, or one [JSON object](operations.md#logs) per line."),
    ] = "text"
    otlp: Annotated[
        str,
        kind(parse=otlp_endpoint, metavar="URL"),
        setting(
            "The collector of [traces](tracing.md) by OTLP over HTTP: `http://127.0.0.1:4318`. Needs the package's "
            "extra `tracing`. None: nothing is recorded."
        ),
    ] = ""
    trace_share: Annotated[
        float,
        kind("a share from 0 to 1"),
        setting(
            "With `otlp`, the share of requests without a trace context that start a trace: 0 to 1.",
            ge=0,
            le=1,
        ),
    ] = 0.01
    record: Annotated[
        str,
        kind(metavar="FILE"),
        setting(
            "A file for a [recording](router.md#recordings) of all requests, for `kvpool sim` and `kvpool plan`: "
            "lengths, times and salted hashes, no text. Each router needs its own."
        ),
    ] = ""
    # Constants, which tests change.
    deadline_s_max: float = 3600.0
    """The longest deadline that a request's header may set."""
    answer_bytes_max: int = 64 << 20
    """The largest answer that is not streamed. It is buffered until it is complete, and a larger one fails with 502."""
    memory_bytes_max: int = 2 << 30
    """The most bytes of bodies, prompts and answers together, without the first 128 KiB of each request."""
    connect_s: float = 2.0
    """The longest wait for a connection to an engine."""
    client_stall_s: float = 60.0
    """A client that reads or sends nothing for this long is disconnected."""
    probe_timeout_s: float = 2.0
    """The longest wait for an answer to a probe."""
    failures_max: int = 3
    """Failed probes in a row, or failures of different requests, after which an engine gets no requests."""
    backoff_s: float = 1.0
    """The first pause of a failed engine. It is doubled each time the engine fails again."""
    backoff_s_max: float = 30.0
    """The longest such pause."""
    output_tokens: int = 512
    """The estimated length of an answer without a token limit."""
    follow_s: float = 60.0
    """How long a decode engine waits for blocks that another engine computes."""
    role_dwell_s: float = 60.0
    """The shortest time between two role changes of `flexible` engines of one kind."""
    role_smooth_s: float = 30.0
    """The time over which the load is averaged for role changes."""
    decisions_max: int = 1024
    """The number of requests that `/explain` remembers."""
    record_block_tokens: int = 64
    """The tokens of a prompt that one hash of a recording stands for, rounded up to whole blocks of the engines."""
    record_file_bytes: int = 256 << 20
    """The size at which a file of a recording is full."""
    record_files: int = 8
    """How many files of a recording are kept, the present one included."""

    @property
    def address(self) -> tuple[str, int]:
        return _address(self.listen)

    @property
    def addresses(self) -> list[str]:
        """Of both listeners; IPv6 in brackets."""
        found = [_address(listen) for listen in (self.listen, self.own_listen) if listen]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in found]


class Secrets(msgspec.Struct, frozen=True):
    """Secrets, never shown. token: the operator's; empty: none is required. tenants: names by token.

    api_keys: by URL, of configured engines. Announced ones get none: they may be anybody. isolation: of `isolate`.
    """

    token: str
    tenants: Mapping[str, str]
    api_keys: Mapping[str, str]
    isolation: bytes = b""

    def __repr__(self) -> str:
        return "Secrets()"

    def api_key_of(self, url: str) -> str:
        """Of the engine at this URL; empty: none is sent."""
        return self.api_keys.get(url.rstrip("/"), "")


SETTINGS = tuple(settings_of(RouterConfig))


def load(
    *,
    file: str | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[RouterConfig, Secrets]:
    """The configuration. `flags` that are None were not given; an `engine` is URL[,KEY=VALUE...].

    Raises `ConfigError` for a file that cannot be read, an unknown name or an invalid value;
    the message names the source.
    """
    given = from_flags(RouterConfig, flags or {})
    if file is not None:
        given = from_file(RouterConfig, file) | given
    config = RouterConfig(**{name: each.value for name, each in given.items()})
    _check(config)
    if not config.socket:
        config = msgspec.structs.replace(config, socket=default_socket_path(environ))
    secrets = _secrets(config, environ)
    _check_open("listen", config.listen, config, secrets)
    if config.own_listen:
        _check_open("own_listen", config.own_listen, config, secrets)
    if config.routers and secrets.tenants and not secrets.token:
        raise ConfigError(
            f"routers: routers know each other by the operator's token: set {TOKEN_ENVIRON}, or token_file"
        )
    return config, secrets


def _check_open(name: str, listen: str, config: RouterConfig, secrets: Secrets) -> None:
    """Who reaches an address has to have a token, and TLS."""
    host, _ = _address(listen)
    if is_loopback(host):
        return
    if not (secrets.token or secrets.tenants):
        raise ConfigError(
            f"{name}: {listen} is not loopback, so clients need a token: set {TOKEN_ENVIRON}, or token_file, "
            f"at least {TOKEN_CHARACTERS_MIN} characters (`openssl rand -hex 32` creates one)"
        )
    if not config.tls_cert and not config.plaintext:
        raise ConfigError(
            f"{name}: {listen} is not loopback, so tokens and prompts must be encrypted in transit: set "
            "tls_cert and tls_key, such as from `kvpool certs node`; or, in a trusted network or behind a proxy with "
            "TLS, plaintext (--plaintext)"
        )


def _check(config: RouterConfig) -> None:
    _address(config.listen)
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("tls_cert, tls_key: set both, or none")
    if config.isolate != bool(config.isolate_secret_file):
        raise ConfigError(
            "isolate, isolate_secret_file: set both, or none; `kvpool secret create FILE` makes the secret"
        )
    if not config.isolate and (regions := [n for n, t in config.tenants.items() if t.region]):
        raise ConfigError(f"tenants.{regions[0]}.region: has no meaning without isolate")
    if not config.isolate and (may := [n for n, t in config.tenants.items() if t.intents]):
        raise ConfigError(
            f"tenants.{may[0]}.intents: without isolate a prompt's blocks are other tenants' too: set isolate"
        )
    if config.policy not in POLICIES:
        raise ConfigError(f"policy = {config.policy!r}: must be one of {', '.join(POLICIES)}")
    if config.deadline_s > config.deadline_s_max:
        raise ConfigError(f"deadline_s must be at most {config.deadline_s_max:g} seconds")
    for table in config.engines:
        _check_events(table)
    for url in {table.url.rstrip("/") for table in config.engines}:
        _check_url(url, "engines", "http://10.0.0.5:8000")
    _check_places(config.engines)


def _check_places(tables: Sequence[EngineTable]) -> None:
    """Each engine is configured once: a URL, or ranks of it."""
    ranks: dict[str, list[EngineTable]] = {}
    for table in tables:
        ranks.setdefault(table.url.rstrip("/"), []).append(table)
    for url, same in ranks.items():
        numbers = [table.rank for table in same]
        if any(t.rank is not None and t.data_parallel_size is not None for t in same):
            raise ConfigError(f"engines: {url}: set data_parallel_size, or one table for each rank")
        if len(same) > 1 and (None in numbers or len(set(numbers)) < len(numbers)):
            raise ConfigError(f"engines: {url}: give each URL once, or each rank of it once")
        if len({table.api_key_file for table in same}) > 1:
            raise ConfigError(f"engines: {url}: its ranks have one api_key_file")
    names = [table.name for table in tables if table.name is not None]
    if len(set(names)) < len(names):
        raise ConfigError("engines: give each name once")


def _check_events(table: EngineTable) -> None:
    for name in ("events", "replay"):
        endpoint = getattr(table, name)
        if endpoint and not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(
                f"engines: {table.url}: {name} = {endpoint!r}: must be tcp://HOST:PORT or ipc:///PATH"
            )
    if not all(0 <= group < GROUPS_MAX for group in table.groups or ()):
        raise ConfigError(f"engines: {table.url}: groups must be from 0 to {GROUPS_MAX - 1}")
    try:
        by_rank(msgspec.structs.asdict(table))
    except ConfigError as error:
        raise ConfigError(f"engines: {table.url}: {error}") from None


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(
            f"listen = {listen!r}: must be HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080"
        )
    return host, int(port)


def _secrets(config: RouterConfig, environ: Mapping[str, str]) -> Secrets:
    token = secret_of(TOKEN_ENVIRON, environ) or ""
    if config.token_file and not token:
        token = read_secret_file(config.token_file, "token_file")
    tokens = {"": token} if token else {}
    for name, tenant in config.tenants.items():
        tokens[name] = read_secret_file(tenant.token_file, f"tenants.{name}.token_file")
    for name, text in tokens.items():
        if len(text) < TOKEN_CHARACTERS_MIN:
            raise ConfigError(
                f"the token {f'of tenant {name}' if name else 'of the operator'} has fewer than "
                f"{TOKEN_CHARACTERS_MIN} characters: `openssl rand -hex 32` creates one"
            )
    tenants = {text: name for name, text in tokens.items() if name}
    if len(tenants) < len(config.tenants) or token in tenants:
        raise ConfigError("tokens: each tenant needs a token of its own")
    common = secret_of(API_KEY_ENVIRON, environ) or ""
    keys = {
        table.url.rstrip("/"): read_secret_file(
            table.api_key_file, f"engines: {table.url}: api_key_file"
        )
        if table.api_key_file
        else common
        for table in config.engines
    }
    isolation = b""
    if config.isolate:
        isolation = read_secret_file(config.isolate_secret_file, "isolate_secret_file").encode()
        if len(isolation) < TOKEN_CHARACTERS_MIN:
            raise ConfigError(
                f"isolate_secret_file: the secret has fewer than {TOKEN_CHARACTERS_MIN} characters: `kvpool secret "
                "create` makes one"
            )
    return Secrets(token, tenants, keys, isolation)
