"""A router's flags, what it shows, and how it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer.main

from kvpool.cli.verbs import app
from kvpool.retry import BreakerState
from kvpool.router.command import Router, _drain
from kvpool.router.config import SETTINGS
from kvpool.router.records.metrics import Metrics


@pytest.mark.parametrize("hurried", [True, False])
def test_it_waits_for_the_last_request_unless_somebody_is_in_a_hurry(
    hurried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        hurry, last = asyncio.Event(), asyncio.Event()

        async def drained(within_s: float) -> bool:
            await last.wait()
            return True

        retired: list[bool] = []
        router: Any = SimpleNamespace(
            serving=SimpleNamespace(active=SimpleNamespace(drained=drained)),
            retire=lambda: retired.append(True),
        )
        task = asyncio.create_task(_drain(cast(Router, router), 50.0, hurry))
        await asyncio.sleep(0)
        assert retired and not task.done()
        (hurry if hurried else last).set()
        await task

    asyncio.run(main())
    assert ("aborted" in caplog.text) == hurried


def test_flags_are_settings() -> None:
    program: Any = typer.main.get_command(app)
    names = {option.name for option in program.commands["router"].params}
    assert names - {"config", "verbose"} <= set(SETTINGS)
    assert {"engines", "listen", "deadline_s", "log_format"} <= names


def test_an_engine_that_is_gone_is_no_more_in_the_metrics() -> None:
    metrics = Metrics()
    metrics.breaks("a", BreakerState.OPEN)
    metrics.breaks("b", BreakerState.CLOSED)
    for name in ("a", "never seen"):
        metrics.forget(name)
    text = metrics.text().decode()
    assert 'engine="a"' not in text
    assert 'kvpool_router_engine_up{engine="b"} 1.0' in text
    assert 'kvpool_router_engine_breaker{engine="b",state="open"} 0.0' in text
