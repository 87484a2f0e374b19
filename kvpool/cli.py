"""The command line: reads the configuration, wires the parts together, prints for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool import __version__
from kvpool.errors import (
    ClusterUnavailable,
    ConfigError,
    InvalidRequest,
    KvpoolError,
    NotAuthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from kvpool.client import Client
    from kvpool.daemon.server import Server

app = typer.Typer(
    name="kvpool",
    help="A cluster-wide KV cache pool for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
TIMEOUT_S = 10.0  # for each question to the daemon of this node
DRAIN_S = 3600.0

CLUSTER = "The cluster"
TIERS = "Tiers below memory"
LIMITS = "Limits"
OPERATORS = "For operators"

# Passwords and tokens are no options: every user of a machine sees the arguments of its processes.
Socket = Annotated[str | None, typer.Option(help="Path of the control socket.")]
Tenant = Annotated[str, typer.Option(help="Whose pool; its token is read from KVPOOL_TOKEN.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")]
Digest = Annotated[
    str, typer.Argument(help="A namespace: its first hex digits, 4 or more.", metavar="DIGEST")
]


@app.command()
def serve(
    config: Annotated[str | None, typer.Option(help="TOML file with settings.")] = None,
    socket: Socket = None,
    memory: Annotated[
        str | None, typer.Option(help='DRAM to share: "8GiB", or a share of what is free, "25%".')
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Eviction policy.")] = None,
    movers: Annotated[int | None, typer.Option(help="Processes that move bytes.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the node keeps state.")] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder for what memory gives up, and its size: /mnt/nvme0/kvpool=400GiB; may be "
            "repeated.",
            rich_help_panel=TIERS,
        ),
    ] = None,
    ssd_write: Annotated[
        str | None,
        typer.Option(
            help="When blocks are written there: through (when put), back (before eviction), none.",
            rich_help_panel=TIERS,
        ),
    ] = None,
    ssd_bytes_per_day: Annotated[
        str | None,
        typer.Option(
            help='How much may be written there in a day, "4TiB"; 0: no limit.',
            rich_help_panel=TIERS,
        ),
    ] = None,
    ssd_drain_s: Annotated[
        float | None,
        typer.Option(
            help="How long a node that is drained copies what is only on its disks, seconds.",
            rich_help_panel=TIERS,
        ),
    ] = None,
    ssd_flush_s: Annotated[
        float | None,
        typer.Option(
            help="How long a daemon that stops goes on writing what is only in memory, seconds.",
            rich_help_panel=TIERS,
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            help="Object storage for what was read again: s3://BUCKET/PREFIX, gs://, az://, "
            "file:///FOLDER. Credentials belong into the environment.",
            rich_help_panel=TIERS,
        ),
    ] = None,
    remote_bytes_max: Annotated[
        str | None,
        typer.Option(help='What this node may keep there, "10TiB".', rich_help_panel=TIERS),
    ] = None,
    remote_instance_credentials: Annotated[
        bool | None,
        typer.Option(
            "--remote-instance-credentials/--no-remote-instance-credentials",
            help="Where the environment has none, ask the metadata service of the cloud.",
            rich_help_panel=TIERS,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Spare device memory for what is read again, and its size: cuda:0=8GiB.",
            rich_help_panel=TIERS,
        ),
    ] = None,
    events: Annotated[
        bool | None,
        typer.Option(
            "--events/--no-events",
            help="Follow engines' KV events, and tell others what their caches hold.",
        ),
    ] = None,
    node: Annotated[str | None, typer.Option(help="This node's name.")] = None,
    socket_mode: Annotated[
        str | None, typer.Option(help="Permissions of the socket, octal, 600.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="The cluster's name.", rich_help_panel=CLUSTER)
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            help="The etcd of the membership: etcd://HOST:PORT[,...], etcds:// with TLS.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option(
            help="The Redis of the directory: redis://, redis+sentinel:// or redis+cluster://, "
            "rediss with TLS. A password belongs into KVPOOL_DIRECTORY_PASSWORD.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Where other nodes may pull from, tcp://127.0.0.1:7070; may be repeated.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            help="The URL that others use instead, one for each --listen.", rich_help_panel=CLUSTER
        ),
    ] = None,
    rails: Annotated[
        list[str] | None,
        typer.Option(
            "--rail",
            help="Cards with the same name reach each other best, one for each --listen; -: none.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    bind_source: Annotated[
        bool | None,
        typer.Option(
            "--bind-source/--no-bind-source",
            help="Connect from the address of the network card that was chosen.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    pull_over: Annotated[
        str | None,
        typer.Option(
            help="By which transport peers are pulled from: auto, nixl or tcp.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    probe_s: Annotated[
        float | None,
        typer.Option(
            help="How often idle peers are asked how long an answer takes, seconds; 0: never.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="A node to pull from, where there is no --join; may be repeated.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            help="Where this node stands, zone=a, rack=7; may be repeated.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    forward: Annotated[
        bool | None,
        typer.Option(
            "--forward/--no-forward",
            help="Offer what must be evicted to nodes that have room.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            help="Our certificate for other nodes, PEM; kvpool certs makes it.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(help="The file of its key, PEM.", rich_help_panel=CLUSTER)
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(help="Who signs the nodes' certificates, PEM.", rich_help_panel=CLUSTER),
    ] = None,
    tls_crl: Annotated[
        str | None,
        typer.Option(help="Which certificates are revoked, PEM.", rich_help_panel=CLUSTER),
    ] = None,
    plaintext: Annotated[
        bool | None,
        typer.Option(
            "--plaintext/--no-plaintext",
            help="Listen off loopback without TLS, in a network that is trusted.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    join_ca: Annotated[
        str | None,
        typer.Option(help="Who signs etcd's certificates, PEM.", rich_help_panel=CLUSTER),
    ] = None,
    join_cert: Annotated[
        str | None, typer.Option(help="Our certificate for etcd, PEM.", rich_help_panel=CLUSTER)
    ] = None,
    join_key: Annotated[
        str | None, typer.Option(help="The file of its key, PEM.", rich_help_panel=CLUSTER)
    ] = None,
    directory_ca: Annotated[
        str | None,
        typer.Option(help="Who signs Redis' certificates, PEM.", rich_help_panel=CLUSTER),
    ] = None,
    directory_cert: Annotated[
        str | None, typer.Option(help="Our certificate for Redis, PEM.", rich_help_panel=CLUSTER)
    ] = None,
    directory_key: Annotated[
        str | None, typer.Option(help="The file of its key, PEM.", rich_help_panel=CLUSTER)
    ] = None,
    member_ttl_s: Annotated[
        float | None,
        typer.Option(
            help="Silence after which a node counts as dead, seconds.", rich_help_panel=LIMITS
        ),
    ] = None,
    directory_timeout_s: Annotated[
        float | None,
        typer.Option(help="The longest wait for Redis, seconds.", rich_help_panel=LIMITS),
    ] = None,
    copies_max: Annotated[
        int | None,
        typer.Option(help="Copies of a block that may be asked for.", rich_help_panel=LIMITS),
    ] = None,
    copy_bandwidth: Annotated[
        str | None,
        typer.Option(
            help='Bytes a second for copying in the background, "256MiB".', rich_help_panel=LIMITS
        ),
    ] = None,
    clients_max: Annotated[
        int | None, typer.Option(help="Connections of clients.", rich_help_panel=LIMITS)
    ] = None,
    peers_max: Annotated[
        int | None, typer.Option(help="Connections of peers.", rich_help_panel=LIMITS)
    ] = None,
    engines_max: Annotated[
        int | None,
        typer.Option(help="Engines whose KV events are followed.", rich_help_panel=LIMITS),
    ] = None,
    lease_s_max: Annotated[
        float | None, typer.Option(help="The longest lease, seconds.", rich_help_panel=LIMITS)
    ] = None,
) -> None:
    """Run this node's daemon until SIGTERM. Works with no configuration at all.

    In a cluster: kvpool serve --listen tcp://10.0.0.5:7070 --join etcd://10.0.0.1:2379
    """
    from kvpool.config import SETTINGS, load
    from kvpool.daemon.server import serve as run

    # Each parameter has the name of the setting that it sets.
    flags = {
        name: value
        for name, value in locals().items()
        if name in SETTINGS and value not in (None, [])
    }
    if directory is not None and _holds_password(directory):
        raise ConfigError(
            "--directory holds a password, and every user of this machine can see the arguments of a "
            "process: set KVPOOL_DIRECTORY_PASSWORD, or directory_password in a file of mode 0600"
        )
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    run(load(file=config, flags=flags), _say_ready)


def _holds_password(url: str) -> bool:
    login, at, _ = url.partition("://")[2].rpartition("@")
    return bool(at) and ":" in login


def _say_ready(server: Server) -> None:
    """The first line is read by programs: its beginning and its end stay as they are."""
    config = server.config
    memory_mib = sum(segment.size for segment in server.segments.values()) >> 20
    where = f", peers at {', '.join(server.movers.urls)}" if server.movers.urls else ""
    lines = [
        (
            f"kvpool {__version__} ready: node {config.node}, {memory_mib} MiB of DRAM, "
            f"socket {config.socket}{where}"
        )
    ]
    if config.join:
        others = server.cluster.summary()["others"]
        lines.append(
            f"joined cluster {config.cluster} as incarnation {server.cluster.incarnation}, "
            f"{others} other {'node' if others == 1 else 'nodes'} to pull from, "
            f"{'with' if config.directory else 'without'} a directory"
        )
    print("\n".join(lines), flush=True)


@app.command()
def status(
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print nothing: the exit status says whether the daemon answers."
        ),
    ] = False,
) -> None:
    """Show what the daemon of this node holds and does. Exit status 1 when it does not answer.

    Example: kvpool status --tenant research
    """
    if quiet:
        with _client(socket, tenant) as client:
            client.stats()
        return
    from kvpool.status.node import show

    with _client(socket, tenant) as client:
        stats = client.stats()
        names = {} if as_json else _node_names(client)
    if as_json:
        _print_json(stats)
    else:
        show(stats, tenant, names)


@app.command(rich_help_panel=OPERATORS)
def doctor(
    path: Annotated[
        list[str] | None,
        typer.Option(help="A folder meant for tier ssd; may be repeated.", metavar="FOLDER"),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Look at what this machine has: RDMA, memory, huge pages, GPUs, disks; and how others are reached.

    Works without a daemon. Exit status 1 when something that is there cannot be used.

    Example: kvpool doctor --path /mnt/nvme0/kvpool
    """
    from kvpool.status.doctor import BAD, OK, Finding, examine, plain, routes, show

    findings = examine(path or ())
    pairs = []
    try:
        with _client(socket, tenant) as client:
            pairs = routes(client.cluster())
    except KvpoolError as error:
        findings.append(Finding("other nodes", OK, f"not known: {error}"))
    if as_json:
        _print_json(plain(findings, pairs))
    else:
        show(findings, pairs)
    if any(finding.state == BAD for finding in findings):
        raise typer.Exit(EXIT_ERROR)


@app.command(rich_help_panel=OPERATORS)
def nodes(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show the nodes of the cluster, as this one sees them.

    Example: kvpool nodes
    """
    from kvpool.status.cluster import show_nodes

    with _client(socket, tenant) as client:
        cluster = client.cluster()
    if as_json:
        _print_json(cluster)
    else:
        show_nodes(cluster)


@app.command(rich_help_panel=OPERATORS)
def locate(
    keys: Annotated[list[str], typer.Argument(help="Block keys, 32 hex digits each.")],
    namespace: Annotated[
        str | None,
        typer.Option(help="Look in this one only: its first hex digits.", metavar="DIGEST"),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Show which nodes hold blocks. Exit status 1 when some were not found.

    Example: kvpool locate 00112233445566778899aabbccddeeff --namespace 3fa9
    """
    from kvpool.status.cluster import not_found, show_replicas
    from kvpool.status.naming import block_key

    wanted = list(dict.fromkeys(map(block_key, keys)))
    with _client(socket, tenant) as client:
        digest = _resolve(client, tenant, namespace) if namespace else b""
        found = client.locate(wanted, digest=digest)
        directory = client.stats()["cluster"]["directory"]
    if as_json:
        _print_json(found)
    else:
        show_replicas(found)
    if missing := not_found(wanted, found, directory):
        _complain(missing)
        raise typer.Exit(EXIT_ERROR)


@app.command(rich_help_panel=OPERATORS)
def drain(
    node: Annotated[str, typer.Argument(help="The node's name.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Call it off.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end.")] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.0, help="The longest wait, seconds.")
    ] = DRAIN_S,
    socket: Socket = None,
    tenant: Tenant = "default",
) -> None:
    """Have a node copy what only it holds to others, and leave the cluster.

    Exit status 1 when something was left behind, or it did not end in time.

    Example: kvpool drain host-7
    """
    from kvpool.status.drain import call_off, carry_out

    with _client(socket, tenant) as client:
        with _in_doubt("nodes"):
            if cancel:
                print(call_off(client, node))
                return
            client.drain(node)
        if not wait:
            print(f"{node} will be drained; `kvpool nodes` shows how far it has come")
            return
        try:
            text, good = carry_out(client, node, timeout_s)
        except KeyboardInterrupt:
            _complain(
                f"the drain of {node} goes on: `kvpool drain {node}` shows it again, and "
                f"`kvpool drain {node} --cancel` calls it off"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if not good:
        _complain(text)
        raise typer.Exit(EXIT_ERROR)
    print(text)


@app.command(rich_help_panel=OPERATORS)
def namespaces(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show the namespaces of the cluster: epochs, settings, and what this node holds of them.

    Example: kvpool namespaces
    """
    from kvpool.status.cluster import namespace_rows, show_namespaces

    with _client(socket, tenant) as client:
        rows = namespace_rows(client.cluster(), client.stats(), tenant)
    if as_json:
        _print_json(rows)
    else:
        show_namespaces(rows)


@app.command(rich_help_panel=OPERATORS)
def reset(
    digest: Digest,
    fence: Annotated[
        bool, typer.Option("--fence", help="Have engines open it again before they go on.")
    ] = False,
    socket: Socket = None,
    tenant: Tenant = "default",
) -> None:
    """Begin a new epoch of a namespace: none of its blocks is found any more, on any node.

    Example: kvpool reset 3fa9 --fence
    """
    with _client(socket, tenant) as client:
        chosen = _resolve(client, tenant, digest)
        with _in_doubt("namespaces"):
            epoch = client.clear(chosen, fence=fence)
    print(f"namespace {chosen.hex()} of tenant {tenant} is in epoch {epoch}: no node finds what")
    print("was stored before, and the memory of that is given back bit by bit.")
    if fence:
        print("Engines that have it open find and store nothing until they open it again.")
    else:
        print("Engines that have it open go on in the new epoch.")


@app.command(rich_help_panel=OPERATORS)
def configure(
    digest: Digest,
    copies: Annotated[
        int | None, typer.Option(min=1, help="Nodes that are to hold each block.", metavar="N")
    ] = None,
    write: Annotated[
        str | None,
        typer.Option(
            help="When blocks go to SSD: through (when put), back (before eviction), none; or "
            "default: as each node is configured.",
            metavar="MODE",
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            help="Blocks that a node did not use for so long are gone: 30s, 15m, 12h, 7d; 0: never.",
            metavar="TIME",
        ),
    ] = None,
    ssd_codec: Annotated[
        str | None,
        typer.Option(help="What makes blocks smaller on SSD: blosc2, none.", metavar="CODEC"),
    ] = None,
    write_remote: Annotated[
        str | None,
        typer.Option(
            help="When blocks are written to object storage: back (before eviction), none.",
            metavar="MODE",
        ),
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(
            help="What it may hold on each node, by tier: dram=20%,ssd=50GiB, of the tenant's part; "
            "none: as much as the tenant.",
            metavar="TIER=SIZE[,...]",
        ),
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
) -> None:
    """Change settings of a namespace, on all nodes. What is not named stays as it is.

    Example: kvpool configure 3fa9 --copies 2 --write through --ttl 12h
    """
    from kvpool.status.naming import period, quotas

    if all(given is None for given in (copies, write, ttl, ssd_codec, quota, write_remote)):
        raise InvalidRequest(
            "name what is to change: --copies, --write, --ttl, --ssd-codec, --write-remote or --quota"
        )
    of_tiers = {} if quota is None else quotas(quota)
    ttl_s = None if ttl is None else period(ttl)
    with _client(socket, tenant) as client:
        chosen = _resolve(client, tenant, digest)
        with _in_doubt("namespaces"):
            client.configure(
                chosen,
                copies=copies,
                write="" if write == "default" else write,
                ttl_s=ttl_s,
                ssd_codec="" if ssd_codec == "none" else ssd_codec,
                dram_quota=of_tiers.get("dram"),
                ssd_quota=of_tiers.get("ssd"),
                write_remote=write_remote,
            )
    print(f"The settings of namespace {chosen.hex()} of tenant {tenant} are changed on all nodes;")
    print("`kvpool namespaces` shows them.")
    if copies is not None and copies > 1:
        print("Nodes make copies in the background: new blocks at once, those there by and by.")


certs = typer.Typer(
    help="Make a small certificate authority, and certificates for TLS. Needs the extra admin.",
    no_args_is_help=True,
)
app.add_typer(certs, name="certs", rich_help_panel=OPERATORS)

AuthorityFolder = Annotated[
    Path, typer.Argument(help="The authority's folder; its key stays there.", metavar="DIR")
]
Days = Annotated[int, typer.Option(help="How long it is good for, at most 3650.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        help="A name or address at which browsers and other clients reach it; may be repeated.",
        metavar="NAME_OR_IP",
    ),
]


@certs.command("init")
def certs_init(
    folder: AuthorityFolder,
    cluster: Annotated[str, typer.Option(help="The cluster's name.")] = "kvpool",
) -> None:
    """Make a certificate authority for a cluster, in a folder that has none.

    Example: kvpool certs init ./certs --cluster prod
    """
    with _certs_extra():
        from kvpool.certs import make_authority
        from kvpool.status.certs import made_authority
    print(made_authority(make_authority(folder, cluster, _now())))


@certs.command("node")
def certs_node(
    folder: AuthorityFolder,
    name: Annotated[str, typer.Argument(help="The node's name, as its setting node.")],
    hosts: Hosts = None,
    days: Days = 365,
) -> None:
    """Make a node's certificate: for other daemons, for its HTTP gateway, and for etcd and Redis.

    Example: kvpool certs node ./certs host-7 --host host-7.example.org --host 10.0.0.7
    """
    _issue(folder, "node", name, hosts, days)


@certs.command("client")
def certs_client(
    folder: AuthorityFolder,
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    days: Days = 365,
) -> None:
    """Make a certificate for somebody who connects and is no node: daemons do not take it for a peer's.

    Example: kvpool certs client ./certs alice --days 30
    """
    _issue(folder, "client", name, None, days)


@certs.command("revoke")
def certs_revoke(
    folder: AuthorityFolder,
    which: Annotated[
        str, typer.Argument(help="A name, or a serial number in hex.", metavar="NAME|SERIAL")
    ],
) -> None:
    """Revoke all certificates of a node or client, or a single one: adds them to crl.pem.

    Example: kvpool certs revoke ./certs host-7
    """
    with _certs_extra():
        from kvpool.certs import open_authority, revoke
        from kvpool.status.certs import revoked
    print(revoked(folder, which, revoke(open_authority(folder), which, _now())))


@certs.command("show")
def certs_show(
    file: Annotated[Path, typer.Argument(help="A PEM file: a certificate, or crl.pem.")],
    as_json: AsJson = False,
) -> None:
    """Show what is in a certificate or in a list of revoked ones.

    Example: kvpool certs show ./certs/node-host-7.pem
    """
    with _certs_extra():
        from kvpool.certs import look_at
        from kvpool.status.certs import plain, show
    shown = look_at(file)
    if as_json:
        _print_json(plain(shown))
    else:
        show(shown, _now())


def _issue(folder: Path, role: str, name: str, hosts: list[str] | None, days: int) -> None:
    with _certs_extra():
        from kvpool.certs import issue, open_authority
        from kvpool.status.certs import made_certificate
    made = issue(open_authority(folder), role, name, _now(), hosts=hosts or (), days=days)
    print(made_certificate(made))


@contextmanager
def _certs_extra() -> Iterator[None]:
    """Around the import of what an extra brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"certificates are made with {error.name}: pip install 'kvpool[admin]'"
        ) from None


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


@app.command()
def tiers(socket: Socket = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """Show where this node keeps blocks: engines' own caches, memory and disks, how full, how well.

    Example: kvpool tiers
    """
    from kvpool.status.tiers import show_tiers, tier_rows

    with _client(socket, tenant) as client:
        stats = client.stats()
    if as_json:
        _print_json(tier_rows(stats, tenant))
    else:
        show_tiers(stats, tenant)


@app.command(rich_help_panel=OPERATORS)
def evict(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Block keys, 32 hex digits each.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Of this one only.", metavar="DIGEST")
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="From this one only: dram, ssd or device.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All blocks, of the namespace if one is given.")
    ] = False,
    socket: Socket = None,
    tenant: Tenant = "default",
) -> None:
    """Give blocks up on this node, as if there were no room. Hard pins stay.

    Example: kvpool evict --all --namespace 3fa9 --tier ssd
    """
    from kvpool.status.naming import block_key

    if bool(keys) == everything:
        raise InvalidRequest("give the keys of blocks, or --all")
    with _client(socket, tenant) as client:
        digest = _resolve(client, tenant, namespace) if namespace else b""
        wanted = list(dict.fromkeys(map(block_key, keys or [])))
        gone = client.evict(wanted, digest=digest, tier=tier or "")
    print(f"{gone} {'block' if gone == 1 else 'blocks'} evicted")


@app.command(rich_help_panel=OPERATORS)
def pin(
    keys: Annotated[list[str], typer.Argument(help="Block keys, 32 hex digits each.")],
    kind: Annotated[
        str, typer.Option(help="soft: evicted last; hard: never; none: as any other.")
    ] = "soft",
    namespace: Annotated[
        str | None, typer.Option(help="In this one only.", metavar="DIGEST")
    ] = None,
    socket: Socket = None,
    tenant: Tenant = "default",
) -> None:
    """Keep blocks that are on this node, in memory and on disks. Exit status 1 when some are not.

    Example: kvpool pin 00112233445566778899aabbccddeeff --kind hard
    """
    from kvpool.status.naming import block_key

    wanted = list(dict.fromkeys(map(block_key, keys)))
    with _client(socket, tenant) as client:
        digest = _resolve(client, tenant, namespace) if namespace else b""
        found = client.pin_blocks(wanted, kind, digest=digest)
    what = "unpinned" if kind == "none" else f"pinned {kind}"
    print(f"{found} of {len(wanted)} {'block' if len(wanted) == 1 else 'blocks'} {what}")
    if found < len(wanted):
        raise typer.Exit(EXIT_ERROR)


@app.command(rich_help_panel=OPERATORS)
def scrub(socket: Socket = None, tenant: Tenant = "default") -> None:
    """Compare all blocks on this node's disks with their checksums. Exit status 1 when some were bad.

    Bad ones are dropped; engines compute them again.

    Example: kvpool scrub
    """
    from kvpool.status.tiers import scrub as run

    with _client(socket, tenant) as client:
        seen, bad = run(client)
    print(f"{seen:,} {'block' if seen == 1 else 'blocks'} seen, {bad:,} bad and dropped")
    if bad:
        raise typer.Exit(EXIT_ERROR)


@app.command()
def sim(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace in Mooncake's format, or gen:shared-prefixes, gen:multi-turn, gen:agent."
        ),
    ],
    prefill: Annotated[int, typer.Option(help="Engines that compute prompts.")] = 10,
    decode: Annotated[int, typer.Option(help="Engines that decode; 0 ends with the token.")] = 10,
    mixed: Annotated[int, typer.Option(help="Engines that do both.")] = 0,
    flexible: Annotated[
        bool,
        typer.Option(help="Whether engines change between prefill and decode, after the load."),
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; all: every one. NAME/fifo: in order of arrival."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="A profile's name, or a file.")] = "a800x8",
    model: Annotated[str, typer.Option(help="A profile's name, or a file.")] = "llama-3-70b",
    load: Annotated[
        float, typer.Option(help="Share of what prefill can do; 0: the trace's own times.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed, the same run.")] = 0,
    limit: Annotated[int, typer.Option(help="So many requests; 0: all of a trace.")] = 0,
    rate: Annotated[float, typer.Option(help="Requests a second, of gen: traces.")] = 4.0,
    pool_tokens: Annotated[int, typer.Option(help="Memory of all nodes, tokens.")] = 50_000_000,
    ssd_tokens: Annotated[int, typer.Option(help="Disks of all nodes, tokens.")] = 0,
    pool: Annotated[bool, typer.Option(help="Whether nodes pull from each other.")] = True,
    network: Annotated[float, typer.Option(help="GB/s a node; 0: the profile's.")] = 0.0,
    lag: Annotated[float, typer.Option(help="Seconds from an event to the index.")] = 0.05,
    noise: Annotated[float, typer.Option(help="Of estimates: 0.3 is about 30 %.")] = 0.0,
    ttft_slo: Annotated[float | None, typer.Option(help="Seconds to the first token.")] = None,
    tpot_slo: Annotated[float | None, typer.Option(help="Seconds a token after it.")] = None,
    reject: Annotated[bool, typer.Option(help="Refuse what will not meet them.")] = False,
    json_path: Annotated[str | None, typer.Option("--json", help="Write rows here.")] = None,
    plot: Annotated[
        str | None, typer.Option(help="Draw a PNG of the policies here; needs kvpool[plots].")
    ] = None,
) -> None:
    """Simulate a cluster on a trace: the real scheduler and eviction, simulated engines and links.

    Example: kvpool sim trace.jsonl --prefill 16 --decode 0 --load 0.8 --policy all
    """
    import math

    from rich.console import Console

    from kvpool.scheduler.policies import DEFAULT_POLICY, POLICIES
    from kvpool.scheduler.scheduler import Settings
    from kvpool.simulator.cluster import Shape
    from kvpool.simulator.command import requests_of, run, write_rows
    from kvpool.simulator.plot import draw, require
    from kvpool.simulator.speeds import Speeds, load_hardware, load_model

    if plot is not None:
        require()
    ttft_slo_s = math.inf if ttft_slo is None else ttft_slo
    tpot_slo_s = math.inf if tpot_slo is None else tpot_slo
    settings = Settings(ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s) if reject else Settings()
    shape = Shape(
        Speeds(load_hardware(hardware), load_model(model)),
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        flexible=flexible,
        settings=settings,
        pool_tokens=pool_tokens,
        ssd_tokens=ssd_tokens,
        shared=pool,
        network_bytes_s=network * 1e9,
        lag_s=lag,
        noise=noise,
        seed=seed,
    )
    chosen = list(POLICIES) if policy == ["all"] else policy or [DEFAULT_POLICY]
    requests = requests_of(trace, shape, load=load, limit=limit, rate=rate)
    console = Console()
    rows = run(requests, shape, chosen, console, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
    if json_path is not None:
        write_rows(rows, json_path)
    if plot is not None:
        draw(rows, plot)


@app.command()
def router(
    config: Annotated[str | None, typer.Option(help="TOML file with settings.")] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help="An engine's URL, and what is to be said of it: http://10.0.0.5:8000,role=decode,node=b; "
            "may be repeated.",
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT; any but loopback takes KVPOOL_ROUTER_TOKEN.")
    ] = None,
    daemon: Annotated[
        bool | None,
        typer.Option(
            "--daemon/--no-daemon",
            help="Ask this host's daemon for engines, and for what the pool holds.",
        ),
    ] = None,
    socket: Socket = None,
    policy: Annotated[str | None, typer.Option(help="Which engine computes a prompt.")] = None,
    token_file: Annotated[
        str | None, typer.Option(help="A file of mode 0600 with the operator's token.")
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="A request's deadline unless it names one, seconds.")
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(help="How long requests in flight may take after SIGTERM, seconds."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Run an OpenAI-compatible front over engines, until SIGTERM. Needs the extra kvpool[router].

    Example: kvpool router --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001
    """
    try:
        from kvpool.router.command import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"the router needs {error.name}: pip install 'kvpool[router]'") from None
    from kvpool.router.config import SETTINGS, load

    flags = {
        name: value
        for name, value in locals().items()
        if name in SETTINGS and value not in (None, [])
    }
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    settings, secrets = load(file=config, flags=flags)
    run(settings, secrets, _say_router_ready)


def _say_router_ready(url: str, engines: int) -> None:
    """The line is read by programs: its beginning and its end stay as they are."""
    what = "engine" if engines == 1 else "engines"
    print(f"kvpool {__version__} ready: router at {url}, {engines} {what}", flush=True)


@app.command()
def plan(
    trace: Annotated[
        str | None,
        typer.Argument(help="A trace in Mooncake's format; without, a described workload."),
    ] = None,
    ttft: Annotated[float, typer.Option(help="Target: seconds to the first token.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Target: seconds a token after it.")] = 0.05,
    share: Annotated[float, typer.Option(help="Of requests that are to keep to both.")] = 0.9,
    rate: Annotated[
        float, typer.Option(help="Requests a second; 0: a trace's own times, 4 of a workload.")
    ] = 0.0,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt, on average.")] = 4000,
    output: Annotated[int, typer.Option(help="Tokens of an answer, on average.")] = 300,
    shared: Annotated[float, typer.Option(help="Share of a prompt that others have, too.")] = 0.5,
    hardware: Annotated[str, typer.Option(help="A profile's name, or a file.")] = "a800x8",
    model: Annotated[str, typer.Option(help="A profile's name, or a file.")] = "llama-3-70b",
    engines_max: Annotated[int, typer.Option(help="More are not tried.")] = 64,
    dram_max: Annotated[float, typer.Option(help="GB a node may have for the pool.")] = 1000.0,
    ssd_max: Annotated[float, typer.Option(help="The same of disks.")] = 8000.0,
    network: Annotated[float, typer.Option(help="GB/s a node; 0: the profile's.")] = 0.0,
    limit: Annotated[int, typer.Option(help="So many requests are simulated.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed, the same plan.")] = 0,
    json_path: Annotated[str | None, typer.Option("--json", help="Write all trials here.")] = None,
    plot: Annotated[
        str | None, typer.Option(help="Draw the sweeps as a PNG here; needs kvpool[plots].")
    ] = None,
) -> None:
    """Find how many engines of which kind, and how large a pool, a workload needs.

    Example: kvpool plan trace.jsonl --ttft 3 --tpot 0.1 --plot plan.png
    """
    from rich.console import Console

    from kvpool.planner.command import Room, requests_of, run, write
    from kvpool.planner.plot import draw
    from kvpool.planner.trials import Targets
    from kvpool.planner.workload import Workload
    from kvpool.simulator.cluster import Shape
    from kvpool.simulator.plot import require
    from kvpool.simulator.speeds import Speeds, load_hardware, load_model

    if plot is not None:
        require()
    shape = Shape(
        Speeds(load_hardware(hardware), load_model(model)),
        network_bytes_s=network * 1e9,
        seed=seed,
    )
    targets = Targets(ttft, tpot, share)
    described = Workload(rate or 4.0, prompt, output, shared)
    requests = requests_of(trace, described, rate, shape, limit)
    room = Room(engines_max, dram_max * 1e9, ssd_max * 1e9)
    found = run(requests, shape, targets, room, Console())
    if json_path is not None:
        write(found, targets, json_path)
    if plot is not None:
        draw(found, targets, plot)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _client(socket: str | None, tenant: str) -> Client:
    """A client of this node's daemon, with what the environment says to prove who asks."""
    from kvpool.client import Client
    from kvpool.config import secret_of

    return Client(
        socket,
        tenant=tenant,
        token=secret_of("KVPOOL_TOKEN"),
        operator_token=secret_of("KVPOOL_OPERATOR_TOKEN") or "",
        timeout_s=TIMEOUT_S,
        connect=True,
    )


def _node_names(client: Client) -> dict[str, str]:
    """Names of the nodes by incarnation; only operators are told."""
    try:
        found = client.cluster()["nodes"]
    except NotAuthenticated:
        return {}
    return {record["incarnation"]: record["node"] for record in found}


def _resolve(client: Client, tenant: str, text: str) -> bytes:
    from kvpool.status.naming import full_digest, known_digests

    return full_digest(text, known_digests(client.cluster(), client.stats(), tenant))


@contextmanager
def _in_doubt(command: str) -> Iterator[None]:
    """A change that was asked for and not answered may have been made, or be made yet."""
    try:
        yield
    except (Unavailable, ClusterUnavailable) as error:
        raise type(error)(
            f"{error}. It may have been done all the same, or be done yet: `kvpool {command}` shows "
            f"that, and doing it again does no harm"
        ) from None


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


def _complain(text: str) -> None:
    print(f"kvpool: {text}", file=sys.stderr)


def main() -> None:
    """Entry point: errors that are expected are one line, not a traceback."""
    try:
        app()
    except KvpoolError as error:
        _complain(str(error))
        raise SystemExit(EXIT_ERROR) from None


if __name__ == "__main__":
    main()
