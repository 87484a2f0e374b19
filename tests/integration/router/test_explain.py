"""`kvpool explain` against a real router before stub engines."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

TOKEN = "t" * 32


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
