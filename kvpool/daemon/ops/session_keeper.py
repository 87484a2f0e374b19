"""What clients tell of their sessions, and what follows from it for the eviction order. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest
from kvpool.types import PauseKind

TICK_S = 0.25
TOGETHER = 256  # blocks take the event loop about a millisecond
NAME_MAX = 256
PAUSE_MAX_S = 7 * 86_400.0
_PAUSES = {"": None, **{str(kind): kind for kind in PauseKind}}


class SessionKeeper:
    """Passes turns to the rules, and applies these piece by piece."""

    def __init__(self, node: Node, ssd: SsdTier, clock: Callable[[], float]) -> None:
        self._node = node
        self._clock = clock
        self._told = asyncio.Event()
        node.sessions.follow(ssd.expend)

    def turn(
        self,
        tenant: Tenant,
        namespace: NamespaceState | None,
        name: str,
        agent: str,
        keys: bytes,
        pause_s: float | None,
        pause: str,
        *,
        ended: bool,
    ) -> bool:
        """See `Sessions.turn`; whether the session goes on. Raises `InvalidRequest`."""
        for text, what in ((name, "a session"), (agent, "an agent")):
            if len(text) > NAME_MAX or not text.isprintable():
                raise InvalidRequest(
                    f"the name of {what} must be at most {NAME_MAX} printable characters, not {text!r:.100}"
                )
        if not name:
            raise InvalidRequest("a session needs a name")
        if pause not in _PAUSES:
            raise InvalidRequest(f"a session waits for a tool or a person, not {pause!r:.100}")
        if pause_s is not None and not 0 <= pause_s <= PAUSE_MAX_S:
            raise InvalidRequest(
                f"a pause must be from 0 to {PAUSE_MAX_S:.0f} seconds, not {pause_s:g}"
            )
        session = self._node.sessions.turn(
            tenant,
            namespace,
            name,
            agent,
            keys,
            self._clock(),
            pause_s=pause_s,
            pause=_PAUSES[pause],
            ended=ended,
        )
        self._told.set()
        return session is not None

    async def run(self) -> None:
        """Until cancelled."""
        sessions = self._node.sessions
        while True:
            if sessions.expecting:
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._told.wait()
                except TimeoutError:
                    pass
            else:
                await self._told.wait()
            self._told.clear()
            sessions.keep_ahead(self._clock())
            more = True
            while more:
                more = sessions.work(TOGETHER)
                await asyncio.sleep(0)
