"""`kvpool pin` and `kvpool unpin`: set and remove pins."""

from __future__ import annotations

from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, OfNamespace, OnSomeNodes, Session, argument, asks, option

PinKeys = Annotated[list[str], argument("Block keys, 32 hex digits each.", metavar="KEY...")]


@asks(panel=OPERATORS)
def pin(
    at: Session,
    keys: PinKeys,
    kind: Annotated[str, option("soft: evicted last; hard: never evicted; none: no pin.")] = "soft",
    namespace: OfNamespace = None,
    node: OnSomeNodes = None,
) -> None:
    """Pin blocks of a node, in memory and on disks. Exit status 1 if some are not there.

    Example: kvpool pin 00112233445566778899aabbccddeeff --kind hard
    """
    _pin(at, keys, kind, namespace, node)


@asks(panel=OPERATORS)
def unpin(
    at: Session, keys: PinKeys, namespace: OfNamespace = None, node: OnSomeNodes = None
) -> None:
    """Remove pins: the blocks are evicted like any other. Exit status 1 if some are not there.

    Example: kvpool unpin 00112233445566778899aabbccddeeff
    """
    _pin(at, keys, "none", namespace, node)


def _pin(
    at: Session, keys: list[str], kind: str, namespace: str | None, node: list[str] | None
) -> None:
    from kvpool.cli.naming import block_keys
    from kvpool.wire import operator as operator_wire

    wanted = block_keys(keys)
    digest = at.resolve(namespace) if namespace else b""
    message = operator_wire.PinBlocks(b"".join(wanted), kind, digest)
    found = {name: at.client.ask_node(message, node=name) for name in dict.fromkeys(node or [""])}
    noun = "block" if len(wanted) == 1 else "blocks"
    what = f"{len(wanted)} {noun} {'unpinned' if kind == 'none' else f'pinned {kind}'}"
    lines = [f"{count} of {what}{f' on {name}' if name else ''}" for name, count in found.items()]
    at.show({"kind": kind, "keys": len(wanted), "found": found}, "\n".join(lines))
    if any(count < len(wanted) for count in found.values()):
        raise base.Failed(
            "not all of them are there: `kvpool blocks locate KEY` shows which nodes have a block (--node NAME)"
        )
