"""`kvpool intend`: what is wanted for blocks of a prompt or a session."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli import base
from kvpool.cli.base import (
    EXIT_ERROR,
    OPERATORS,
    ROUTER,
    BlockKeys,
    DryRun,
    KeysFile,
    OfNamespace,
    RouterUrl,
    Session,
    argument,
    asks,
    option,
)
from kvpool.errors import InvalidRequest
from kvpool.types import Intent, Outcome

INTENT_S = 10.0  # for pins on disks, and the answers of others
REQUEST_BYTES_MAX = 16 << 20


@asks(panel=OPERATORS)
def intend(
    at: Session,
    intent: Annotated[
        Intent, argument("pin, unpin, keep, prefetch, expend or drop.", metavar="INTENT")
    ],
    keys: BlockKeys = None,
    keys_file: KeysFile = None,
    tokens_file: Annotated[
        Path | None,
        option(
            "A file with a prompt's token numbers, if engines of the namespace have announced their hashes.",
            metavar="FILE",
        ),
    ] = None,
    request_file: Annotated[
        Path | None,
        option(
            "A file with a request as an engine gets it, JSON with model and prompt or messages: a router tells the "
            "nodes of the model's engines. The token: KVPOOL_ROUTER_TOKEN.",
            metavar="FILE",
        ),
    ] = None,
    router: RouterUrl = ROUTER,
    session: Annotated[str, option("The blocks of this session instead.", metavar="SESSION")] = "",
    namespace: OfNamespace = None,
    node: Annotated[
        list[str] | None,
        option(
            "On this node; may be repeated. Default: the local one, or those of the model's engines.",
            "--node",
            metavar="NAME",
        ),
    ] = None,
    hard: Annotated[bool, option("Pin so that they are never evicted.", "--hard")] = False,
    for_: Annotated[
        str, option("How long to keep them: 90s, 15m, 12h, 7d.", "--for", metavar="TIME")
    ] = "0",
    dry_run: DryRun = False,
) -> None:
    """Pin, keep for a time, prefetch, expend or drop blocks of a prompt or a session, as far as there is room.

    Expended blocks go before others. Exit status 1 if no node accepts any of it.

    Example: kvpool intend pin 00112233445566778899aabbccddeeff --namespace 3fa9 --node host-7

    Example: kvpool intend keep --request-file chat.json --for 15m --router http://10.0.0.2:8080
    """
    from kvpool.cli.naming import block_keys, period
    from kvpool.cli.render.sessions import answers_view
    from kvpool.wire import operator as operator_wire

    wanted = block_keys(keys or [], keys_file)
    if sum(map(bool, (wanted, tokens_file, request_file, session))) != 1:
        raise InvalidRequest(
            "give a prompt's keys or tokens, --request-file FILE, or --session NAME"
        )
    if request_file is not None:
        if namespace is not None:
            raise InvalidRequest("--namespace: the router knows those of the engines itself")
        intended = {
            "intent": str(intent),
            "nodes": list(dict.fromkeys(node or [])),
            "hard": hard,
            "for_s": period(for_),
            "dry_run": dry_run,
        }
        told = _by_request(router, request_file, intended)
    else:
        if not session and namespace is None:
            raise InvalidRequest("keys and tokens need --namespace DIGEST")
        digest = at.resolve(namespace) if namespace else b""
        if tokens_file is not None:
            from kvpool.cli.prompt_keys import keys_of_tokens, read_tokens

            wanted = keys_of_tokens(
                read_tokens(tokens_file), at.client.routing.engines(), digest.hex()
            )
        message = operator_wire.IntendBlocks(
            str(intent), digest, b"".join(wanted), session, hard, period(for_), dry_run
        )
        rows = [
            {"node": name, **asdict(at.client.ask_node(message, node=name, wait_s=INTENT_S))}
            for name in dict.fromkeys(node or [at.client.cluster()["node"]])
        ]
        told = {"items": rows}
    at.show(told, answers_view(told["items"]))
    base.complain_of(dict(sorted(told.get("unreachable", {}).items())), fatal=False)
    if all(row["outcome"] in {Outcome.REFUSED, Outcome.MISSING} for row in told["items"]):
        raise typer.Exit(EXIT_ERROR)


def _by_request(router: str, file: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The answer of a router. Raises `InvalidRequest`, `NotAuthenticated`, `ClusterUnavailable`."""
    import json

    from kvpool.router.client import RouterHttp

    try:
        with file.open("rb") as opened:
            raw = opened.read(REQUEST_BYTES_MAX + 1)
        request = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read a request from {file}: {error}") from None
    if len(raw) > REQUEST_BYTES_MAX or not isinstance(request, dict):
        raise InvalidRequest(f"{file} is not a request: JSON with model, and prompt or messages")
    body = json.dumps({**wanted, "request": request}).encode()
    found: dict[str, Any] = RouterHttp(router).ask("/intents", body)
    return found
