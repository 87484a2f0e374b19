"""`kvpool explain` against a real router before stub engines."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from kvpool.router.hashing import DEFAULT_SEED, HashSpec, chain, none_hash
from kvpool.types import NamespaceRecord
from tests.support.servers.etcd import free_port
from tests.support.stub_engine import Speed
from tests.support.waiting import PATIENCE_S

TOKEN = "t" * 32
BLOCK_BYTES = 1024
RECORD = NamespaceRecord.simple("stub", block_bytes=BLOCK_BYTES, block_tokens=16)
SPEC = HashSpec(16, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))


async def explain(*words: str, **environ: str) -> SimpleNamespace:
    """The command's exit status, and what it has said."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "kvpool.cli", "explain", *words],
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)


async def test_why_a_request_went_where(world: Any) -> None:
    await world.engine("p", role="prefill")
    await world.engine("d", role="decode")
    await world.router()
    headers = {"x-request-id": "asked-about"}
    await world.complete(world.prompt(1, 320), max_tokens=2, headers=headers)
    done = await explain("asked-about", "--router", world.url)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "request asked-about: answered"
    (order,) = [line for line in lines if " s  order" in line]
    assert "engine=p" in order and "decode=d" in order
    assert any(line.startswith("* p ") for line in lines), "the candidate that was chosen"
    done = await explain("asked-about", "--json", KVPOOL_ROUTER=world.url)
    assert json.loads(done.out) == await world.get("/explain/asked-about")


async def test_why_blocks_of_a_request_were_missed(world: Any, start: Any) -> None:
    daemon = start("--node", "node-a")
    with daemon.client() as plugin:
        ns = plugin.open(RECORD)
        prompt = world.prompt(1, 320)
        keys = [each[-16:] for each in chain(SPEC, prompt)]
        plugin.put(ns, keys[:5], [bytes(BLOCK_BYTES)] * 5)
        plugin.remove(ns, keys[2:5])
        engine = await world.engine("a", speed=Speed(decode_s=0.02))
        world.tables[-1]["namespace"] = ns.digest.hex()
        await world.router(daemon=True, socket=daemon.socket)
        before = len(world.asked(engine))
        headers = {"x-request-id": "missed"}
        asking = asyncio.create_task(world.complete(prompt, max_tokens=200, headers=headers))

        async def begun() -> bool:
            return len(world.asked(engine)) > before

        await world.until(begun, "the engine has it")
        # As the engine's plugin would.
        lease = await asyncio.to_thread(plugin.acquire, ns, keys)
        assert lease is not None and lease.blocks == 2
        lease.release()
        await asking

        async def noted() -> bool:
            return "missing" in await world.get("/explain/missed")

        await world.until(noted, "the daemon has said why")
        why = (await world.get("/explain/missed"))["missing"]
        found = (why["engine"], why["block"], why["asked"], why["found"], why["reason"])
        assert found == ("a", 2, 20, 2, "removed")
        done = await explain("missed", "--router", world.url)
        assert "missed on a: block 3 of 20: removed by a client, " in done.out


async def test_where_a_prompt_would_go(world: Any) -> None:
    engine = await world.engine("e")
    await world.router()
    await world.until(lambda: _has_a_model(world), "the models are known")
    before = len(world.asked(engine))
    text = "Once upon a time " * 20
    done = await explain("--prompt", text, "--router", world.url)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[0].endswith(": would go to e")
    told = json.loads((await explain("--prompt", text, "--router", world.url, "--json")).out)
    assert told["engine"] == "e"
    assert f"{told['prompt_tokens']:,} tokens of prompt" in done.out
    completions = [each for each in world.asked(engine)[before:] if "max_tokens" in str(each)]
    assert completions == [], "nothing was computed"
    done = await explain("--prompt", "x", "--model", "nobody's", "--router", world.url)
    assert done.status == 1
    assert done.err.startswith("kvpool: the router: ")


async def _has_a_model(world: Any) -> bool:
    return len((await world.get("/v1/models"))["data"]) == 1


async def test_what_goes_wrong_names_the_remedy(world: Any) -> None:
    await world.engine("e")
    await world.router(environ={"KVPOOL_ROUTER_TOKEN": TOKEN})
    nowhere = f"http://127.0.0.1:{free_port()}"
    url = world.url
    for words, environ, status, hint in (
        (("never-seen", "--router", url), {"KVPOOL_ROUTER_TOKEN": TOKEN}, 1, "is unknown"),
        (("never-seen", "--router", url), {}, 4, "set KVPOOL_ROUTER_TOKEN"),
        (("x", "--router", nowhere), {}, 1, "start one with `kvpool router`"),
        (("x", "--router", "file:///etc/passwd"), {}, 1, "give a router's URL"),
        (("--router", url), {}, 1, "--prompt TEXT"),
        (("x", "--prompt", "y", "--router", url), {}, 1, "--prompt TEXT"),
    ):
        done = await explain(*words, **environ)
        assert (done.status, done.out) == (status, ""), (words, done.err)
        assert hint in done.err
        assert done.err.count("\n") == 1
