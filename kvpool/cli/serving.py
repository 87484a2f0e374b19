"""`kvpool serve`: this node's daemon, in the foreground."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool import __version__
from kvpool.cli import base
from kvpool.cli.base import Socket, app
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.config import DaemonConfig
    from kvpool.daemon.server import Server

CLUSTER = "The cluster"
TIERS = "Tiers below memory"
LIMITS = "Limits"
GATEWAY = "The HTTP gateway"


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
    http: Annotated[
        list[str] | None,
        typer.Option(
            help="Where the HTTP gateway listens, 127.0.0.1:7071 or unix:/PATH; may be repeated.",
            rich_help_panel=GATEWAY,
        ),
    ] = None,
    http_tokens: Annotated[
        str | None,
        typer.Option(
            help="The file of those who may ask it; kvpool token makes it.", rich_help_panel=GATEWAY
        ),
    ] = None,
    http_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second of each of them.", rich_help_panel=GATEWAY),
    ] = None,
    routers: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            help="A router to ask about requests and engines, http://10.0.0.9:8080; may be repeated.",
            rich_help_panel=GATEWAY,
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(
            help="Send traces to the collector here, http://127.0.0.1:4318.",
            rich_help_panel=GATEWAY,
        ),
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

    Example: kvpool serve --listen tcp://10.0.0.5:7070 --join etcd://10.0.0.1:2379
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
    settings = load(file=config, flags=flags)
    with base.in_foreground():
        run(settings, _say_ready)


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
    if config.http:
        lines.append(f"HTTP gateway at {', '.join(config.http)}, tokens in {_tokens_of(config)}")
    print("\n".join(lines), flush=True)


def _tokens_of(config: DaemonConfig) -> str:
    from kvpool.daemon.gateway import token_path

    return config.http_tokens or str(token_path(config))
