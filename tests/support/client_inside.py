"""What tests reach inside of a client for: its connections, which show in no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.client.connection import Connection

if TYPE_CHECKING:
    import pytest

    from kvpool.client import Client
    from kvpool.client.connections import Connections
    from kvpool.wire.frame import Message


def connections_of(client: Client) -> Connections:
    """The client's connections to the daemon."""
    return client._connections


def numbers_of(client: Client) -> dict[bytes, int]:
    """The daemon's numbers of the namespaces that the client has opened, by digest."""
    daemon = connections_of(client).daemon
    assert daemon is not None
    return daemon.numbers


def knows_no_daemon(client: Client) -> bool:
    """Whether the client has seen that the daemon ended, and has met no other."""
    return connections_of(client).daemon is None


def close_idle(client: Client) -> None:
    """Close the connections that no request uses, as a process does that is suspended for long."""
    connections_of(client)._close_idle()


def note_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of the requests that all clients of this process send from now on."""
    sent: list[str] = []
    send = Connection.send

    def noting(connection: Connection, message: Message, timeout_s: float) -> int:
        sent.append(type(message).__name__)
        return send(connection, message, timeout_s)

    monkeypatch.setattr(Connection, "send", noting)
    return sent
