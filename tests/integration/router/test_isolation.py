"""A router that keeps its tenants' caches apart, before a stub engine that has a prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TOKENS = {name: f"token-of-the-tenant-{name}" for name in ("red", "blue", "gold")}
SECRET = "secret-of-the-isolation"
OPERATOR = {"KVPOOL_ROUTER_TOKEN": "token-of-the-operator"}
PROMPT = list(range(1, 401))


def private(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def tenants(folder: Path, **regions: str) -> dict[str, dict[str, Any]]:
    return {
        name: {"token_file": private(folder / f"{name}.token", token)}
        | ({"region": regions[name]} if name in regions else {})
        for name, token in TOKENS.items()
    }


async def cached(world: Any, tenant: str, **body: Any) -> int:
    """Tokens that the engine had of the prompt, when this tenant sent it."""
    before = (await world.state("a"))["cached_tokens"]
    headers = {"authorization": f"Bearer {TOKENS[tenant]}"}
    answer = await world.complete(PROMPT, headers=headers, max_tokens=1, **body)
    assert answer.status == 200, answer
    return int((await world.state("a"))["cached_tokens"] - before)


@pytest.mark.parametrize("isolate", [False, True])
async def test_what_one_tenant_sent_another_does_not_find(
    world: Any, folder: Path, isolate: bool
) -> None:
    await world.engine("a")
    secret = private(folder / "isolate.secret", SECRET)
    config = {"isolate": True, "isolate_secret_file": secret} if isolate else {}
    regions = {"blue": "shop", "gold": "shop"} if isolate else {}
    await world.router(environ=OPERATOR, tenants=tenants(folder, **regions), **config)
    assert await cached(world, "red") == 0
    found = await cached(world, "red")
    assert found >= 380, "one's own are found"
    assert await cached(world, "blue") == (0 if isolate else found)
    assert await cached(world, "gold") == found, "a region's are found"
    assert await cached(world, "gold", cache_salt="its own") == 0
    assert await cached(world, "blue", cache_salt="its own") == found
    assert await cached(world, "red", cache_salt="its own") == (0 if isolate else found)


async def test_the_router_sends_a_tenant_where_its_own_blocks_are(world: Any, folder: Path) -> None:
    """It hashes prompts with the salt that it sends: its index finds them."""
    await world.engine("a")
    await world.engine("b")
    secret = private(folder / "isolate.secret", SECRET)
    config = {"isolate": True, "isolate_secret_file": secret}
    await world.router(environ=OPERATOR, tenants=tenants(folder), **config)
    headers = {"authorization": f"Bearer {TOKENS['red']}"}
    for _ in range(6):
        answer = await world.complete(PROMPT, headers=headers, max_tokens=1)
        assert answer.status == 200

    async def found() -> bool:
        states = [await world.state(name) for name in ("a", "b")]
        return sum(state["cached_tokens"] for state in states) >= 5 * 380

    await world.until(found, "it is sent to the engine that has its blocks")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"isolate": True}, "isolate, isolate_secret_file: set both"),
        ({"isolate_secret_file": "/x"}, "isolate, isolate_secret_file: set both"),
        ({"isolate": True, "isolate_secret_file": "/none"}, "isolate_secret_file: cannot read"),
    ],
)
async def test_settings_that_say_half(world: Any, config: dict[str, Any], reason: str) -> None:
    await world.engine("a")
    assert reason in await world.refused_router(**config)


async def test_a_region_without_isolation_is_refused(world: Any, folder: Path) -> None:
    await world.engine("a")
    said = await world.refused_router(tenants=tenants(folder, red="shop"))
    assert "tenants.red.region" in said
