"""Where an engine's events are to be had, from what vLLM was told of them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.events import Publisher, publisher


def config(**settings: Any) -> Any:
    """As vLLM's own, which is on."""
    defaults = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "topic": "",
    }
    return SimpleNamespace(**{**defaults, **settings})


@pytest.mark.parametrize(
    ("settings", "rank", "expected"),
    [
        ({}, 0, Publisher("tcp://127.0.0.1:5557")),
        ({}, 3, Publisher("tcp://127.0.0.1:5560")),
        (
            {"replay_endpoint": "tcp://*:5600", "topic": "kv"},
            2,
            Publisher("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5602", "kv"),
        ),
        (
            {"replay_endpoint": "tcp://127.0.0.2:5600"},
            0,
            Publisher("tcp://127.0.0.1:5557", "tcp://127.0.0.2:5600"),
        ),
        (
            {"replay_endpoint": "tcp://[::]:5600"},
            0,
            Publisher("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5600"),
        ),
        ({"endpoint": "ipc:///run/e"}, 0, Publisher("ipc:///run/e")),
        ({"endpoint": "ipc://@e"}, 0, Publisher("ipc://@e")),
        ({"endpoint": "ipc://e"}, 0, Publisher(f"ipc://{os.getcwd()}/e")),
    ],
)
def test_what_is_published_here(settings: Any, rank: int, expected: Publisher) -> None:
    assert publisher(config(**settings), rank) == expected


@pytest.mark.parametrize(
    "given", [None, config(enable_kv_cache_events=False), config(publisher="null")]
)
def test_nothing_is_published(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert publisher(given, 0) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("endpoint", "rank"),
    [
        ("tcp://collector:5557", 0),  # vLLM connects to it
        ("tcp://127.0.0.1:5557", 0),
        ("tcp://*:0", 0),  # at a port that only vLLM knows
        ("inproc://cache", 0),
        ("ipc:///run/e", 1),
    ],
)
def test_what_cannot_be_followed_is_told(
    endpoint: str, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert publisher(config(endpoint=endpoint), rank) is None
    assert endpoint in caplog.text
