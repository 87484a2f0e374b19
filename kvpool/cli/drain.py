"""`kvpool drain`: removes a node from the cluster on purpose."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_INTERRUPTED, OPERATORS, Session, argument, asks, option

DRAIN_S = 3600.0


@asks(panel=OPERATORS)
def drain(
    at: Session,
    node: Annotated[
        str | None, argument("The node's name. Without one only engines are drained.")
    ] = None,
    router: Annotated[
        list[str] | None,
        option(
            "First have this router send no new requests to engines of the node, and wait for those that they "
            "have; may be repeated. A name with several addresses means all of them.",
            metavar="URL",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        option(
            "Also this engine, by its URL or its name at the router; may be repeated.",
            metavar="URL",
        ),
    ] = None,
    cancel: Annotated[bool, option("Cancel the drain.", "--cancel")] = False,
    wait: Annotated[bool, option("Wait until the drain ends.", "--wait/--no-wait")] = True,
    timeout_s: Annotated[
        float,
        option(
            "The longest wait, seconds. Engines of a node have half of it to finish their requests.",
            "--timeout",
            min=0.0,
        ),
    ] = DRAIN_S,
) -> None:
    """Copy the blocks that only NODE holds to other nodes, and take it out of the cluster.

    With --router its engines are drained first: what they still store is copied, too. The token of routers:
    KVPOOL_ROUTER_TOKEN. Exit status 1 if requests or blocks were left behind, or the drain did not end in time.

    Example: kvpool drain host-7

    Example: kvpool drain host-7 --router http://routers.example.org:8080 --timeout 600

    Example: kvpool drain --engine http://10.0.0.7:8000 --router http://routers.example.org:8080
    """
    from kvpool.cli.drain_engines import EnginesDrain, check_wanted
    from kvpool.router.client import routers_at

    check_wanted(node, engine or (), router or ())
    ends_at = time.monotonic() + timeout_s
    said: list[str] = []
    good = True
    if router:
        engines = EnginesDrain(routers_at(router), node, engine or ())
        names = ", ".join((engines.cancel if cancel else engines.begin)()) or "none"
        said.append(f"engines that {'get requests again' if cancel else 'are drained'}: {names}")
        if wait and not cancel:
            text, good = engines.wait(timeout_s if node is None else timeout_s / 2)
            said.append(text)
    if node is not None:
        wait_s = max(0.0, ends_at - time.monotonic()) if wait else None
        text, done = _drain_node(at, node, cancel=cancel, wait_s=wait_s)
        said.append(text)
        good = good and done
    whole = "; ".join(said)
    if not good:
        raise base.Failed(whole)
    at.show({"node": node, "text": whole}, whole)


def _drain_node(at: Session, node: str, *, cancel: bool, wait_s: float | None) -> tuple[str, bool]:
    """What to tell the operator, and whether all is well. wait_s: None: do not."""
    from kvpool.cli.render.drain import call_off, carry_out

    with base.in_doubt("nodes"):
        if cancel:
            return call_off(at.client, node), True
        at.client.drain(node)
    if wait_s is None:
        return f"{node} will be drained; `kvpool nodes` shows its progress", True
    try:
        return carry_out(at.client, node, wait_s)
    except KeyboardInterrupt:
        base.complain(
            f"the drain of {node} continues: `kvpool drain {node}` shows it again, and "
            f"`kvpool drain {node} --cancel` cancels it"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
