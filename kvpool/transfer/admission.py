"""Which inbound connections stay when there is room for no more. Rules only: no I/O, no clock, no lock.

A peer keeps connections that it may need again, and so do all others: a node that many read from has its places
full of connections that nobody uses. A new connection takes the place of an idle one:

- of the peer that has most of them, the longest idle one;
- but never so that its own peer ends up with more than the other had: a peer with eight connections takes
  nobody's only one;
- or, if that leaves nothing, of its own peer;
- or, if that leaves nothing either, one of another peer that was admitted and has not asked anything yet. Not of its
  own: it was opened for the same work, and its first request may be on its way.

Connections with a request under way are not touched. Without any of these the new one is declined.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from kvpool.errors import Declined

C = TypeVar("C")


class PeerSlots(Generic[C]):
    """The admitted connections of a listener, at most `limit`. Its owner serialises the calls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._node_of: dict[C, str] = {}
        self._count: Counter[str] = Counter()
        self._idle: dict[C, None] = {}  # their last request was answered; longest idle first
        self._new: dict[C, None] = {}  # nothing was asked yet

    def admit(self, connection: C, node: str) -> C | None:
        """A place for a connection of this node; returns the one that has lost its place, if any.

        Raises `Declined`, with a reason for the peer, if there is none.
        """
        displaced = self._displaced(node) if len(self._node_of) >= self._limit else None
        if displaced is not None:
            self.leave(displaced)
        self._node_of[connection] = node
        self._count[node] += 1
        self._new[connection] = None
        return displaced

    def _displaced(self, node: str) -> C:
        own = [each for each in self._idle if self._node_of[each] == node]
        new = [each for each in self._new if self._node_of[each] != node]
        for connections in ([*self._idle], own, new):
            most = max((self._count[self._node_of[each]] for each in connections), default=0)
            for connection in connections:
                its_node = self._node_of[connection]
                if self._count[its_node] == most and (its_node == node or most > self._count[node]):
                    return connection
        raise Declined(
            f"this node serves {self._limit} connections of peers already, of which {self._count[node]} are "
            f"{node}'s, and can give up none for another: raise peers_max there if this lasts"
        )

    def busy(self, connection: C) -> None:
        """A request came. No effect on one that has lost its place."""
        self._idle.pop(connection, None)
        self._new.pop(connection, None)

    def idle(self, connection: C) -> None:
        """Its request was answered."""
        if connection in self._node_of:
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def leave(self, connection: C) -> None:
        """It has ended. Idempotent."""
        node = self._node_of.pop(connection, None)
        self._idle.pop(connection, None)
        self._new.pop(connection, None)
        if node is not None:
            self._count[node] -= 1
            if not self._count[node]:
                del self._count[node]
