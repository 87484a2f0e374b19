"""Where an engine publishes the KV events of its own cache, as reported to the daemon of its node.

Takes vLLM's configuration without importing vLLM.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("kvpool.vllm")

_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104  (recognised, and not bound to)
_TCP = re.compile(r"tcp://(.+):(\d+)")


@dataclass(frozen=True, slots=True)
class Publisher:
    """As ZeroMQ connects to it, on this machine. replay: empty where missed events are not repeated."""

    endpoint: str
    replay: str = ""
    topic: str = ""


def publisher(config: Any, rank: int) -> Publisher | None:
    """The meaning of vLLM's `kv_events_config` for the engine of one data-parallel rank.

    None if nothing is published, or not in a way that the daemon could follow; the latter is logged.
    """
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return None
    endpoint = _local(config.endpoint, rank)
    # vLLM connects to an address without a wildcard: another process must listen there.
    if endpoint is None or not ("*" in config.endpoint or endpoint.startswith("ipc://")):
        log.warning(
            "the daemon cannot read the KV events at %s, so other nodes do not learn which blocks are in this "
            "engine's own cache: publish at tcp://*:PORT or ipc:///PATH",
            config.endpoint,
        )
        return None
    replay = _local(config.replay_endpoint, rank) if config.replay_endpoint else ""
    return Publisher(endpoint, replay or "", config.topic)


def reachable(config: Any, rank: int, host: str | None) -> Publisher:
    """The same as others on the network connect to it, at the host at which the engine is reached.

    Empty where nothing is published that could be followed. ipc:// is good on this machine only.
    """
    found = publisher(config, rank)
    if found is None:
        return Publisher("")
    at = f"[{host}]" if host and ":" in host else host
    return Publisher(
        found.endpoint.replace("//127.0.0.1:", f"//{at}:"),
        found.replay.replace("//127.0.0.1:", f"//{at}:"),
        found.topic,
    )


def _local(endpoint: str, rank: int) -> str | None:
    """An endpoint that vLLM binds to, as one to connect to; None if there is none on loopback."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if rank:
            return None  # vLLM has no addresses for further ranks then
        return endpoint if path.startswith("@") else f"ipc://{os.path.abspath(path)}"
    found = _TCP.fullmatch(endpoint)
    if found is None or not int(found[2]):
        return None
    host = "127.0.0.1" if found[1] in _WILDCARDS else found[1]
    return f"tcp://{host}:{int(found[2]) + rank}"
