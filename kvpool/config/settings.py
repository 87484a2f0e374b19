"""The daemon's settings: name, kind, default and description, declared only here."""

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
from kvpool.config.tables import DeviceConfig, DiskConfig, StreamConfig, TenantConfig
from kvpool.errors import ConfigError
from kvpool.net import operator_socket_of
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
            "Path of the control socket. Clients use the same default, or `KVPOOL_SOCKET`. Its folder is created "
            "with mode 0700 if missing.",
            default="`$XDG_RUNTIME_DIR/kvpool/kvpool.sock`; for root `/run/kvpool/kvpool.sock`; else "
            "`/tmp/kvpool-UID/kvpool.sock`",
        ),
    ]
    socket_mode: Annotated[
        int,
        kind(parse=parse.mode, metavar="MODE"),
        setting(
            "Permissions of the socket, octal. Anyone who can open it can use the tenants that have no token.",
            default="600",
        ),
    ] = 0o600
    operator_socket: Annotated[
        str,
        kind(parse=parse.socket_path, metavar="PATH"),
        setting(
            "Path of the operators' socket, of mode 0600: whoever can open it is an operator. Put it into another "
            "folder where containers mount the folder of `socket`. The commands use the same default, or "
            "`KVPOOL_OPERATOR_SOCKET`.",
            default="`socket`.operator",
        ),
    ] = ""
    memory: Annotated[
        Size,
        setting(
            "DRAM of the default tenant: bytes (`8GiB`), or a share of the memory that is free at the start. "
            "Allocated at the start.",
            default="10%",
        ),
    ] = 0.1
    memory_wait_s: Annotated[
        SecondsOrNever,
        setting(
            "How long a starting daemon waits for memory that is not free yet: engines let go of an ended daemon's "
            "only when they learn of its end. 0: not at all.",
        ),
    ] = 30.0
    policy: Annotated[Text, setting("Eviction policy: `aged` or `lru`.", default="aged")] = ""
    listen: Annotated[
        Urls,
        setting(
            "URLs where peers may pull from, such as `tcp://10.0.0.5:7070`. Port 0 takes any free port. Add a "
            "`nixl://` URL for RDMA, [as described](../deploy/rdma.md).",
            panel=CLUSTER,
        ),
    ] = ()
    advertise: Annotated[
        Urls,
        setting(
            "The URLs that other nodes use instead, one for each of `listen`. For nodes behind address translation, "
            "or if `listen` is a wildcard.",
            panel=CLUSTER,
            default="what `listen` says",
        ),
    ] = ()
    rails: Annotated[
        tuple[str, ...],
        kind(parse=parse.rails, metavar="NAME"),
        setting(
            "A name for the network of each `listen`'s card; cards with the same name reach each other directly; "
            "`-`: none ([several cards](cluster.md#several-network-cards); `--rail a --rail b`, `KVPOOL_RAILS=a,b`).",
            option="--rail",
            panel=CLUSTER,
        ),
    ] = ()
    bind_source: Annotated[
        bool,
        setting(
            "Connect to other nodes from the address of the chosen network card, instead of the address that this "
            "machine's routes select.",
            panel=CLUSTER,
        ),
    ] = False
    pull_over: Annotated[
        Literal["auto", "nixl", "tcp"],
        setting(
            "The transport for pulls from peers that offer several. `auto`: the faster one for each pair. If it "
            "fails, the other one is used.",
            panel=CLUSTER,
        ),
    ] = "auto"
    probe_s: Annotated[
        SecondsOrNever,
        setting(
            "How often to measure the response time of nodes from which nothing is pulled; 0: never.",
            panel=LIMITS,
        ),
    ] = 10.0
    peers: Annotated[
        Urls,
        setting(
            "A node to pull blocks from, if there is no membership service.",
            option="--peer",
            panel=CLUSTER,
        ),
    ] = ()
    cluster: Annotated[
        Name, setting("The cluster's name. It must be the same on all peers.", panel=CLUSTER)
    ] = "kvpool"
    cluster_secret: Annotated[
        str,
        kind(parse=parse.secret),
        setting(
            "The shared secret with which peers authenticate, at least 16 random characters. To listen off loopback, "
            "this or `cluster_secret_file` is required. No flag.",
            secret=True,
        ),
    ] = ""
    cluster_secret_file: Annotated[
        File,
        setting(
            "The file with that secret, of mode 0600: `kvpool secret create` makes one. It is read again when it "
            "changes, and may name an older secret that is still accepted for a time: [changing "
            "it](security.md#changing-the-cluster-secret).",
            panel=CLUSTER,
            default="with `listen` or `peers`, a file made for this user and machine: "
            "`~/.local/state/kvpool/CLUSTER.secret`",
        ),
    ] = ""
    operated_by: Annotated[
        tuple[str, ...],
        kind(parse=parse.names, metavar="NODE"),
        setting(
            "The nodes whose operators may act on this one, such as those with an HTTP gateway: their names. Needs "
            "`tls_cert`, which proves names.",
            panel=CLUSTER,
            default="all nodes of the cluster",
        ),
    ] = ()
    tls_cert: Annotated[
        File,
        setting(
            "This node's certificate for [TLS between daemons](security.md#tls-between-daemons), PEM; `kvpool "
            "certs` creates it. To renew it, replace the file. Required to listen off loopback, unless `plaintext` "
            "is set.",
            panel=CLUSTER,
        ),
    ] = ""
    tls_key: Annotated[
        File,
        setting(
            "The private key of `tls_cert`, PEM. The file must not be readable by all users.",
            panel=CLUSTER,
        ),
    ] = ""
    tls_ca: Annotated[
        File, setting("The certificate authority of the nodes' certificates, PEM.", panel=CLUSTER)
    ] = ""
    tls_crl: Annotated[
        File,
        setting(
            "The revoked certificates, PEM: `crl.pem` of `kvpool certs`. None: revocation is not checked.",
            panel=CLUSTER,
        ),
    ] = ""
    plaintext: Annotated[
        bool,
        setting(
            "Listen off loopback without TLS, in a trusted network. A `cluster_secret` is still required. With "
            "`tls_cert`: allow NIXL transfers, which are not encrypted.",
            panel=CLUSTER,
        ),
    ] = False
    join: Annotated[
        Url,
        setting(
            "The etcd that stores the membership: `etcd://HOST:PORT[,HOST:PORT...]`, `etcds://` with TLS. "
            "`etcd://USER@HOST` if it requires authentication. Needs `listen`. None: this node is alone, except for "
            "`peers`.",
            panel=CLUSTER,
        ),
    ] = ""
    join_password: Annotated[
        Secret, setting("The password of the user in `join`. No flag.", secret=True)
    ] = ""
    join_ca: Annotated[
        File,
        setting(
            "The certificate authority of etcd's certificates, for `etcds://`, PEM.",
            panel=CLUSTER,
            default="the public authorities",
        ),
    ] = ""
    join_cert: Annotated[
        File, setting("The client certificate, if etcd requires one, PEM.", panel=CLUSTER)
    ] = ""
    join_key: Annotated[File, setting("The private key of `join_cert`, PEM.", panel=CLUSTER)] = ""
    member_ttl_s: Annotated[
        Seconds,
        setting("Seconds without a sign of life after which etcd removes a node.", panel=LIMITS),
    ] = 5.0
    directory: Annotated[
        Secret,
        kind(metavar="URL"),
        setting(
            "The Redis that stores the directory: `redis://HOST:PORT`, `redis+sentinel://HOST:PORT,.../SERVICE`, "
            "`redis+cluster://HOST:PORT,...`; `rediss` instead of `redis` with TLS. Set the password in "
            "`KVPOOL_DIRECTORY_PASSWORD`. None: other nodes are asked one by one.",
            secret=True,
            option="--directory",
            panel=CLUSTER,
        ),
    ] = ""
    directory_password: Annotated[
        Secret,
        setting(
            "The password of Redis. No flag; do not put it into the `--directory` URL either.",
            secret=True,
        ),
    ] = ""
    plaintext_passwords: Annotated[
        bool,
        setting(
            "Send the passwords of etcd and Redis unencrypted to other machines, in a trusted network. With etcds:// and "
            "rediss:// it is not needed.",
            panel=CLUSTER,
        ),
    ] = False
    directory_ca: Annotated[
        File,
        setting(
            "The certificate authority of Redis' certificates, for `rediss`, PEM.",
            panel=CLUSTER,
            default="the system's authorities",
        ),
    ] = ""
    directory_cert: Annotated[
        File, setting("The client certificate, if Redis requires one, PEM.", panel=CLUSTER)
    ] = ""
    directory_key: Annotated[
        File, setting("The private key of `directory_cert`, PEM.", panel=CLUSTER)
    ] = ""
    directory_timeout_s: Annotated[
        Seconds,
        setting(
            "The longest that a lookup waits for Redis. Blocks without an answer in time are misses.",
            panel=LIMITS,
        ),
    ] = 0.5
    labels: Annotated[
        Mapping[str, str],
        kind(parse=parse.labels, metavar="NAME=VALUE"),
        setting(
            "This node's location: `zone=a`, `rack=7`. These two decide which nodes are near and where replicas go; "
            "others are only displayed (`--label zone=a`, `KVPOOL_LABELS=zone=a,rack=7`, a table in the file).",
            option="--label",
            panel=CLUSTER,
        ),
    ] = msgspec.field(default_factory=dict)
    replicas_max: Annotated[
        int,
        setting(
            "The most replicas of a block that a client or operator can request.",
            panel=LIMITS,
            ge=1,
            le=64,
        ),
    ] = 8
    namespace_unused_days: Annotated[
        int,
        setting(
            "A namespace that nothing in the cluster has used for so many days is deleted: no client has it open, and no "
            "node has blocks of it in memory or on disks. 0: never.",
            panel=LIMITS,
            ge=0,
            le=3650,
        ),
    ] = 30
    replication_bandwidth: Annotated[
        int,
        kind(parse=parse.bandwidth, metavar="SIZE"),
        setting(
            "The most bytes a second that background replication may use, in each direction.",
            panel=LIMITS,
            default="256MiB",
        ),
    ] = 256 << 20
    forward: Annotated[
        bool,
        setting(
            "Offer blocks that are about to be evicted to nodes with free memory.", panel=CLUSTER
        ),
    ] = True
    operator_token: Annotated[
        str,
        kind(parse=parse.secret),
        setting(
            "The token that makes its holder an operator, by either socket; then the operators' socket alone does "
            "not. At least 16 characters. No flag.",
            secret=True,
        ),
    ] = ""
    announce: Annotated[
        bool,
        setting(
            "Clients of the default tenant may announce [engines to routers](router.md#announced-engines). Of other "
            "tenants only those with `announce = true`."
        ),
    ] = True
    tenants: Annotated[
        tuple[TenantConfig, ...],
        kind(parse=tables.tenants),
        setting("Further tenants (file only), see below.", file_only=True),
    ] = ()
    publish_events: Annotated[
        tuple[StreamConfig, ...],
        kind(parse=tables.streams),
        setting(
            "Streams of [KV events](events.md#configuration) of what is in this node's memory and on its disks (file "
            "only).",
            file_only=True,
        ),
    ] = ()
    ssd: Annotated[
        tuple[DiskConfig, ...],
        kind(parse=tables.disks, metavar="PATH=SIZE"),
        setting(
            "A folder for blocks evicted from memory, and the most bytes that it may use: "
            "`/mnt/nvme0/kvpool=400GiB`. Its blocks survive a restart of the daemon. A list in the file.",
            panel=TIERS,
        ),
    ] = ()
    ssd_write: Annotated[
        Literal["back", "through", "none"],
        setting(
            "When a block is written to SSD: `through` (after the put), `back` (before its eviction from memory), "
            "`none`. A namespace's own setting takes precedence.",
            panel=TIERS,
        ),
    ] = "back"
    ssd_bytes_per_day: Annotated[
        int,
        kind(parse=parse.bytes_or_none, metavar="SIZE"),
        setting(
            "The most bytes written to all disks together in a day, to limit wear; 0: no limit. When little is "
            "left, only blocks that were read again are written.",
            panel=TIERS,
        ),
    ] = 0
    ssd_drain_s: Annotated[
        SecondsOrNever,
        setting(
            "How long a draining node copies blocks that are only on its disks; 0: not at all.",
            panel=TIERS,
        ),
    ] = 600.0
    ssd_flush_s: Annotated[
        SecondsOrNever,
        setting(
            "How long a stopping daemon writes blocks that are only in memory; 0: not at all. A second signal ends "
            "it at once.",
            panel=TIERS,
        ),
    ] = 20.0
    encryption_secret_file: Annotated[
        File,
        setting(
            "[Encrypt blocks](security.md#encryption-at-rest) on disks and in object storage, with keys from the secrets "
            "in this file, of mode 0600: `kvpool secret create` makes one. It is read again when it changes. Nodes that "
            "share object storage need a secret in common.",
            panel=TIERS,
        ),
    ] = ""
    encryption_secret_command: Annotated[
        str,
        setting(
            "A command that prints such secrets, run without a shell at the start and every five minutes: "
            "`vault kv get -field=secret kv/kvpool`.",
            panel=TIERS,
        ),
    ] = ""
    object_store: Annotated[
        str,
        kind(parse=parse.object_store, metavar="URL"),
        setting(
            "URL of the [object storage](tiers.md#object-storage), for blocks that were read again: "
            "`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file:///FOLDER`. Shared by all "
            "nodes of the cluster. Needs the package's extra `object`; a node without `join` also needs `data_dir`. "
            "Credentials are read from the environment.",
            panel=TIERS,
        ),
    ] = ""
    object_bytes_max: Annotated[
        int,
        kind(parse=parse.object_bytes, metavar="SIZE"),
        setting(
            "The most bytes that this node keeps there, 64MiB or more. The coldest objects are deleted first.",
            panel=TIERS,
            default="100GiB",
        ),
    ] = 100 << 30
    object_instance_credentials: Annotated[
        bool,
        setting(
            "If the environment has no credentials, get them from the metadata service of this machine's cloud.",
            panel=TIERS,
        ),
    ] = False
    device: Annotated[
        DeviceConfig | None,
        kind(parse=tables.device, metavar="DEVICE=SIZE"),
        setting(
            "Spare GPU memory for blocks that engines on this node read again: `cuda:0=8GiB`. Needs torch in the "
            "daemon's environment ([how](tiers.md#spare-gpu-memory)).",
            panel=TIERS,
        ),
    ] = None
    events: Annotated[
        bool,
        setting(
            "Subscribe to the KV events of this node's engines, and announce the blocks in their caches to other "
            "nodes. [How](vllm.md#what-the-engines-own-cache-holds)."
        ),
    ] = True
    http: Annotated[
        tuple[str, ...],
        kind(parse=parse.http_addresses, metavar="ADDRESS"),
        setting(
            "Where the [HTTP gateway](admin.md) listens: `127.0.0.1:7071`, `unix:/run/kvpool/http.sock`. Off "
            "loopback it requires `http_tokens`, and TLS (`tls_cert`) or `plaintext`.",
            panel=GATEWAY,
        ),
    ] = ()
    http_tokens: Annotated[
        File,
        setting(
            "A TOML file of mode 0600 with the gateway's tokens; [`kvpool token`](admin.md#tokens-and-roles) "
            "creates it. None: the daemon creates one token, in `http.token` beside the control socket.",
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
            "Requests a second allowed for each token; bursts of twice as many.", panel=GATEWAY
        ),
    ] = 50.0
    routers: Annotated[
        tuple[str, ...],
        kind(parse=parse.router_urls, metavar="URL"),
        setting(
            "URL of a router whose requests and engines the gateway reports, `http://10.0.0.9:8080`.",
            option="--router",
            panel=GATEWAY,
        ),
    ] = ()
    router_ca: Annotated[
        File,
        setting(
            "The certificate authority of these routers, PEM. None: that of `tls_ca`. Public authorities are trusted too.",
            panel=GATEWAY,
        ),
    ] = ""
    router_token: Annotated[
        str,
        kind(parse=parse.secret),
        setting("The operator's token of these routers. No flag.", secret=True),
    ] = ""
    otlp: Annotated[
        str,
        kind(parse=parse.otlp_endpoint, metavar="URL"),
        setting(
            "The collector of [traces](tracing.md) by OTLP over HTTP: `http://127.0.0.1:4318`. Needs the package's "
            "extra `tracing`. None: nothing is recorded.",
            panel=GATEWAY,
        ),
    ] = ""
    transfer_workers: Annotated[
        int,
        setting(
            "Number of transfer workers: processes that move bytes between nodes.", ge=1, le=64
        ),
    ] = 1
    data_dir: Annotated[
        Folder,
        setting(
            "A folder for state that must survive a restart, such as the epochs of namespaces without etcd. Used by "
            "one daemon at a time."
        ),
    ] = ""
    receipts_bytes: Annotated[
        int,
        kind(parse=parse.bytes_or_none, metavar="SIZE"),
        setting(
            "How much is kept of [tenants' accounts](admin.md#receipts) in `data_dir`, the oldest going first. 0: "
            "nothing is written.",
            default="64MiB",
        ),
    ] = 64 << 20
    node: Annotated[Name, setting("This node's name.", default="the host's name")] = ""
    log_level: Annotated[
        LogLevel, setting("The lowest level that is logged. `-v` is short for `info`.")
    ] = "warning"
    log_format: Annotated[
        LogFormat,
        setting("One line of text per record, or one [JSON object](operations.md#logs) per line."),
    ] = "text"
    audit_file: Annotated[
        File,
        setting(
            "A file that keeps [operators' changes and failed logins](security.md#the-audit-file), each record chained to "
            "the one before."
        ),
    ] = ""
    audit_file_bytes: Annotated[
        int,
        kind(parse=parse.audit_bytes, metavar="SIZE"),
        setting("The size at which the audit file is rotated, 64KiB or more.", default="64MiB"),
    ] = 64 << 20
    audit_files: Annotated[
        int,
        setting("How many audit files are kept, the present one included.", ge=1, le=1000),
    ] = 10
    clients_max: Annotated[
        int,
        setting(
            "The most open connections of clients. Half of it is kept in equal parts for the tenants; operators come "
            "on top.",
            panel=LIMITS,
            ge=1,
            le=1 << 16,
        ),
    ] = 1024
    peers_max: Annotated[
        int,
        setting(
            "The most open connections of peers, per transfer worker; idle ones make way for new ones.",
            panel=LIMITS,
            ge=1,
            le=1 << 16,
        ),
    ] = 256
    engines_max: Annotated[
        int,
        setting(
            "The most engines whose KV events are followed; also the most engines announced to routers. Half of it "
            "is kept in equal parts for the tenants.",
            panel=LIMITS,
            ge=1,
            le=64,
        ),
    ] = 16
    lease_s_max: Annotated[Seconds, setting("The longest lease.", panel=LIMITS)] = 60.0
    departures_max: Annotated[
        int,
        setting(
            "How many blocks that left a tier of this node are remembered, to say [why a read missed them]"
            "(operations.md#why-was-it-a-miss): 34 bytes each. 0: none, and reads are not told apart.",
            panel=LIMITS,
            ge=0,
            le=1 << 24,
        ),
    ] = 1 << 17

    def __repr__(self) -> str:
        shown = (
            f"{name}={getattr(self, name)!r}"
            for name, each in settings_of(DaemonConfig).items()
            if not each.secret
        )
        return f"DaemonConfig({', '.join(shown)})"

    def operators_at(self) -> str:
        """The path of the operators' socket."""
        return self.operator_socket or operator_socket_of(self.socket)

    def all_tenants(self) -> tuple[TenantConfig, ...]:
        """The default tenant, unless the file configures it, and the others."""
        if any(tenant.name == DEFAULT_TENANT for tenant in self.tenants):
            return tuple(
                tenant
                if tenant.name != DEFAULT_TENANT or self.announce
                else msgspec.structs.replace(tenant, announce=False)
                for tenant in self.tenants
            )
        default = TenantConfig(DEFAULT_TENANT, self.memory, announce=self.announce)
        return (default, *self.tenants)

    def ssd_shares(self) -> dict[str, float]:
        """Each tenant's part of each disk, by name.

        Depends on the configuration alone, not on how much memory was free at the start: a part
        that moves loses its blocks. Raises `ConfigError` if the parts exceed the disks.
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
                f"tenants' parts of the disks (ssd) are {1 - left:.0%} of them, and {others} more tenants have no "
                "part set: reduce the parts that are set"
            )
        return {tenant.name: shares.get(tenant.name, left / max(1, others)) for tenant in tenants}


SETTINGS = tuple(settings_of(DaemonConfig))
SECRETS = tuple(name for name, each in settings_of(DaemonConfig).items() if each.secret)
"""Settings that support KVPOOL_NAME_FILE. A URL of the directory may hold a password."""


def parse_setting(name: str, value: object, where: str = "") -> Any:
    """The value of one setting of `DaemonConfig` for a given input. Raises `ConfigError`."""
    return convert_setting(DaemonConfig, name, value, where or name)
