"""`kvpool explain`: asks a router over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from kvpool.cli import base
from kvpool.cli.base import OPERATORS, ROUTER, AsJson, RouterUrl, app, argument, option
from kvpool.errors import InvalidRequest

if TYPE_CHECKING:
    from kvpool.router.client import RouterHttp


@app.command(rich_help_panel=OPERATORS)
def explain(
    request: Annotated[
        str | None,
        argument(
            "A request's id, from the header x-kvpool-request-id of its answer.",
            metavar="REQUEST_ID",
        ),
    ] = None,
    prompt: Annotated[
        str | None, option("Show where this prompt would go. Nothing is sent to engines.")
    ] = None,
    model: Annotated[str, option("The prompt's model; may be omitted if there is only one.")] = "",
    router: RouterUrl = ROUTER,
    as_json: AsJson = False,
) -> None:
    """Explain where a request went, or where a prompt would go now. The token: KVPOOL_ROUTER_TOKEN.

    Example: kvpool explain cmpl-7f3a --router http://10.0.0.2:8080

    Example: kvpool explain --prompt "Once upon a time" --model llama-3-70b
    """
    import json
    from urllib.parse import quote

    from kvpool.cli.render.explain import past_view, possible_view
    from kvpool.router.client import RouterHttp

    if (request is None) == (prompt is None):
        raise InvalidRequest("give the id of a request, or --prompt TEXT")
    asked = RouterHttp(router)
    told: dict[str, Any]
    if request is not None:
        told = asked.ask(f"/explain/{quote(request, safe='')}")
    else:
        body = {"model": model or _the_model(asked), "prompt": prompt}
        told = asked.ask("/explain", json.dumps(body).encode())
    view = possible_view if request is None else past_view
    base.show(told, view(told), as_json=as_json)


def _the_model(router: RouterHttp) -> str:
    """The model that there is. Raises `InvalidRequest` unless there is one."""
    found = [str(row["id"]) for row in router.ask("/v1/models")["data"]]
    if len(found) != 1:
        raise InvalidRequest(f"name one with --model: the router has {', '.join(found) or 'none'}")
    return found[0]
