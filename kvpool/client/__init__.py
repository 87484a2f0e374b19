"""The library in an engine's process, or any other process, that talks to the daemon of its own node."""

from kvpool.client.client import Client
from kvpool.client.operator import OperatorClient, OperatorRequests
from kvpool.client.slots import Lease, Reservation, Slots
from kvpool.types import Presence
from kvpool.wire.frame import NO_ROW

__all__ = [
    "NO_ROW",
    "Client",
    "Lease",
    "OperatorClient",
    "OperatorRequests",
    "Presence",
    "Reservation",
    "Slots",
]
