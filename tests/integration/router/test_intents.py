"""Intents for prompts by their text, through a real router to real daemons, before stub engines."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvpool.router.hashing import DEFAULT_SEED, HashSpec, chain, none_hash
from kvpool.types import NamespaceRecord
from tests.support.local_cluster import UNHURRIED, LocalCluster
from tests.support.stub_engine.tokens import chat_tokens
from tests.support.waiting import PATIENCE_S

BLOCK_BYTES = 1024
RECORD = NamespaceRecord.simple("stub", block_bytes=BLOCK_BYTES, block_tokens=16)
SPEC = HashSpec(16, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))
MESSAGES = [{"role": "user", "content": "a question of some length " * 10}]
CHAT = {"model": "stub", "messages": MESSAGES}
OPERATOR, RED, BLUE = (f"token-of-{name}-which-is-long" for name in ("operator", "red", "blue"))


def keys_of(tokens: Any, salt: str | None = None) -> list[bytes]:
    """As vLLM hashes them."""
    return [each[-16:] for each in chain(SPEC, tokens, salt=salt)]


async def intend(world: Any, **said: Any) -> Any:
    return await world.call("POST", "/intents", json.dumps(said).encode())


async def test_a_prompt_is_kept_and_dropped_by_its_text(
    world: Any, folder: Path, tmp_path: Path
) -> None:
    with LocalCluster(folder / "c", nodes=0, environ=UNHURRIED) as cluster:
        nodes = [cluster.add(f"node-{name}", "--memory", "32MiB") for name in "ab"]
        cluster.wait_acquainted()
        with nodes[0].client(connect=True) as a, nodes[1].client(connect=True) as b:
            tokens, _ = chat_tokens(MESSAGES)
            keys = keys_of(tokens)
            assert len(keys) > 4
            ns = a.open(RECORD)
            assert b.open(RECORD).digest == ns.digest
            a.put(ns, keys[:4], [bytes(BLOCK_BYTES)] * 4)
            other = keys_of(world.prompt(1, 64))
            a.put(ns, other, [bytes(BLOCK_BYTES)] * len(other))
            for name in "ab":
                await world.engine(name)
                world.tables[-1]["namespace"] = ns.digest.hex()
            await world.router(daemon=True, socket=nodes[0].socket)

            said = await intend(world, intent="keep", for_s=600, request=CHAT)
            assert said.status == 200, said.body
            items = {each.pop("node"): each for each in said.body["items"]}
            assert said.body["unreachable"] == {} and set(items) == {"node-a", "node-b"}
            assert items["node-a"]["namespace"] == ns.digest.hex()
            assert (items["node-a"]["outcome"], items["node-a"]["blocks"]) == ("accepted", 4)
            assert items["node-a"]["nbytes"] == 4 * BLOCK_BYTES
            assert items["node-a"]["missing"] == len(keys) - 4
            assert items["node-b"]["outcome"] == "missing"

            # The same by tokens, on a node that is named, and one that is not there.
            by_tokens = {"model": "stub", "prompt": list(tokens)}
            said = await intend(
                world, intent="drop", request=by_tokens, nodes=["node-a", "node-z"], dry_run=True
            )
            (item,) = said.body["items"]
            assert (item["node"], item["blocks"]) == ("node-a", 4)
            assert "node-z" in said.body["unreachable"]["node-z"]
            assert a.match(ns, keys) == 4

            file = tmp_path / "chat.json"
            file.write_text(json.dumps(CHAT))
            command = [sys.executable, "-m", "kvpool.cli", "intend", "drop"]
            done = await asyncio.to_thread(
                subprocess.run,
                [*command, "--request-file", str(file), "--router", world.url],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
                env={k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")},
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert "node-a" in done.stdout and "accepted" in done.stdout
            assert a.match(ns, keys) == 0
            assert a.match(ns, other) == len(other), "no other prompt's"
            metrics = await world.get("/metrics")
            assert 'kvpool_router_intents_total{outcome="accepted"} 3.0' in metrics
            assert 'kvpool_router_intents_total{outcome="unreachable"} 1.0' in metrics


async def test_tenants_reach_their_own_blocks_only(world: Any, folder: Path, start: Any) -> None:
    def private(name: str, text: str) -> str:
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
        return str(folder / name)

    daemon = start("--node", "node-a")
    tenants: dict[str, Any] = {
        "red": {"token_file": private("red", RED), "intents": ["keep", "drop", "pin"]},
        "blue": {"token_file": private("blue", BLUE)},
    }
    with daemon.client() as client:
        ns = client.open(RECORD)
        engine = await world.engine("a")
        world.tables[-1]["namespace"] = ns.digest.hex()
        assert "without isolate" in await world.refused_router(
            environ={"KVPOOL_ROUTER_TOKEN": OPERATOR}, tenants=tenants
        )
        await world.router(
            environ={"KVPOOL_ROUTER_TOKEN": OPERATOR},
            tenants=tenants,
            isolate=True,
            isolate_secret_file=private("secret", "secret-of-the-isolation"),
            daemon=True,
            socket=daemon.socket,
        )
        # The keys that each tenant's request has, by the salt that its engine was sent.
        prompt = world.prompt(1, 64)
        keys = {}
        for token in (RED, BLUE):
            world.token = token
            assert (await world.complete(prompt, max_tokens=1)).status == 200
            salt = world.asked(engine)[-1].body["cache_salt"]
            keys[token] = keys_of(prompt, salt)
            client.put(ns, keys[token], [bytes(BLOCK_BYTES)] * 4)
        assert keys[RED] != keys[BLUE]
        request = {"model": "stub", "prompt": prompt}
        assert (await intend(world, intent="drop", request=request)).status == 403, "blue may not"
        world.token = RED
        assert (await intend(world, intent="expend", request=request)).status == 403
        hard = await intend(world, intent="pin", hard=True, request=request)
        assert hard.status == 403 and "operator" in hard.body["error"]["message"]
        as_blue = await world.call(
            "POST",
            "/intents",
            json.dumps({"intent": "drop", "request": request}).encode(),
            x_kvpool_tenant="blue",
        )
        assert [each["blocks"] for each in as_blue.body["items"]] == [4]
        assert (client.match(ns, keys[RED]), client.match(ns, keys[BLUE])) == (0, 4)
        world.token = OPERATOR
        said = await intend(world, intent="drop", request=request)
        assert [each["outcome"] for each in said.body["items"]] == ["missing"]
        await world.call(
            "POST",
            "/intents",
            json.dumps({"intent": "drop", "request": request}).encode(),
            x_kvpool_tenant="blue",
        )
        assert client.match(ns, keys[BLUE]) == 0
        world.token = "nobody"
        assert (await intend(world, intent="drop", request=request)).status == 401


async def test_what_cannot_be_meant_is_refused(world: Any, start: Any) -> None:
    daemon = start("--node", "node-a")
    await world.engine("a")
    await world.router(daemon=True, socket=daemon.socket)
    request = {"model": "stub", "prompt": world.prompt(1, 64)}
    for said in (
        {"intent": "borrow", "request": request},
        {"intent": "pin"},
        {"intent": "pin", "request": 7},
        {"intent": "pin", "request": {"model": "stub", "prompt": [1, 2]}},
        {"intent": "pin", "request": {"model": "stub", "prompt": ["a", "b"]}},
        {"intent": "pin", "request": {"model": "stub"}},
        {"intent": "pin", "request": request, "session": "x"},
        {"intent": "keep", "request": request},
        {"intent": "pin", "request": request, "for_s": 1},
        {"intent": "keep", "request": request, "for_s": 1e9},
        {"intent": "drop", "request": request, "hard": True},
        {"intent": "pin", "request": request, "path": "/v1/embeddings"},
        {"intent": "pin", "request": request, "nodes": ["../x"]},
        {"intent": "pin", "request": request, "nodes": ["n"] * 65},
    ):
        answer = await intend(world, **said)
        assert answer.status == 400, (said, answer)
        assert answer.body["error"]["message"]
    unknown = {"model": "nobody's", "prompt": "x"}
    assert (await intend(world, intent="pin", request=unknown)).status == 404
    for raw in (b"", b"[", b"\xff", b"[" * 100_000, b'{"intent":"pin","request":' + b"[" * 10_000):
        assert (await world.call("POST", "/intents", raw)).status == 400
    # The namespace is not open on this daemon: it says so.
    (why,) = (await intend(world, intent="pin", request=request)).body["unreachable"].values()
    assert "is not open" in why
