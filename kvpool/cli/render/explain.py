"""What `kvpool explain` asks of a router, and prints: why a request went where, and where one would go."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from rich.markup import escape

from kvpool.cli.render.text import make_console, make_table
from kvpool.errors import ClusterUnavailable, InvalidRequest, NotAuthenticated

if TYPE_CHECKING:
    from rich.console import Console

TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 16 << 20
TOKEN = "KVPOOL_ROUTER_TOKEN"  # noqa: S105  (the variable's name)

_OUTLOOK = {
    "cached_blocks": ">cached",
    "loaded_blocks": ">loaded",
    "pulled_blocks": ">pulled",
    "source": "from",
    "starts_s": ">starts",
    "prefill_s": ">prefill",
    "ttft_s": ">first token",
    "cost": ">cost",
}
_DECODER = {
    "tpot_s": ">a token",
    "lacks_blocks": ">lacks",
    "handover_s": ">handover",
    "cost": ">cost",
}


class RouterHttp:
    """A router's HTTP. url: http://HOST:PORT. token: the operator's; empty: none."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise InvalidRequest(f"--router {url!r}: give a router's URL, http://127.0.0.1:8080")
        self.url = url.rstrip("/")
        self._token = token

    def past(self, request: str) -> dict[str, Any]:
        """What became of a request, by its id."""
        found: dict[str, Any] = self._ask("/explain/" + quote(request, safe=""), None)
        return found

    def possible(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What would be done with a completion request now."""
        found: dict[str, Any] = self._ask("/explain", json.dumps(body).encode())
        return found

    def models(self) -> list[str]:
        return [row["id"] for row in self._ask("/v1/models", None)["data"]]

    def _ask(self, path: str, body: bytes | None) -> Any:
        """JSON. Raises `InvalidRequest`, `NotAuthenticated` or `ClusterUnavailable`."""
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self.url + path, data=body, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.loads(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                said = _said(error.read(ANSWER_BYTES_MAX))
            if error.code in {401, 403}:
                raise NotAuthenticated(f"the router: {said}; set {TOKEN}") from None
            raise InvalidRequest(f"the router: {said} ({error.code})") from None
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise ClusterUnavailable(
                f"no router answers at {self.url} ({reason}): start one with `kvpool router`, or name it "
                f"with --router"
            ) from None
        except ValueError:
            raise InvalidRequest(
                f"the server at {self.url} is not a kvpool router: it sent no JSON"
            ) from None


def _said(body: bytes) -> str:
    """The message of a router's error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"


def the_model(router: RouterHttp) -> str:
    """The model that there is. Raises `InvalidRequest` unless there is one."""
    found = router.models()
    if len(found) != 1:
        raise InvalidRequest(f"name one with --model: the router has {', '.join(found) or 'none'}")
    return found[0]


def show_past(told: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what became of a request."""
    console = console or make_console()
    facts = {k: v for k, v in told.items() if k not in {"request", "outcome", "steps"}}
    console.print(f"request {told['request']}: {told['outcome']}", markup=False)
    console.print(", ".join(_words(facts)), markup=False)
    for step in told["steps"]:
        nested = {k: v for k, v in step.items() if isinstance(v, (list, dict))}
        plain = {k: v for k, v in step.items() if k not in {"at_s", "what", *nested}}
        console.print()
        text = f"{step['at_s']:9.3f} s  {step['what']}"
        console.print("  ".join([text, *_words(plain)]), markup=False)
        if nested.get("candidates"):
            _print_rows(nested["candidates"], _OUTLOOK, plain.get("engine"), console)
        if nested.get("decode_candidates"):
            _print_rows(nested["decode_candidates"], _DECODER, plain.get("decode"), console)


def show_possible(told: Mapping[str, Any], console: Console | None = None) -> None:
    """Print where a request would go."""
    console = console or make_console()
    shown = f"{told['prompt_tokens']:,} tokens of prompt, {told['prompt_blocks']:,} blocks"
    if "rejected" in told:
        why = told["rejected"]
        console.print(f"{shown}: would be refused, {why['code']}: {why['reason']}", markup=False)
        return
    console.print(f"{shown}: would go to {told['engine']}", markup=False)
    console.print()
    _print_rows(told["candidates"], _OUTLOOK, told["engine"], console)
    if told["decode_candidates"]:
        console.print()
        _print_rows(told["decode_candidates"], _DECODER, None, console)


def _print_rows(
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str],
    chosen: str | None,
    console: Console,
) -> None:
    """Engines that might have had it; * is the one that was chosen."""
    table = make_table("", "  engine", *columns.values())
    for row in rows:
        mark = "*" if row["engine"] == chosen else " "
        cells = (escape(_text(name, row[name])) for name in columns)
        table.add_row(escape(f"{mark} {row['engine']}"), *cells)
    console.print(table)


def _words(facts: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_text(name, value)}" for name, value in facts.items()]


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f} s" if name.endswith("_s") else f"{value:.3f}"
    return str(value)
