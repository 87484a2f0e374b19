"""What an engine's process tells of its engine, and what routers ask about all engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.client.namespaces import Requests
from kvpool.decoding import finite
from kvpool.errors import Unavailable
from kvpool.types import EngineRecord, Keys, Namespace, check_digest, pack_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame


class OwnEngine:
    """The engine of this process: one a client, so that a new call replaces the previous one."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def follow_events(
        self,
        ns: Namespace,
        endpoint: str,
        *,
        replay: str = "",
        topic: str = "",
        groups: Sequence[int] = (),
    ) -> bool:
        """Have the daemon follow the KV events of this process's engine, now and again after each restart.

        Blocks in its cache are announced as tier `gpu`, until this process ends: a hint for
        routers, never a source of bytes.

        endpoint: ZeroMQ address to connect to: `tcp://127.0.0.1:5557` or `ipc:///path`, on this
            machine only; empty: stop following.
        replay: where the engine repeats missed events, or empty. topic: of the events.
        groups: the cache group, in the events' numbers, of each part of the namespace, in their order.
        False when the daemon does not follow them: it is unreachable (it is told later, when the namespace
        is used), it is configured not to (`events`), or it has no pyzmq.
        Raises `InvalidRequest` for addresses that cannot be followed, and `LimitExceeded`.
        """
        fields = endpoint, replay, topic, list(groups)
        answer = self._announce(ns, client_wire.FollowEvents, fields, stays=bool(endpoint))
        return answer is not None and bool(answer.value)

    def announce(self, ns: Namespace, engine: EngineRecord | None) -> bool:
        """Announce this process's engine to all nodes, so that routers send requests to it; None: withdraw.

        Valid until this process ends. A restarted daemon is told again once the namespace is used there; a client
        that seldom uses it should repeat the call periodically, which is cheap. False when the daemon is
        unreachable. Raises `InvalidRequest` for invalid records, and `LimitExceeded`.
        """
        stays = engine is not None
        return self._announce(ns, client_wire.AnnounceEngine, (engine,), stays=stays) is not None

    def _announce(
        self,
        ns: Namespace,
        kind: Callable[..., frame.Message],
        fields: tuple[Any, ...],
        *,
        stays: bool,
    ) -> Any:
        """The answer; None: the daemon is unreachable. stays: whether further daemons are told too."""
        announced = self._requests.namespaces.announced
        if stays:
            announced[kind] = ns.digest, fields
        else:
            announced.pop(kind, None)
        try:
            return self._requests.ask_in(ns, kind, *fields)
        except Unavailable:
            return None


class Routing:
    """What routers ask about engines and prompts. Everything raises `Unavailable`.

    ask: gives the answer to a message, for which it waits so much longer than for others. wait_s: for other nodes'
    answers.
    """

    def __init__(self, ask: Callable[[frame.Message, float], Any], wait_s: float) -> None:
        self._ask = ask
        self._wait_s = wait_s

    def engines(self) -> list[dict[str, Any]]:
        """The engines of this tenant, on all nodes: see `kvpool.wire.client.Engines`."""
        return list(self._found(client_wire.Engines(), self._wait_s))

    def prefixes(
        self, digest: bytes, keys: Keys, *, wait_s: float = 0.05
    ) -> dict[str, tuple[int, int]]:
        """How much of a prefix each node could provide, in blocks: from its memory, and from its memory and
        disks.

        Engines' own caches are not counted. digest: of the namespace, which need not be
        open here. wait_s: other nodes are left out when the directory takes longer. Nodes without blocks
        are left out. A hint: blocks come and go.
        """
        wait_s = finite(wait_s, "wait_s")
        message = client_wire.Prefixes(check_digest(digest), pack_keys(keys), wait_s)
        found = self._found(message, wait_s)
        return {node: (memory, both) for node, (memory, both) in found.items()}

    def why_missing(self, digest: bytes, keys: Keys, *, node: str = "") -> dict[str, Any]:
        """Why a node could not provide more of a prompt, now and when it was last read: see
        `kvpool.wire.client.WhyMissing`.

        digest: of the namespace, which must be open on that node. node: its name; empty: this client's. Raises
        `InvalidRequest` for a namespace that is not open there.
        """
        message = client_wire.WhyMissing(check_digest(digest), pack_keys(keys), node)
        return dict(self._found(message, self._wait_s))

    def _found(self, message: frame.Message, wait_s: float) -> Any:
        return json.loads(self._ask(message, wait_s).data)
