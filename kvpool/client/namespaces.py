"""The namespaces that a client has opened: the daemon's numbers, and their engines' announcements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvpool.client.connection import Connection
from kvpool.errors import UnknownNamespace
from kvpool.types import Namespace, plain_parts
from kvpool.wire import client as client_wire

T = TypeVar("T")


class OpenNamespaces:
    """Registers namespaces with each daemon that answers. Thread-safe.

    generations: of weights, by namespace digest.
    events, engine: of the namespace whose engine publishes events, or accepts requests: its digest, and the
        message for the daemon once it has numbered the namespace.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.generations: dict[bytes, int] = {}
        self.events: tuple[bytes, Callable[[int], client_wire.FollowEvents]] | None = None
        self.engine: tuple[bytes, Callable[[int], client_wire.AnnounceEngine]] | None = None

    def number(self, connection: Connection, ns: Namespace) -> int:
        """The daemon's number of a namespace, which is registered if necessary."""
        number = connection.daemon.numbers.get(ns.digest)
        return self.make_known(connection, ns) if number is None else number

    def with_number(self, connection: Connection, ns: Namespace, request: Callable[[int], T]) -> T:
        """What a request by the namespace's number returns; once more if the daemon does not know it any more.

        It frees namespaces that are empty and that no client has open; a client whose connections all closed does
        not count.
        """
        try:
            return request(self.number(connection, ns))
        except UnknownNamespace:
            return request(self.make_known(connection, ns))

    def with_numbers(
        self,
        connection: Connection,
        namespaces: Sequence[Namespace],
        request: Callable[[list[int]], T],
    ) -> T:
        """As `with_number`, of several."""
        try:
            return request([self.number(connection, ns) for ns in namespaces])
        except UnknownNamespace:
            return request([self.make_known(connection, ns) for ns in namespaces])

    def make_known(self, connection: Connection, ns: Namespace) -> int:
        """Register a namespace with the daemon, which compares its sizes. Returns its number."""
        # With the generation of its opening: a daemon's restart does not change its weights.
        generation = self.generations.get(ns.digest, -1)
        message = client_wire.OpenNamespace(
            ns.digest,
            ns.record.canonical(),
            plain_parts(ns.parts),
            ns.replicas,
            generation,
            ns.write,
            ns.ttl_s,
            ns.ssd_codec,
            ns.write_remote,
        )
        answer = connection.ask(message, self.timeout_s)
        self.opened(connection, ns.digest, answer)
        return int(answer.number)

    def opened(self, connection: Connection, digest: bytes, answer: client_wire.Opened) -> None:
        """The daemon has numbered it: announce its engine and events. Waits for nothing."""
        connection.daemon.renumber(digest, answer.number)
        self.generations[digest] = answer.generation
        for told in (self.events, self.engine):
            if told is not None and told[0] == digest:
                connection.tell(told[1](answer.number))
