"""`kvpool serve`: this node's daemon, in the foreground."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer  # noqa: TC002  (read from the hints)

from kvpool import __version__
from kvpool.cli import base
from kvpool.cli.base import app, option
from kvpool.cli.settings_command import ServeCommand
from kvpool.cli.supervisor import tell_ready
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.config import DaemonConfig
    from kvpool.daemon.server.server import Started


@app.command(cls=ServeCommand)
def serve(
    ctx: typer.Context,
    config: Annotated[str | None, option("TOML file with settings.", metavar="FILE")] = None,
    verbose: Annotated[bool, option("Log more: --log-level info.", "--verbose", "-v")] = False,
) -> None:
    """Run this node's daemon until SIGTERM. Needs no configuration.

    SIGINT and SIGHUP end it in the same way. Started by nohup, it goes on after its terminal is closed.

    Example: kvpool serve --listen tcp://10.0.0.5:7070 --join etcd://10.0.0.1:2379
    """
    from kvpool.cli.render.taking import Taking
    from kvpool.config import load
    from kvpool.daemon.server.server import serve as run
    from kvpool.telemetry import logs

    flags = {"log_level": "info"} | ctx.obj if verbose else ctx.obj
    if _holds_password(flags.get("directory") or ""):
        raise ConfigError(
            "--directory contains a password, and every user of this machine can see the arguments of a process: "
            "set KVPOOL_DIRECTORY_PASSWORD, or directory_password in a file of mode 0600"
        )
    settings = load(file=config, flags=flags)
    logs.setup(settings.log_level, settings.log_format)
    taking = Taking(sys.stderr, time.monotonic, logged=settings.log_format == "json")
    try:
        with base.in_foreground():
            run(settings, _say_ready, taking, partial(_say_gateway, settings))
    finally:
        taking.end()


def _holds_password(url: str) -> bool:
    login, at, _ = url.partition("://")[2].rpartition("@")
    return bool(at) and ":" in login


def _say_ready(started: Started) -> None:
    """Programs parse the first line: keep its beginning and its end unchanged."""
    config = started.config
    memory_mib = started.memory_bytes >> 20
    where = f", peers at {', '.join(started.urls)}" if started.urls else ""
    text = (
        f"kvpool {__version__} ready: node {config.node}, {memory_mib} MiB of DRAM, "
        f"socket {config.socket}{where}"
    )
    if config.join:
        others = started.others
        text += (
            f"\njoined cluster {config.cluster} as incarnation {started.incarnation}, "
            f"{others} other {'node' if others == 1 else 'nodes'} to pull from, "
            f"{'with' if config.directory else 'without'} a directory"
        )
    print(text, flush=True)
    tell_ready(os.environ)


def _say_gateway(config: DaemonConfig, urls: list[str]) -> None:
    from kvpool.daemon.workers.gateway import token_path

    tokens = config.http_tokens
    where = f"tokens in {tokens}" if tokens else f"token in {token_path(config)}"
    print(f"HTTP gateway at {', '.join(urls)}, dashboard at /ui/, {where}", flush=True)
