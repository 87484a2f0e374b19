"""The command line: reads the configuration, wires the parts together, prints for people."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from kvpool import __version__
from kvpool.errors import KvpoolError

app = typer.Typer(
    name="kvpool",
    help="A cluster-wide KV cache pool for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_ERROR = 1


@app.command()
def serve(
    config: Annotated[str | None, typer.Option(help="TOML file with settings.")] = None,
    socket: Annotated[str | None, typer.Option(help="Path of the control socket.")] = None,
    memory: Annotated[
        str | None, typer.Option(help='DRAM to share: "8GiB", or a share of what is free, "25%".')
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Eviction policy.")] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Where peers may pull from, tcp://127.0.0.1:7070; may be repeated."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="A node to pull from; may be repeated.")
    ] = None,
    movers: Annotated[int | None, typer.Option(help="Processes that move bytes.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the node keeps state.")] = None,
    node: Annotated[str | None, typer.Option(help="This node's name.")] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster's name.")] = None,
    socket_mode: Annotated[
        str | None, typer.Option(help="Permissions of the socket, octal, 600.")
    ] = None,
    clients_max: Annotated[int | None, typer.Option(help="Connections of clients.")] = None,
    peers_max: Annotated[int | None, typer.Option(help="Connections of peers.")] = None,
    lease_s_max: Annotated[float | None, typer.Option(help="The longest lease, seconds.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Run this node's daemon until SIGTERM. Works with no configuration at all."""
    from kvpool.config import load
    from kvpool.daemon.server import Server
    from kvpool.daemon.server import serve as run

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )

    def ready(server: Server) -> None:
        memory_mib = sum(segment.size for segment in server.segments.values()) >> 20
        where = f", peers at {', '.join(server.movers.urls)}" if server.movers.urls else ""
        print(
            f"kvpool {__version__} ready: node {server.config.node}, {memory_mib} MiB of DRAM, "
            f"socket {server.config.socket}{where}",
            flush=True,
        )

    flags = {
        "socket": socket,
        "memory": memory,
        "policy": policy,
        "listen": listen or None,
        "peers": peer or None,
        "movers": movers,
        "data_dir": data_dir,
        "node": node,
        "cluster": cluster,
        "socket_mode": socket_mode,
        "clients_max": clients_max,
        "peers_max": peers_max,
        "lease_s_max": lease_s_max,
    }
    run(load(file=config, flags=flags), ready)


@app.command()
def status(
    socket: Annotated[str | None, typer.Option(help="Path of the control socket.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose pool to show.")] = "default",
    token: Annotated[
        str | None, typer.Option(envvar="KVPOOL_TOKEN", help="The tenant's token.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
) -> None:
    """Show what the daemon of this node holds and does."""
    from kvpool.client import Client

    with Client(socket, tenant=tenant, token=token, connect=True) as client:
        stats = client.stats()
    if as_json:
        import json

        print(json.dumps(stats, indent=2))
    else:
        from kvpool.status import show

        show(stats, tenant)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: errors that are expected are one line, not a traceback."""
    try:
        app()
    except KvpoolError as error:
        print(f"kvpool: {error}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from None


if __name__ == "__main__":
    main()
