"""Why blocks were missed, in accounts: asked when a request ends, about its own reads, and of few at a time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvpool.router.hashing import HashSpec, Prompt
from kvpool.router.records.explain import Account
from kvpool.router.records.miss_notes import TOGETHER, MissNotes

SPEC = HashSpec(16, "sha256_cbor", b"start")
LAST = {"block": 2, "key": "aa", "asked": 4, "found": 2, "ago_s": 1.0, "reason": "full"}
TOLD = {"asked": 4, "missing": None, "last": LAST}


def prompt(tokens: int) -> Prompt:
    blocks = tokens // 16
    return Prompt("m", [1] * tokens, [b"h"] * blocks, [*range(blocks)], frozenset(), SPEC)


def account(arrived_s: float = 8.0) -> Account:
    return Account("r", "m", "", arrived_s)


class Daemon:
    """Says `told` of each prompt, once it may go on."""

    def __init__(self, told: dict[str, Any] | None) -> None:
        self.told = told
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.asked = 0

    async def why(self, _prompt: Prompt, engine: str) -> dict[str, Any] | None:
        assert engine == "e"
        self.asked += 1
        await self.goes_on.wait()
        return self.told


def run(
    told: dict[str, Any] | None, work: Callable[[MissNotes, Daemon], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        daemon = Daemon(told)
        notes = MissNotes(daemon.why, lambda: 10.0)
        await work(notes, daemon)
        await notes.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def asked(notes: MissNotes) -> None:
    """Wait for what is being asked."""
    await asyncio.gather(*notes._asking)


def noted(told: dict[str, Any] | None, *, tokens: int = 65, cached: int = 32) -> Any:
    found = account()

    async def work(notes: MissNotes, daemon: Daemon) -> None:
        notes.ended(found, prompt(tokens), "e", cached)
        await asked(notes)

    run(told, work)
    return found.plain().get("missing")


def test_the_reason_of_the_requests_own_read_is_noted() -> None:
    assert noted(TOLD) == {"engine": "e", **LAST}


def test_a_read_before_the_request_came_is_anothers() -> None:
    assert noted({**TOLD, "last": {**LAST, "ago_s": 2.5}}) is None
    assert noted({**TOLD, "last": None}) is None
    assert noted(None) is None


def test_what_keeps_the_daemon_from_saying_is_noted() -> None:
    assert noted({"error": "it is gone"}) == {"engine": "e", "error": "it is gone"}


def test_nothing_is_asked_where_all_was_cached() -> None:
    for tokens, cached, count in ((65, 64, 0), (64, 48, 0), (65, 48, 1), (15, 0, 0)):

        async def work(notes: MissNotes, daemon: Daemon) -> None:
            notes.ended(account(), prompt(tokens), "e", cached)  # noqa: B023
            await asked(notes)
            assert daemon.asked == count  # noqa: B023

        run(TOLD, work)


def test_few_are_asked_about_at_a_time_and_none_outlives_the_router() -> None:
    async def work(notes: MissNotes, daemon: Daemon) -> None:
        daemon.goes_on.clear()
        accounts = [account() for _ in range(TOGETHER + 1)]
        for each in accounts:
            notes.ended(each, prompt(65), "e", 0)
        await asyncio.sleep(0)
        assert daemon.asked == TOGETHER
        assert "too many" in accounts[-1].facts["missing"]["error"]
        await notes.close()
        assert "missing" not in accounts[0].facts

    run(TOLD, work)
