"""Spans on their way to a collector: as it decodes them, and when it is away."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvpool import __version__
from kvpool.errors import ConfigError, Unavailable
from kvpool.telemetry import spans
from kvpool.telemetry.otlp import ATTEMPTS_MAX, Counts, Exporter, export_spans
from kvpool.telemetry.spans import Batch, Finished
from tests.support.otlp_collector import Collector
from tests.support.patient_router import be_patient
from tests.support.waiting import PATIENCE_S

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(number: int, **more: Any) -> Finished:
    fields = {
        "trace": TRACE,
        "span": f"{number:016x}",
        "parent": "b7ad6b7169203331",
        "name": spans.ACQUIRE,
        "start_ns": 1_700_000_000_000_000_000 + number,
        "end_ns": 1_700_000_000_000_000_500 + number,
        "attributes": {"blocks": number, "tenant": "default", "ttft_s": 0.25},
    }
    return Finished(**(fields | more))


class Away:
    """A collector that takes nothing while `away`. Stands for `Exporter`."""

    endpoint = "http://collector"

    def __init__(self) -> None:
        self.away = False
        self.took: list[list[Finished]] = []
        self.tries: list[list[Finished]] = []

    def export(self, batch: list[Finished]) -> bool:
        self.tries.append(list(batch))
        if not self.away:
            self.took.append(list(batch))
        return not self.away


def run(
    exporter: Any,
    batches: list[Batch | Unavailable],
    done: Callable[[Counts], bool],
    each: Callable[[], None] = lambda: None,
) -> Counts:
    """Export what there is to take, until `done`."""
    counts = Counts()
    left = list(batches)

    async def take(_: int) -> Batch:
        each()
        found = left.pop(0) if left else Batch([])
        if isinstance(found, Unavailable):
            raise found
        return found

    async def main() -> None:
        task = asyncio.create_task(export_spans(take, exporter, counts, 0.0))
        async with asyncio.timeout(PATIENCE_S):
            while not done(counts):
                assert not task.done(), task.exception()
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    return counts


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector answers, however long that takes here."""
    be_patient(monkeypatch.setattr)


@pytest.mark.usefixtures("patient")
def test_a_collector_gets_what_was_recorded() -> None:
    with Collector() as collector:
        exporter = Exporter(collector.url, "kvpool-daemon", "node-a", __version__)
        root = span(1, parent="", name=spans.REQUEST)
        assert exporter.export([root, span(2, error="it broke off"), span(3, name=spans.TRANSFER)])
        exporter.close()
        first, second, third = collector.spans()
        assert collector.spans("00" * 16) == []
    assert (first.trace, first.span, first.parent) == (TRACE, "0" * 15 + "1", "")
    assert (first.start_ns, first.end_ns) == (root.start_ns, root.end_ns)
    assert [one.kind for one in (first, second, third)] == ["server", "server", "client"]
    assert [one.error for one in (first, second, third)] == [None, "it broke off", None]
    assert second.parent == "b7ad6b7169203331"
    assert second.attributes == {
        "kvpool.blocks": 2,
        "kvpool.tenant": "default",
        "kvpool.ttft_s": 0.25,
    }
    assert second.resource["service.name"] == "kvpool-daemon"
    assert second.resource["service.instance.id"] == "node-a"
    assert second.resource["service.version"] == __version__


def test_a_collector_that_is_not_there_is_a_failure_within_a_time() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        exporter = Exporter(f"http://127.0.0.1:{sock.getsockname()[1]}", "s", "i", "1")
        assert not exporter.export([span(1)])
        exporter.close()


@pytest.mark.usefixtures("patient")
def test_a_collector_that_refuses_is_a_failure() -> None:
    with Collector() as collector:
        collector.status = 400
        exporter = Exporter(collector.url, "s", "i", "1")
        assert not exporter.export([span(1)])
        collector.status = 200
        assert exporter.export([span(1)])
        exporter.close()


def test_all_is_sent_in_order() -> None:
    exporter = Away()
    batches = [
        Batch([span(1), span(2)], left=1),
        Batch([span(3)], dropped=7),
        Batch([]),
        Batch([span(4)]),
    ]
    counts = run(exporter, batches, lambda counts: counts.exported == 4)
    assert [[int(one.span, 16) for one in took] for took in exporter.took] == [[1, 2], [3], [4]]
    assert (counts.lost, counts.failures) == (0, 0)


def test_an_outage_is_said_once_and_what_is_too_old_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvpool.telemetry.otlp")
    exporter = Away()
    exporter.away = True
    taken = 0

    def each() -> None:
        nonlocal taken
        taken += 1
        exporter.away = taken <= 2

    batches = [Batch([span(1)], left=1), Batch([span(2), span(3)]), Batch([span(4)])]
    counts = run(exporter, batches, lambda counts: counts.exported == 1, each)
    assert [int(one.span, 16) for one in exporter.took[0]] == [4]
    assert (counts.lost, counts.failures) == (3, 2 * ATTEMPTS_MAX)
    assert exporter.tries.count([span(1)]) == ATTEMPTS_MAX
    said = [record.levelname for record in caplog.records]
    assert said == ["WARNING", "INFO"]


def test_spans_that_are_not_to_be_had_are_asked_for_again() -> None:
    exporter = Away()
    batches = [Unavailable("the daemon is away"), Batch([span(1)])]
    counts = run(exporter, batches, lambda counts: counts.exported == 1)
    assert (counts.failures, len(exporter.tries)) == (0, 1)


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"'\.\[tracing\]'"):
        Exporter("http://127.0.0.1:1", "s", "i", "1")
