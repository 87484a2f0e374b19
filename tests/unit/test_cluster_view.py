"""What the gateway asks the daemon once for all who want it."""

import asyncio
from typing import Any

from kvpool.admin.cluster_view import Fresh
from kvpool.admin.idempotency import Remembered
from kvpool.errors import Unavailable


def complaints_after(ask: Any) -> list[dict[str, Any]]:
    """What the event loop complains of, when one who asks has left before the answer fails."""
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        fail = asyncio.Event()

        async def find() -> Any:
            await fail.wait()
            raise Unavailable("the daemon has ended")

        asker = asyncio.create_task(ask(find))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asker.cancel()
        await asyncio.wait((asker,))
        fail.set()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(main())
    return complaints


def test_a_failure_that_nobody_waits_for_any_more_is_no_complaint() -> None:
    async def ask(find: Any) -> Any:
        return await Fresh(find, 1.0, lambda: 0.0).get()

    assert complaints_after(ask) == []


def test_nor_is_that_of_a_change_whose_client_has_left() -> None:
    async def ask(find: Any) -> Any:
        return await Remembered(lambda: 0.0).once("ana POST /v1/x", "a" * 20, b"{}", find)

    assert complaints_after(ask) == []
