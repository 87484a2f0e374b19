"""The daemon's settings: each with its name, its kind, its default and what it is for, said here only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvpool.config import parse, tables
from kvpool.config.declare import convert_setting, kind, setting, settings_of
from kvpool.config.parse import (
    File,
    Folder,
    LogFormat,
    LogLevel,
    Name,
    Seconds,
    SecondsOrNever,
    Secret,
    Size,
    Text,
    Url,
    Urls,
)
from kvpool.config.tables import DeviceConfig, DiskConfig, TenantConfig
from kvpool.errors import ConfigError
from kvpool.types import DEFAULT_TENANT

WRITE_MODES = ("back", "through", "none")
OBJECT_WRITE_MODES = ("back", "none")
HTTP_RATE_MAX = 100_000.0

CLUSTER = "The cluster"
TIERS = "Tiers below memory"
LIMITS = "Limits"
GATEWAY = "The HTTP gateway"


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of `kvpool serve`. A value that is made directly is not checked; `kvpool.config.load` checks."""

    socket: Annotated[
        str,
        kind(parse=parse.socket_path, metavar="PATH"),
        setting(
            "Path of the control socket. Clients find it by the same rule, or by `KVPOOL_SOCKET`. Its folder is made "
            "with mode 0700 if absent.",
            default="`$XDG_RUNTIME_DIR/kvpool/kvpool.sock`; for root `/run/kvpool/kvpool.sock`; else "
            "`/tmp/kvpool-UID/kvpool.sock`",
        ),
    ]
    socket_mode: Annotated[
        int,
        kind(parse=parse.mode, metavar="MODE"),
        setting(
            "Permissions of the socket, octal. Whoever can open it can use the tenants that have no token.",
            default="600",
        ),
    ] = 0o600
    memory: Annotated[
        Size,
        setting(
            "DRAM of the default tenant: bytes (`8GiB`), or a share of the memory that is free at the start. "
            "Taken at once.",
            default="25%",
        ),
    ] = 0.25
    policy: Annotated[
        Text, setting("Eviction policy: `a2q`, `s3fifo` or `lru`.", default="a2q")
    ] = ""
    listen: Annotated[
        Urls,
        setting(
            "Where peers may pull from, such as `tcp://10.0.0.5:7070`. Port 0 takes any. A `nixl://` URL beside it: by "
            "RDMA too, [as described](../deploy/rdma.md).",
            panel=CLUSTER,
        ),
    ] = ()
    advertise: Annotated[
        Urls,
        setting(
            "The URLs that other nodes are told to use instead, one for each of `listen`. For nodes behind address "
            "translation, or where `listen` is a wildcard.",
            panel=CLUSTER,
            default="what `listen` says",
        ),
    ] = ()
    rails: Annotated[
        tuple[str, ...],
        kind(parse=parse.rails, metavar="NAME"),
        setting(
            "For each of `listen`, a name for which network cards of other nodes its own one reaches best; `-`: none. "
            "Cards with the same name reach each other ([several cards](cluster.md#several-network-cards); "
            "`--rail a --rail b`, `KVPOOL_RAILS=a,b`).",
            option="--rail",
            panel=CLUSTER,
        ),
    ] = ()
    bind_source: Annotated[
        bool,
        setting(
            "Connect to other nodes from the address of the network card that was chosen, rather than as this "
            "machine's routes say.",
            panel=CLUSTER,
        ),
    ] = False
    pull_over: Annotated[
        Literal["auto", "nixl", "tcp"],
        setting(
            "By which transport peers are pulled from where there are several. `auto`: by what is faster for the pair. "
            "The other one is what is left when that fails.",
            panel=CLUSTER,
        ),
    ] = "auto"
    probe_s: Annotated[
        SecondsOrNever,
        setting(
            "How often nodes that nothing is pulled from are asked how long an answer takes; 0: never.",
            panel=LIMITS,
        ),
    ] = 10.0
    peers: Annotated[
        Urls,
        setting(
            "A node to pull blocks from, where no membership names any.",
            option="--peer",
            panel=CLUSTER,
        ),
    ] = ()
    cluster: Annotated[
        Name, setting("The cluster's name. Peers must agree on it.", panel=CLUSTER)
    ] = "kvpool"
    cluster_secret: Annotated[
        str,
        kind(parse=parse.cluster_secret),
        setting(
            "What peers prove to each other, at least 16 random characters. Needed to listen off loopback. No flag.",
            secret=True,
        ),
    ] = ""
    tls_cert: Annotated[
        File,
        setting(
            "Our certificate for [TLS between daemons](security.md#tls-between-daemons), PEM; `kvpool certs` makes it. "
            "The file only has to be replaced to be renewed. Needed to listen off loopback, unless `plaintext`.",
            panel=CLUSTER,
        ),
    ] = ""
    tls_key: Annotated[
        File,
        setting("The key of `tls_cert`, PEM. A file that not every user may read.", panel=CLUSTER),
    ] = ""
    tls_ca: Annotated[File, setting("Who signs the nodes' certificates, PEM.", panel=CLUSTER)] = ""
    tls_crl: Annotated[
        File,
        setting(
            "Which certificates are revoked, PEM. That is `crl.pem` of `kvpool certs`. None: nobody asks.",
            panel=CLUSTER,
        ),
    ] = ""
    plaintext: Annotated[
        bool,
        setting(
            "Listen off loopback without TLS, in a network that is trusted. It takes a `cluster_secret` still. Beside "
            "`tls_cert`: let NIXL move bytes, which it does not encrypt.",
            panel=CLUSTER,
        ),
    ] = False
    join: Annotated[
        Url,
        setting(
            "The etcd that keeps the membership: `etcd://HOST:PORT[,HOST:PORT...]`, `etcds://` with TLS. "
            "`etcd://USER@HOST` where it asks who is there. Needs `listen`. None: this node is alone, but for `peers`.",
            panel=CLUSTER,
        ),
    ] = ""
    join_password: Annotated[
        Secret, setting("The password of the user that `join` names. No flag.", secret=True)
    ] = ""
    join_ca: Annotated[
        File,
        setting(
            "Who signs etcd's certificates, for `etcds://`, PEM.",
            panel=CLUSTER,
            default="the public authorities",
        ),
    ] = ""
    join_cert: Annotated[
        File, setting("Our certificate, where etcd asks for one, PEM.", panel=CLUSTER)
    ] = ""
    join_key: Annotated[File, setting("The key of `join_cert`, PEM.", panel=CLUSTER)] = ""
    member_ttl_s: Annotated[
        Seconds, setting("Silence after which etcd takes a node for dead.", panel=LIMITS)
    ] = 5.0
    directory: Annotated[
        Secret,
        kind(metavar="URL"),
        setting(
            "The Redis that keeps who holds what: `redis://HOST:PORT`, `redis+sentinel://HOST:PORT,.../SERVICE`, "
            "`redis+cluster://HOST:PORT,...`; `rediss` instead of `redis` with TLS. A password belongs into "
            "`KVPOOL_DIRECTORY_PASSWORD`. None: other nodes are asked one by one.",
            secret=True,
            option="--directory",
            panel=CLUSTER,
        ),
    ] = ""
    directory_password: Annotated[
        Secret,
        setting(
            "The password of Redis. No flag, and not in a `--directory` flag either.", secret=True
        ),
    ] = ""
    directory_ca: Annotated[
        File,
        setting(
            "Who signs Redis' certificates, for `rediss`, PEM.",
            panel=CLUSTER,
            default="the system's authorities",
        ),
    ] = ""
    directory_cert: Annotated[
        File, setting("Our certificate, where Redis asks for one, PEM.", panel=CLUSTER)
    ] = ""
    directory_key: Annotated[File, setting("The key of `directory_cert`, PEM.", panel=CLUSTER)] = ""
    directory_timeout_s: Annotated[
        Seconds,
        setting(
            "The longest that a lookup waits for Redis. What it does not say in time is a miss.",
            panel=LIMITS,
        ),
    ] = 0.5
    labels: Annotated[
        Mapping[str, str],
        kind(parse=parse.labels, metavar="NAME=VALUE"),
        setting(
            "Where this node stands: `zone=a`, `rack=7`. These two say which nodes are near and where replicas go; "
            "others are shown (`--label zone=a`, `KVPOOL_LABELS=zone=a,rack=7`, a table in the file).",
            option="--label",
            panel=CLUSTER,
        ),
    ] = msgspec.field(default_factory=dict)
    replicas_max: Annotated[
        int,
        setting(
            "The most replicas of a block that are made on request.", panel=LIMITS, ge=1, le=64
        ),
    ] = 8
    replication_bandwidth: Annotated[
        int,
        kind(parse=parse.bandwidth, metavar="SIZE"),
        setting(
            "Bytes a second that replication in the background takes at most, in and out each.",
            panel=LIMITS,
            default="256MiB",
        ),
    ] = 256 << 20
    forward: Annotated[
        bool, setting("Offer what must be evicted to nodes that have room.", panel=CLUSTER)
    ] = True
    operator_token: Annotated[
        Secret,
        setting(
            "What operators' commands must show, besides running as the daemon's own user or as root. No flag.",
            secret=True,
        ),
    ] = ""
    tenants: Annotated[
        tuple[TenantConfig, ...],
        kind(parse=tables.tenants),
        setting("Further tenants (file only), see below.", file_only=True),
    ] = ()
    ssd: Annotated[
        tuple[DiskConfig, ...],
        kind(parse=tables.disks, metavar="PATH=SIZE"),
        setting(
            "A folder for what memory gives up, and the bytes that all in it may take: `/mnt/nvme0/kvpool=400GiB`. "
            "What was there when the daemon ended is found again. A list in the file.",
            panel=TIERS,
        ),
    ] = ()
    ssd_write: Annotated[
        Literal["back", "through", "none"],
        setting(
            "When a block is written there: `through` (when it was put), `back` (ahead of its eviction from memory), "
            "`none`. Its namespace may say otherwise.",
            panel=TIERS,
        ),
    ] = "back"
    ssd_bytes_per_day: Annotated[
        int,
        kind(parse=parse.bytes_or_none, metavar="SIZE"),
        setting(
            "How much may be written there in a day, all disks together, for the sake of their lives; 0: no limit. "
            "When it runs short, only blocks that were read again are written.",
            panel=TIERS,
        ),
    ] = 0
    ssd_drain_s: Annotated[
        SecondsOrNever,
        setting(
            "How long a node that is drained goes on copying what is only on its disks; 0: not at all.",
            panel=TIERS,
        ),
    ] = 600.0
    ssd_flush_s: Annotated[
        SecondsOrNever,
        setting(
            "How long a daemon that is told to stop goes on writing what is only in memory; 0: not at all. Told a "
            "second time, it ends at once.",
            panel=TIERS,
        ),
    ] = 20.0
    object_store: Annotated[
        str,
        kind(parse=parse.object_store, metavar="URL"),
        setting(
            "Where [object storage](tiers.md#object-storage) begins, for what was read again: `s3://BUCKET/PREFIX`, "
            "`gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file:///FOLDER`. All nodes of the cluster share it. Needs "
            "the package's extra `object`; a node without `join` needs `data_dir` as well. Credentials are the "
            "environment's.",
            panel=TIERS,
        ),
    ] = ""
    object_bytes_max: Annotated[
        int,
        kind(parse=parse.object_bytes, metavar="SIZE"),
        setting(
            "How much this node keeps there, 64MiB or more. The coldest makes way.",
            panel=TIERS,
            default="100GiB",
        ),
    ] = 100 << 30
    object_instance_credentials: Annotated[
        bool,
        setting(
            "Where the environment holds no credentials, ask the metadata service of the cloud that this machine is "
            "in.",
            panel=TIERS,
        ),
    ] = False
    device: Annotated[
        DeviceConfig | None,
        kind(parse=tables.device, metavar="DEVICE=SIZE"),
        setting(
            "Spare memory of a GPU for what engines here read again: `cuda:0=8GiB`. Needs torch in the daemon's "
            "environment ([how](tiers.md#spare-gpu-memory)).",
            panel=TIERS,
        ),
    ] = None
    events: Annotated[
        bool,
        setting(
            "Follow the KV events of this node's engines, and tell others what their own caches hold. "
            "[How](vllm.md#what-the-engines-own-cache-holds)."
        ),
    ] = True
    http: Annotated[
        tuple[str, ...],
        kind(parse=parse.http_addresses, metavar="ADDRESS"),
        setting(
            "Where the [HTTP gateway](admin.md) listens: `127.0.0.1:7071`, `unix:/run/kvpool/http.sock`. Needs the "
            "package's extra `admin`. Off loopback it takes `http_tokens`, and TLS (`tls_cert`) or `plaintext`.",
            panel=GATEWAY,
        ),
    ] = ()
    http_tokens: Annotated[
        File,
        setting(
            "A TOML file of mode 0600 with those who may ask the gateway; "
            "[`kvpool token`](admin.md#tokens-and-roles) makes it. None: the daemon makes one token, in `http.token` "
            "beside the control socket.",
            panel=GATEWAY,
        ),
    ] = ""
    http_rate: Annotated[
        float,
        kind(
            f"requests a second, above 0, {HTTP_RATE_MAX:.0f} at most",
            metavar="NUMBER",
            gt=0,
            le=HTTP_RATE_MAX,
        ),
        setting(
            "Requests a second that each token may make. Twice as many at once.", panel=GATEWAY
        ),
    ] = 50.0
    routers: Annotated[
        tuple[str, ...],
        kind(parse=parse.router_urls, metavar="URL"),
        setting(
            "A router that the gateway asks about requests and engines, `http://10.0.0.9:8080`.",
            option="--router",
            panel=GATEWAY,
        ),
    ] = ()
    router_token: Annotated[
        Secret, setting("The operator's token of these routers. No flag.", secret=True)
    ] = ""
    otlp: Annotated[
        str,
        kind(parse=parse.otlp_endpoint, metavar="URL"),
        setting(
            "Where a collector takes [traces](tracing.md) by OTLP over HTTP: `http://127.0.0.1:4318`. Needs the package's "
            "extras `admin` and `tracing`. None: nothing is recorded.",
            panel=GATEWAY,
        ),
    ] = ""
    transfer_workers: Annotated[
        int, setting("Processes that move bytes between nodes.", ge=1, le=64)
    ] = 1
    data_dir: Annotated[
        Folder,
        setting(
            "A folder for what outlives the daemon, such as the epochs of namespaces where there is no etcd. Held by "
            "one daemon at a time."
        ),
    ] = ""
    node: Annotated[Name, setting("This node's name.", default="the host's name")] = ""
    log_level: Annotated[LogLevel, setting("How much is logged. `-v` is short for `info`.")] = (
        "warning"
    )
    log_format: Annotated[
        LogFormat,
        setting(
            "One line a record for people, or one [JSON object](operations.md#logs) a line for programs."
        ),
    ] = "text"
    clients_max: Annotated[
        int, setting("Open connections of clients.", panel=LIMITS, ge=1, le=1 << 16)
    ] = 1024
    peers_max: Annotated[
        int,
        setting(
            "Open connections of peers, of each transfer worker.", panel=LIMITS, ge=1, le=1 << 16
        ),
    ] = 256
    engines_max: Annotated[
        int,
        setting(
            "Engines whose KV events are followed, and as many that are announced to routers.",
            panel=LIMITS,
            ge=1,
            le=64,
        ),
    ] = 16
    lease_s_max: Annotated[Seconds, setting("The longest lease.", panel=LIMITS)] = 60.0

    def __repr__(self) -> str:
        shown = (
            f"{name}={getattr(self, name)!r}"
            for name, each in settings_of(DaemonConfig).items()
            if not each.secret
        )
        return f"DaemonConfig({', '.join(shown)})"

    def all_tenants(self) -> tuple[TenantConfig, ...]:
        """The default tenant, unless the file gives it settings of its own, and the others."""
        if any(tenant.name == DEFAULT_TENANT for tenant in self.tenants):
            return self.tenants
        return (TenantConfig(DEFAULT_TENANT, self.memory), *self.tenants)

    def ssd_shares(self) -> dict[str, float]:
        """Each tenant's part of each disk, by name.

        It follows from the configuration alone, not from how much memory was free at the start: a part
        that moves has nothing left of what was in it. Raises `ConfigError` when there is not so much.
        """
        total = sum(disk.size for disk in self.ssd)
        if not total:
            return {}
        tenants = self.all_tenants()
        shares = {
            tenant.name: tenant.ssd / total if isinstance(tenant.ssd, int) else tenant.ssd
            for tenant in tenants
            if tenant.ssd is not None
        }
        left, others = 1 - sum(shares.values()), len(tenants) - len(shares)
        if left < -1e-9 or (others and left < 1e-9):
            raise ConfigError(
                f"tenants' parts of the disks (ssd) are {1 - left:.0%} of them, and {others} more have none "
                f"named: give less"
            )
        return {tenant.name: shares.get(tenant.name, left / max(1, others)) for tenant in tenants}


SETTINGS = tuple(settings_of(DaemonConfig))
SECRETS = tuple(name for name, each in settings_of(DaemonConfig).items() if each.secret)
"""Those that KVPOOL_NAME_FILE may be said of. A URL of the directory may hold a password."""


def parse_setting(name: str, value: object, where: str = "") -> Any:
    """What one setting of `DaemonConfig` is when it is given so. Raises `ConfigError`."""
    return convert_setting(DaemonConfig, name, value, where or name)
