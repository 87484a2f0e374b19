"""The library in an engine's process, or any other process, that talks to the daemon of its own node."""

from kvpool.client.client import Client
from kvpool.client.engines import OwnEngine, Routing
from kvpool.client.hints import Intents, Sessions
from kvpool.client.namespaces import Namespaces
from kvpool.client.operator import OperatorClient, OperatorRequests
from kvpool.client.slots import Lease, Reservation, Slots
from kvpool.types import Presence
from kvpool.wire.frame import NO_ROW

__all__ = [
    "NO_ROW",
    "Client",
    "Intents",
    "Lease",
    "Namespaces",
    "OperatorClient",
    "OperatorRequests",
    "OwnEngine",
    "Presence",
    "Reservation",
    "Routing",
    "Sessions",
    "Slots",
]
