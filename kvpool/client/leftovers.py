"""Leases and reservations that callers are done with, of which the daemon is to hear. Internal to `kvpool.client`."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass

from kvpool.client.connection import Connection
from kvpool.types import PARTS_MAX
from kvpool.wire import client as client_wire
from kvpool.wire import frame


@dataclass(slots=True, weakref_slot=True, eq=False)
class Ticket:
    """The number of a reservation, and the incarnation of its daemon."""

    number: int
    incarnation: str


class Leftovers:
    """What is sent ahead of the next request. Thread-safe, without a lock: see `connection.py`.

    finished: tokens of leases to release.
    """

    def __init__(self) -> None:
        self.finished: deque[str] = deque(maxlen=client_wire.TOKENS_MAX)
        self._orphans: dict[int, str] = {}
        """Reservations to abort: their daemon's incarnation, by ticket."""
        self._tickets = itertools.count(1)
        # Of reservations whose slots nobody has been given, with their daemon's incarnation.
        self._unseen: dict[int, weakref.KeyedRef[tuple[int, str], Ticket]] = {}
        self._dropped: deque[weakref.KeyedRef[tuple[int, str], Ticket]] = deque()
        """Those of them whose ticket is gone, in the order of their end."""

    def ticket(self, incarnation: str) -> Ticket:
        """Number a reservation of that daemon. It is aborted if the ticket is dropped before it is `seen`."""
        ticket = Ticket(next(self._tickets), incarnation)
        key = ticket.number, incarnation
        self._unseen[ticket.number] = weakref.KeyedRef(ticket, self._dropped.append, key)
        return ticket

    def seen(self, ticket: Ticket) -> None:
        """The caller may write to the reservation's slots from now on, or it is settled."""
        self._unseen.pop(ticket.number, None)

    def abandon(self, ticket: Ticket) -> None:
        """Have a reservation aborted by its daemon, if that answers next. Nobody writes to its slots any more."""
        self._orphans[ticket.number] = ticket.incarnation
        self.seen(ticket)

    def send(self, connection: Connection) -> None:
        """Tell the daemon all, what can wait together with the next request. Raises `Unavailable`."""
        if self._dropped:
            self._find_dropped()
        if self._orphans:
            self._tell_orphans(connection)
        if self.finished:
            tokens: list[str] = []
            while self.finished and len(tokens) < client_wire.TOKENS_MAX:
                try:
                    tokens.append(self.finished.popleft())
                except IndexError:  # another thread took the last one
                    break
            connection.ahead += frame.encode(client_wire.Release(tokens), 0)

    def _find_dropped(self) -> None:
        """Abandon reservations whose slots nobody was given, and nobody will be."""
        for ref in list(self._dropped):
            number, incarnation = ref.key
            self._orphans[number] = incarnation
            self._unseen.pop(number, None)
            try:
                self._dropped.remove(ref)  # the first, unless another thread was faster
            except ValueError:
                pass

    def _tell_orphans(self, connection: Connection) -> None:
        """Report to the daemon slots that nobody will commit. A second report of the same changes nothing."""
        orphans = dict(self._orphans)
        its = [ticket for ticket, of in orphans.items() if of == connection.daemon.incarnation]
        for begin in range(0, len(its), PARTS_MAX):  # one request takes no more
            connection.tell(client_wire.Abort(its[begin : begin + PARTS_MAX]))
        for ticket in orphans:
            self._orphans.pop(ticket, None)
