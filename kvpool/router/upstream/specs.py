"""The engines that requests can be sent to: configured, announced, or both.

An engine's plugin announces it to the daemon of its node (`kvpool.types.EngineRecord`), and all nodes see it.
The router's configuration of the same URL takes precedence, field by field. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvpool.errors import ConfigError
from kvpool.placement.kv_events.engine_blocks import GROUPS_MAX
from kvpool.router.hashing import DEFAULT_SEED, HashSpec, none_hash
from kvpool.scheduler.values import Engine, Role
from kvpool.types import ENGINE_SIZE_MAX, api_path_of

ROLES = {"both": Role.BOTH, "prefill": Role.PREFILL, "decode": Role.DECODE}
CAPACITY_TOKENS = 1 << 20
STEP_TOKENS = 2048
"""Assumed for an engine that does not announce the size of its cache or of a step."""
DEFAULT_ALGORITHM = "sha256_cbor"
RANK_HEADER = "X-data-parallel-rank"
PORT_MAX = (1 << 16) - 1


class Place(NamedTuple):
    """Where requests reach an engine: its server, and its data-parallel rank there; None: the server is the engine."""

    url: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine: a server with an OpenAI-compatible API, and the known properties of its cache.

    url: without a trailing slash. rank: its data-parallel rank, of several behind the URL; None: it is the only
    engine there, or the server spreads requests over ranks by itself. name: unique; host:port of the URL unless
    configured, and the rank. node: whose daemon it
    uses; empty: not known, or none. role: its current use; flexible: whether that may change.
    labels: of the node's location.
    model: the name that it was configured or announced with, or its first one. models: all its names,
    adapters included, from the engine itself; adapters: by name, where each was loaded from. kind: engines of one
    kind share estimates; the model and the namespace unless configured.
    events, replay, topic: ZeroMQ addresses of its KV events; empty: none.
    namespace: digest; empty: not known. groups: the cache groups that must hold a block for it to count as
    held; empty: its cache is not followed. hashing: None: its hashes are not known, or were found
    wrong; no block is looked up for it.
    capacity_tokens: of its cache. step_tokens: of a step; `steps_at_once` are computed at a time. block_bytes: of a
    block, all ranks; 0: not known.
    follows_max: how many prompts it may follow at a time. max_len: tokens of prompt and answer; 0: not known.
    """

    url: str
    rank: int | None = None
    name: str = ""
    node: str = ""
    role: Role = Role.BOTH
    flexible: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    models: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    events: str = ""
    replay: str = ""
    topic: str = ""
    namespace: bytes = b""
    groups: tuple[int, ...] = ()
    hashing: HashSpec | None = None
    capacity_tokens: int = CAPACITY_TOKENS
    step_tokens: int = STEP_TOKENS
    steps_at_once: int = 1
    block_bytes: int = 0
    follows_max: int = 0
    max_len: int = 0

    @property
    def place(self) -> Place:
        return Place(self.url, self.rank)

    @property
    def rank_header(self) -> dict[str, str]:
        """For each request that its server is to give to this engine."""
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}

    def serves(self, model: str) -> bool:
        """Whether it accepts requests for the model; empty: for its default model."""
        return not model or model == self.model or model in self.models


_SIZES = {
    "capacity_tokens": CAPACITY_TOKENS,
    "step_tokens": STEP_TOKENS,
    "steps_at_once": 1,
    "block_bytes": 0,
    "follows_max": 0,
    "max_len": 0,
}


def spec_of(
    url: str, *, announced: Mapping[str, Any] | None, table: Mapping[str, Any] | None
) -> EngineSpec:
    """An engine from its announcement (`Client.routing.engines`) and configuration (`[[engines]]`).

    The rank is the configured one, or else the announced one. Unknown announced hashes are dropped: the engine may be
    newer than this router. Raises `ConfigError` for invalid values, and for unknown configured hashes.
    """
    said = {} if announced is None else announced
    given = {} if table is None else table

    def known(name: str, default: Any) -> Any:
        return given.get(name) or said.get(name) or default

    url = url.rstrip("/")
    if path := api_path_of(url):
        raise ConfigError(f"its URL is {url:.200}: leave out {path}")
    try:
        scheme, host, *_ = urlsplit(url)
        namespace = bytes.fromhex(known("namespace", ""))
    except ValueError as error:
        raise ConfigError(f"{error}") from None
    if scheme not in {"http", "https"} or not host:
        raise ConfigError(f"its URL is {url!r:.100}, not http://HOST:PORT")
    role = known("role", "both")
    if role not in ROLES:
        raise ConfigError(f"its role is {role!r:.100}, not one of {', '.join(ROLES)}")
    groups = tuple(known("groups", (0,) if announced is None else ()))
    if not all(0 <= group < GROUPS_MAX for group in groups):
        raise ConfigError(f"its groups are not from 0 to {GROUPS_MAX - 1}")
    model = str(known("model", ""))
    # A path is on the engine's own machine.
    elsewhere = "ipc://" if announced is not None and not said["here"] else "\0"
    endpoints = {
        name: given.get(name) or ("" if str(value).startswith(elsewhere) else value)
        for name in ("events", "replay")
        for value in [said.get(name, "")]
    }
    events = str(endpoints["events"])
    rank = given.get("rank", said.get("rank"))
    sizes = {name: known(name, default) for name, default in _SIZES.items()}
    if not all(0 <= size <= ENGINE_SIZE_MAX for size in (*sizes.values(), rank or 0)):
        raise ConfigError(f"its sizes and its rank are not from 0 to {ENGINE_SIZE_MAX}")
    return EngineSpec(
        url,
        rank,
        name=given.get("name") or _rank_name(host, rank),
        node=known("node", ""),
        role=ROLES[role],
        flexible=bool(known("flexible", False)),
        labels=dict(known("labels", {})),
        model=model,
        kind=known("kind", _kind(model, namespace)),
        events=events,
        replay=str(endpoints["replay"]) if events else "",
        topic=known("topic", ""),
        namespace=namespace,
        groups=groups,
        hashing=_hashing(said, given),
        **sizes,
    )


def by_rank(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A configured engine as one for each of its `data_parallel_size` ranks; itself without that.

    Raises `ConfigError` if ranks cannot have events of their own.
    """
    size = table.get("data_parallel_size")
    return [table] if size is None else [of_rank(table, rank) for rank in range(size)]


def of_rank(table: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """The configuration of one rank of an engine: its events are published at the next ports, as vLLM does it.

    Raises `ConfigError` if that is no port.
    """
    own = {key: value for key, value in table.items() if key != "data_parallel_size"}
    own["rank"] = rank
    if name := table.get("name"):
        own["name"] = _rank_name(name, rank)
    for field_name in ("events", "replay"):
        if endpoint := table.get(field_name):
            own[field_name] = _next_port(endpoint, rank)
    return own


def _rank_name(name: str, rank: int | None) -> str:
    return name if rank is None else f"{name}-dp{rank}"


def _next_port(endpoint: str, offset: int) -> str:
    if not offset:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or int(port) + offset > PORT_MAX:
        raise ConfigError(
            f"{endpoint}: further data-parallel ranks publish at the next ports, so it must be tcp://HOST:PORT with "
            f"{offset} more ports"
        )
    return f"{address}:{int(port) + offset}"


def _kind(model: str, namespace: bytes) -> str:
    """Engines of one model and namespace are as fast as each other; of other ranks or types they are not."""
    return f"{model}@{namespace.hex()[:8]}" if model and namespace else model


def _hashing(said: Mapping[str, Any], given: Mapping[str, Any]) -> HashSpec | None:
    block_tokens = given.get("block_tokens") or said.get("block_tokens") or 0
    if not block_tokens:
        return None
    algorithm = given.get("hash") or said.get("hash_algorithm") or DEFAULT_ALGORITHM
    own = "hash" in given or "hash_seed" in given
    try:
        begins = b"" if own else bytes.fromhex(said.get("none_hash", ""))
        begins = begins or none_hash(algorithm, given.get("hash_seed", DEFAULT_SEED))
        return HashSpec(block_tokens, algorithm, begins)
    except (ConfigError, ValueError):
        if given.get("hash"):
            raise
        return None


def with_models(spec: EngineSpec, cards: Sequence[Mapping[str, Any]]) -> EngineSpec:
    """With the answer of the engine's `/v1/models`: names, adapters, and the longest prompt."""
    cards = [card for card in cards if isinstance(card.get("id"), str)]
    base = [card for card in cards if not card.get("parent")]
    lengths = [card["max_model_len"] for card in base if isinstance(card.get("max_model_len"), int)]
    names = tuple(card["id"] for card in cards)
    model = spec.model or (base[0]["id"] if base else "")
    return replace(
        spec,
        model=model,
        models=names,
        adapters={card["id"]: str(card.get("root") or "") for card in cards if card.get("parent")},
        kind=spec.kind or _kind(model, spec.namespace),
        max_len=spec.max_len or max(lengths, default=0),
    )


def scheduled(spec: EngineSpec) -> Engine:
    """The engine in the scheduler's form, idle."""
    return Engine(
        spec.name,
        spec.node,
        spec.role,
        spec.kind,
        gpu_holder(spec),
        pool_holders(spec.node, spec.namespace),
        spec.capacity_tokens,
        labels=spec.labels,
        follows_max=spec.follows_max if spec.node else 0,
        flexible=spec.flexible,
        steps_at_once=spec.steps_at_once,
        namespace=spec.namespace.hex(),
    )


def gpu_holder(spec: EngineSpec) -> str:
    """The prefix index's name of the engine's own cache."""
    return f"gpu:{spec.name}"


def pool_holders(node: str, namespace: bytes) -> tuple[str, ...]:
    """The prefix index's names of a node's tiers for engines of a namespace: memory, and memory with disks.

    None for an unknown namespace: nobody knows what its engines could use of each other's blocks.
    """
    if not node or not namespace:
        return ()
    place = f"{node}/{namespace.hex()[:8]}"
    return f"dram:{place}", f"ssd:{place}"


def differs(old: EngineSpec, new: EngineSpec) -> bool:
    """Whether the scheduler must be updated: the results of `scheduled` differ."""
    return any(getattr(old, name) != getattr(new, name) for name in _SCHEDULED)


_SCHEDULED = (
    *("url", "name", "node", "role", "kind", "namespace", "capacity_tokens", "labels"),
    *("follows_max", "flexible", "steps_at_once"),
)
