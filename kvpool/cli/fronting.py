"""`kvpool router`: the HTTP front, in the foreground."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from kvpool import __version__
from kvpool.cli import base
from kvpool.cli.base import Socket, app
from kvpool.errors import ConfigError


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
    otlp: Annotated[
        str | None, typer.Option(help="Send traces to the collector here, http://127.0.0.1:4318.")
    ] = None,
    trace_share: Annotated[
        float | None,
        typer.Option(help="Of requests without a trace context, how many begin a trace: 0 to 1."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Run an OpenAI-compatible front over engines, until SIGTERM. Needs the extra router.

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
    with base.in_foreground():
        run(settings, secrets, _say_router_ready)


def _say_router_ready(url: str, engines: int) -> None:
    """The line is read by programs: its beginning and its end stay as they are."""
    what = "engine" if engines == 1 else "engines"
    print(f"kvpool {__version__} ready: router at {url}, {engines} {what}", flush=True)
