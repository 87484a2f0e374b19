"""The namespaces that a client has opened, by the daemon's numbers, and requests about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvpool.client.connection import Connection
from kvpool.client.connections import Connections
from kvpool.decoding import finite
from kvpool.errors import StaleEpoch, Unavailable, UnknownNamespace
from kvpool.types import Namespace, plain_parts
from kvpool.wire import client as client_wire
from kvpool.wire import frame

T = TypeVar("T")

RESET_S = 15.0
"""Longest wait for the cluster's answer, on top of the client's time-out."""


class OpenNamespaces:
    """Registers namespaces with each daemon that answers. Thread-safe.

    generations: of weights, by namespace digest.
    announced: by the kind of message, what the daemon is told of this process's engine once it has numbered the
        namespace: its digest, and the message's other fields.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.generations: dict[bytes, int] = {}
        self.announced: dict[Callable[..., frame.Message], tuple[bytes, tuple[Any, ...]]] = {}

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
        answer = connection.ask(message, self._connections.timeout_s)
        self.opened(connection, ns.digest, answer)
        return int(answer.number)

    def opened(self, connection: Connection, digest: bytes, answer: client_wire.Opened) -> None:
        """The daemon has numbered it: announce its engine and events. Waits for nothing."""
        connection.daemon.renumber(digest, answer.number)
        self.generations[digest] = answer.generation
        for kind, (of, rest) in list(self.announced.items()):
            if of == digest:
                connection.tell(kind(answer.number, *rest))


class Requests:
    """Single exchanges with the daemon of this node. Thread-safe.

    kind: of a message, whose first field is the number of a namespace; rest: its other fields. wait_s: extra time for
    the answer. Everything that is asked raises `Unavailable`.
    """

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.namespaces = OpenNamespaces(connections)

    def ask(self, message: frame.Message, wait_s: float = 0.0) -> Any:
        """The answer to a message."""
        with self.connections.request() as connection:
            return connection.ask(message, self.connections.timeout_s + wait_s)

    def ask_in(
        self, ns: Namespace, kind: Callable[..., frame.Message], *rest: Any, wait_s: float = 0.0
    ) -> Any:
        """The answer to a message about a namespace."""
        limit_s = self.connections.timeout_s + wait_s
        with self.connections.request() as connection:
            return self.namespaces.with_number(
                connection, ns, lambda number: connection.ask(kind(number, *rest), limit_s)
            )

    def ask_in_all(
        self,
        namespaces: Sequence[Namespace],
        kind: Callable[..., frame.Message],
        *rest: Any,
        wait_s: float,
    ) -> bytes:
        """The bytes that answer a message about several namespaces, whose first field has all their numbers."""
        limit_s = self.connections.timeout_s + wait_s
        with self.connections.request() as connection:

            def ask(number: Callable[[Connection, Namespace], int]) -> bytes:
                numbers = [number(connection, ns) for ns in namespaces]
                return bytes(connection.ask(kind(numbers, *rest), limit_s).data)

            try:
                return ask(self.namespaces.number)
            except UnknownNamespace:
                return ask(self.namespaces.make_known)

    def hint(self, message: frame.Message) -> None:
        """Tell the daemon something that it may miss, while all connections are busy."""
        try:
            with self.connections.request(0.0) as connection:
                connection.tell(message)
        except Unavailable:
            pass

    def hint_in(self, ns: Namespace, kind: Callable[..., frame.Message], *rest: Any) -> None:
        """The same about a namespace, if the daemon knows it."""
        try:
            with self.connections.request(0.0) as connection:
                number = connection.daemon.numbers.get(ns.digest)
                if number is not None:
                    connection.tell(kind(number, *rest))
        except Unavailable:
            pass


class Namespaces:
    """Weights and ends of opened namespaces. See `Client` for failures and threads."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def generation(self, ns: Namespace) -> int:
        """Of the weights of the blocks that this client reads and writes; -1 before the daemon's first answer."""
        return self._requests.namespaces.generations.get(ns.digest, -1)

    def reset(self, ns: Namespace) -> None:
        """This engine's weights are new: blocks stored under the namespace before are no longer found.

        Starts a new epoch for the whole cluster, or enters the one that another engine's reset has started:
        each engine resets once for each change of weights. Other clients find nothing and store
        nothing until they `reset` or `open` the namespace themselves. Held leases stay valid.
        Raises `StaleEpoch` when others have changed their weights more often than this engine: it is one
        change further, and finds and stores nothing until it has caught up. Raises `Unavailable`, or
        `ClusterUnavailable` when the membership does not answer: then the old epoch continues, and the caller
        must not use the namespace any more.
        """
        connections, namespaces = self._requests.connections, self._requests.namespaces
        with connections.request() as connection:
            limit_s = connections.timeout_s + RESET_S
            answer = namespaces.with_number(
                connection,
                ns,
                lambda number: connection.ask(
                    client_wire.Reset(number, namespaces.generations[ns.digest]), limit_s
                ),
            )
            namespaces.opened(connection, ns.digest, answer)
        if not answer.current:
            raise StaleEpoch(
                f"the weights of namespace {ns.digest.hex()} changed more often elsewhere than here; its generation "
                f"is {answer.generation} now: reset again with each remaining change, or open the namespace once the "
                "weights are the latest"
            )

    def clear(self, ns: Namespace, *, wait_s: float = RESET_S) -> int:
        """Empty a namespace, for the whole cluster; returns its new epoch. Its clients find nothing, and go on storing.

        wait_s: for the cluster's answer, on top of the client's time-out.
        Raises `Unavailable`, or `ClusterUnavailable` when the membership does not answer: then nothing has changed.
        """
        wait_s = finite(wait_s, "wait_s")
        return int(self._requests.ask_in(ns, client_wire.ClearNamespace, wait_s=wait_s).value)

    def close(self, ns: Namespace) -> None:
        """This client does not use the namespace any more: one that holds nothing may make room for others.

        It may be opened again. A hint: skipped while all connections are busy; an unreachable daemon is no error. The
        daemon keeps what is in it.
        """
        self._requests.namespaces.generations.pop(ns.digest, None)
        try:
            with self._requests.connections.request(0.0) as connection:
                number = connection.daemon.numbers.pop(ns.digest, None)
                if number is not None:
                    connection.tell(client_wire.CloseNamespace(number))
        except Unavailable:
            pass  # it does not count any more once this client has ended
