"""The router before two real servers, each on a node of its own: right answers, lost saves, and deaths in the middle.

The servers announce themselves through their nodes' daemons. They are started once, and killed one after the
other by tests that build on one another, in the order of this file. The second one may pin a single block for its saves,
so that nearly all of them are dropped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvpool.client import OperatorClient
from kvpool.wire import operator as operator_wire
from tests.support.servers.etcd import free_port

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 180.0
PROMPT_TOKENS, LONG_TOKENS, NEW, LONG_NEW = 600, 3600, 16, 400
# On a busy machine, computing so short a prompt may be sooner than bringing it: then it would be computed.
LOADING = {
    "pull_wait_s": 30.0,
    "lookup_timeout_s": 30.0,
    "request_timeout_s": 30.0,
    "lease_s": 60.0,
    "prefill_tokens_per_s": 1.0,
}
SETTINGS: dict[str, dict[str, float]] = {"a": LOADING, "b": {**LOADING, "pin_share": 1e-9}}
FOLLOW_S_LEAST = (
    60.0  # a `PATIENT` router lets a decode engine follow a prompt for at least so long
)
PROGRAM = f"""
import kvpool.cli, kvpool.router.requests.active_request
kvpool.router.requests.active_request.FOLLOW_MORE_S = {FOLLOW_S_LEAST}
kvpool.cli.main()
"""
PATIENT = ("-c", PROGRAM)
"""Of the seconds that are usual, a busy machine may take all for something else."""


def _engines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_engines", ROOT / "bench/engines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


BENCH: Any = _engines()
# No test beside this one is given the same, nor is a connection: servers take long to listen.
BENCH.free_port = free_port


@dataclass
class Served:
    """The servers by their nodes' names, those that were not killed, and the sockets of the nodes."""

    kit: Any
    folder: Path
    servers: dict[str, Any]
    sockets: dict[str, str]
    alive: set[str]

    def prompt(self, seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
        found: list[int] = self.kit.TINY.prompt(seed, tokens)
        return found

    def router(self, name: str, *flags: str, **program: tuple[str, ...]) -> Any:
        """Its URL, once both servers are known to it and their hashes are verified."""
        return BENCH.router(self.folder, name, self.sockets["a"], *flags, **program)

    def router_apart(self, name: str, prefill: str, decode: str, **program: tuple[str, ...]) -> Any:
        """One that has the server of one node compute prompts, and that of the other decode."""
        roles = {"prefill": prefill, "decode": decode}
        engines = (f"{self.servers[node].url},role={role}" for role, node in roles.items())
        words = (word for engine in engines for word in ("--engine", engine))
        return self.router(name, *words, **program)

    def kill(self, node: str) -> None:
        """SIGKILL to a server and all its processes."""
        self.alive.discard(node)
        os.killpg(self.servers[node]._child.process.pid, signal.SIGKILL)

    def working(self, node: str) -> bool:
        """Whether the server computes anything now."""
        with urllib.request.urlopen(
            self.servers[node].url + "/metrics", timeout=PATIENCE_S
        ) as answer:
            lines = answer.read().decode().splitlines()
        return any(
            line.startswith("vllm:num_requests_running{") and float(line.split()[-1]) > 0
            for line in lines
        )


@pytest.fixture(scope="module")
def served(kit: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("r")
    with ExitStack() as stack:
        nodes = stack.enter_context(kit.run_cluster(folder, 2))
        sockets = {name: node.socket for name, node in zip("ab", nodes, strict=True)}
        servers = {
            name: stack.enter_context(
                BENCH.ApiServer(name, llama, folder, socket, "both", **SETTINGS[name])
            )
            for name, socket in sockets.items()
        }
        for server in servers.values():
            server.wait_ready()
        yield Served(kit, folder, servers, sockets, set(servers))


def whole(asked: list[int], new: int) -> dict[str, Any]:
    """A request for an answer that is not streamed."""
    return {
        "model": BENCH.SERVED_NAME,
        "prompt": asked,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask_whole(url: str, asked: list[int]) -> Any:
    """An answer that is not streamed, and long: until all of it is there, the client has nothing of it."""
    body = whole(asked, LONG_NEW) | {"logprobs": 2}
    with urllib.request.urlopen(post(url, body), timeout=2 * PATIENCE_S) as answer:
        choice = json.load(answer)["choices"][0]
    likeliest = [sorted(each.values()) for each in choice["logprobs"]["top_logprobs"]]
    margins = tuple(each[-1] - each[-2] for each in likeliest)
    return BENCH.Answer(0.0, 0.0, 0, choice["token_ids"], 0.0, margins)


def post(url: str, body: dict[str, Any]) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)


def ask_json(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def until_verified(url: str, count: int) -> None:
    """Until the router has compared its hashes with so many servers'."""

    def verified() -> bool:
        nonlocal engines
        engines = ask_json(url, "/engines")["knowledge"]["engines"]
        return [each["hashes"] for each in engines.values()] == ["verified"] * count

    engines: dict[str, Any] = {}
    try:
        until(verified, f"{count} engines are known and their hashes verified")
    except AssertionError as error:
        raise AssertionError(f"{error}: {engines}") from None


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def test_answers_are_those_of_the_engines_and_hand_over_goes_through_the_pool(
    served: Served,
) -> None:
    a, b = (served.servers[name] for name in "ab")
    with served.router_apart("router-roles", prefill="a", decode="b") as url:
        until_verified(url, 2)
        computed = b.computed_tokens()
        for seed in (1, 2):
            asked = served.prompt(seed)
            through = BENCH.ask(url, asked, NEW)
            assert BENCH.ask(a.url, asked, NEW).same(through)
            # The other engine has computed it for this request, whatever the one that answers had to compute of it.
            assert through.cached_tokens == 0
            again = BENCH.ask(url, asked, NEW)
            assert again.same(through)
            assert again.cached_tokens >= served.kit.hit(PROMPT_TOKENS) - served.kit.BLOCK
        # All but what is no whole block, and the last token, came from the other node.
        assert b.computed_tokens() - computed <= 2 * 4 * served.kit.BLOCK


def intend(url: str, **said: Any) -> Any:
    """The answers of nodes by their names."""
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url + "/intents", json.dumps(said).encode(), headers)
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        found = json.load(answer)
    assert found["unreachable"] == {}
    return {item["node"]: item for item in found["items"]}


def pinned(socket: str) -> set[str]:
    """The keys of blocks in a node's memory that are pinned for longer than a read."""
    with OperatorClient(socket, connect=True, timeout_s=PATIENCE_S) as client:
        found: Any = client.ask_node(operator_wire.ListBlocks("dram", "", 1000, b""))
    assert found.cursor is None
    return {block.key for block in found.blocks if block.pin != "none"}


def test_what_an_engine_has_saved_of_a_prompt_is_kept_by_its_text(served: Served) -> None:
    request = {"model": BENCH.SERVED_NAME, "prompt": "a question of some length, " * 40}
    before = pinned(served.sockets["a"])
    with served.router("router-intents") as url:
        until_verified(url, 2)
        body = {**request, "max_tokens": 1, "temperature": 0}
        with urllib.request.urlopen(
            post(served.servers["a"].url, body), timeout=PATIENCE_S
        ) as answer:
            tokens = json.load(answer)["usage"]["prompt_tokens"]
        looks = {"intent": "pin", "dry_run": True, "request": request}
        until(lambda: not intend(url, **looks)["a"]["missing"], "all of it is saved")
        kept = intend(url, intent="keep", for_s=600, request=request)["a"]
        assert kept["outcome"] == "accepted"
        assert kept["blocks"] == kept["asked"] == tokens // served.kit.BLOCK > 1
        assert len(pinned(served.sockets["a"]) - before) == kept["blocks"]
        intend(url, intent="unpin", request=request)
        assert pinned(served.sockets["a"]) == before


def receipts(socket: str) -> list[dict[str, Any]]:
    with OperatorClient(socket, connect=True, timeout_s=PATIENCE_S) as client:
        found: dict[str, Any] = client.ask_node(operator_wire.ListReceipts(0.0, 1e12, 1000))
    return list(found["receipts"])


def test_each_request_has_a_receipt_of_what_its_engine_got_from_the_pool(served: Served) -> None:
    a, b = (served.servers[name] for name in "ab")
    asked = served.prompt(5)
    before = {each["request"] for each in receipts(served.sockets["a"])}
    BENCH.ask(a.url, asked, NEW)
    hit = served.kit.hit(PROMPT_TOKENS) - served.kit.BLOCK

    def shared() -> bool:
        own = [each for each in receipts(served.sockets["a"]) if each["request"] not in before]
        with OperatorClient(served.sockets["a"], connect=True, timeout_s=PATIENCE_S) as client:
            settled = client.stats().cluster.directory.settled
        return settled and sum(each["written"]["tokens"] for each in own) >= hit

    until(shared, "the prompt's blocks are in the pool, and the directory knows them")
    known = {each["request"] for each in receipts(served.sockets["b"])}
    loaded = BENCH.ask(b.url, asked, NEW)
    assert loaded.cached_tokens >= hit

    def ended() -> bool:
        nonlocal new
        new = [each for each in receipts(served.sockets["b"]) if each["request"] not in known]
        return bool(new) and all(each["ended_s"] for each in new)

    new: list[dict[str, Any]] = []
    until(ended, "the engine says that the request has ended")
    (receipt,) = new
    reads = receipt["reads"]
    assert receipt["request"].startswith("cmpl-")
    assert sum(each["tokens"] for each in reads.values()) == loaded.cached_tokens
    assert reads["peer"]["tokens"] > 0


def counted(server: Any, name: str) -> float:
    """A counter of the plugin."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    pattern = rf"^vllm:kvpool_{name}_total\{{.*\}} (\S+)$"
    return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


@pytest.mark.parametrize("streamed", [True, False])
def test_who_follows_does_not_wait_for_what_is_not_saved(served: Served, streamed: bool) -> None:
    saver, follower = served.servers["b"], served.servers["a"]
    asked = served.prompt(60 + streamed, LONG_TOKENS)
    name = f"router-lost-{streamed}"
    with served.router_apart(name, prefill="b", decode="a", program=PATIENT) as url:
        until_verified(url, 2)
        names = "follows", "pull_wait_seconds"
        before = [counted(follower, name) for name in names]
        dropped = counted(saver, "dropped_saves")
        if streamed:
            through = BENCH.ask(url, asked, NEW)
        else:
            request = post(url, whole(asked, NEW))
            request.add_header("x-request-id", "lost")
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                value = json.load(answer)
            assert not value.get("kv_transfer_params"), "a client's answer has no report"
            through = BENCH.Answer(0, 0, 0, value["choices"][0]["token_ids"], 0)
            steps = ask_json(url, "/explain/lost")["steps"]
            *_, computed = (step for step in steps if step["what"] == "computed")
            assert computed["stored_tokens"] < LONG_TOKENS / 2
        follows, waited_s = (
            counted(follower, name) - old for name, old in zip(names, before, strict=True)
        )
    assert counted(saver, "dropped_saves") > dropped
    assert follows == 1
    assert waited_s < FOLLOW_S_LEAST
    assert BENCH.ask(follower.url, asked, NEW).same(through)


def test_a_server_killed_in_mid_prompt_loses_no_request(served: Served) -> None:
    with served.router("router-killed") as url, ThreadPoolExecutor(4) as threads:
        until_verified(url, 2)
        prompts = [served.prompt(10 + number, LONG_TOKENS) for number in range(4)]
        asking = [threads.submit(ask_whole, url, each) for each in prompts]
        until(lambda: served.working("a"), "the first server computes")
        served.kill("a")
        answers = [each.result(2 * PATIENCE_S) for each in asking]
        survivor = served.servers["b"].url
        for asked, answer in zip(prompts, answers, strict=True):
            assert BENCH.ask(survivor, asked, LONG_NEW).same(answer)


def test_a_server_killed_in_mid_stream_is_a_clear_error(served: Served) -> None:
    with served.router("router-stream") as url:
        until_verified(url, len(served.alive))
        body = {
            "model": BENCH.SERVED_NAME,
            "prompt": served.prompt(20),
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
        }
        request = post(url, body)
        lines = []
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as stream:
            for line in stream:
                lines.append(line)
                if len(lines) == 6:
                    for node in list(served.alive):
                        served.kill(node)
        last = json.loads(lines[-2].removeprefix(b"data: "))
        assert last["error"]["message"]
        assert b"[DONE]" not in b"".join(lines)
        # Nobody is left. One that comes before that is known waits for another engine, until its deadline.
        request.add_header("x-kvpool-deadline-s", "2")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        assert refused.value.code in (502, 503, 504)
        assert json.load(refused.value)["error"]["message"]
