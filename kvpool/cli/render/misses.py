"""The questions and the output of `kvpool blocks lookup --why`: why a node lacks a block of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.cli.render.jobs import nodes_of
from kvpool.cli.render.text import DIGEST_SHOWN, count, duration, make_console
from kvpool.errors import ClusterUnavailable, InvalidRequest, ProtocolError, Unavailable
from kvpool.wire import client as client_wire
from kvpool.wire import operator as operator_wire

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.cli.render.jobs import Asks


def ask_why(
    client: Asks, tenant: str, digest: bytes, keys: Sequence[bytes]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Each node's reasons, by name; and the nodes that gave none, with why. Nodes without the namespace are left out."""
    told: dict[str, dict[str, Any]] = {}
    silent: dict[str, str] = {}
    message = client_wire.WhyMissing(digest, b"".join(keys))
    for node in nodes_of(client.ask_node(operator_wire.Cluster())):
        try:
            told[node] = client.ask_node(message, node=node, tenant=tenant)
        except InvalidRequest as error:
            if "is not open on" not in str(error):
                silent[node] = str(error)
        except (Unavailable, ClusterUnavailable, ProtocolError) as error:
            silent[node] = str(error)
    return told, silent


def show_why(told: Mapping[str, Mapping[str, Any]], console: Console | None = None) -> None:
    """Print what the nodes told."""
    console = console or make_console()
    for node, found in told.items():
        for line in lines_of(node, found):
            console.print(line, markup=False)


def lines_of(node: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What is missing now, and what was at the last read, if that differs."""
    missing, last = found["missing"], found["last"]
    if missing is not None:
        yield f"{node}: {sentence(missing, found['asked'])}"
    else:
        yield f"{node}: all {count(found['asked'], 'block')} are there"
    if last is not None and (missing is None or _differs(last, missing)):
        when = f"{duration(last['ago_s'])} ago a read ended at"
        yield f"{node}: {when} {sentence(last, last['asked'])}"


def _differs(last: Mapping[str, Any], missing: Mapping[str, Any]) -> bool:
    return (last["key"], last["reason"]) != (missing["key"], missing["reason"])


def sentence(why: Mapping[str, Any], asked: int) -> str:
    """`block 12 of 40: evicted, as its tier was full, 34 s ago from dram, 12 min after its last use, …`."""
    text = [f"block {why['block'] + 1} of {asked}: {why['words']}"]
    if why["age_s"] is not None:
        text.append(f"{duration(why['age_s'])} ago from {why['tier']}")
    if why["idle_s"] is not None:
        text.append(f"{duration(why['idle_s'])} after its last use")
    if why["by"]:
        text.append(f"by a put of namespace {why['by'][:DIGEST_SHOWN]}")
    if why["where"]:
        text.append(why["where"])
    if why["differs"]:
        text += [
            f"{name}: {there!r} there, {here!r} here"
            for name, (there, here) in why["differs"].items()
        ]
    return ", ".join(text)
