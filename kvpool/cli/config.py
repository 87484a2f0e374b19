"""`kvpool config`: checks the configuration, shows that of running nodes, and changes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import AnyNode, AsJson, OnNodes, Session, argument, asks, named_nodes

config = base.group(
    "config", "The configuration: check a file; show and change that of running nodes."
)


@config.command("check")
def config_check(
    file: Annotated[
        Path | None, argument("A TOML file with settings; default: KVPOOL_CONFIG.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the configuration as `kvpool serve` does, and show each value and its source.

    Secrets are shown as ***. Exit status 1 on errors; the message names the remedy.

    Example: kvpool config check /etc/kvpool/kvpool.toml
    """
    from kvpool.cli.render.settings import effective, plain, toml_text

    found = effective(None if file is None else str(file), os.environ)
    base.show(plain(found), toml_text(found), as_json=as_json)


@asks(config, "show")
def config_show(at: Session, node: AnyNode = "") -> None:
    """Show the settings that a running node has now: which are defaults, and which can be changed.

    Of secrets only whether they are set.

    Example: kvpool config show --node host-7
    """
    from kvpool.cli.render.settings import running_view
    from kvpool.wire import operator as operator_wire

    found = at.client.ask_node(operator_wire.Settings(), node=node)
    at.show({"items": found}, running_view(found))


@asks(config, "set")
def config_set(
    at: Session,
    settings: Annotated[
        list[str],
        argument("A setting and its value, such as replicas_max=3.", metavar="NAME=VALUE..."),
    ],
    node: OnNodes = None,
) -> None:
    """Change settings of running nodes, until they end. For good, change their files too.

    Not all settings can be changed: `kvpool config show` marks them. Exit status 1 if a node did not change them;
    none does if the first one refuses.

    Example: kvpool config set log_level=debug --node host-7
    """
    from kvpool.cli.render.settings import change, parse_changes

    changes = parse_changes(settings)
    with base.in_doubt("config show"):
        done, failed = change(at.client, named_nodes(at.client, node), changes)
    at.show(
        {"nodes": done, "failed": failed},
        f"changed {', '.join(changes)} on {', '.join(done)}, until they end",
    )
    base.complain_of(failed)
