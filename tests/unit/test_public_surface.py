"""What others may import, name by name: a change here is one that users see."""

import importlib
import inspect

import pytest

PUBLIC = {
    "kvpool": {"__version__"},
    "kvpool.client": {
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
    },
    "kvpool.errors": {
        "AlreadyRunning",
        "ClusterUnavailable",
        "ConfigError",
        "Declined",
        "InternalError",
        "InvalidRequest",
        "KvpoolError",
        "LeaseLost",
        "LimitExceeded",
        "NamespaceMismatch",
        "NotAuthenticated",
        "PoolFull",
        "ProtocolError",
        "SegmentError",
        "StaleEpoch",
        "Unavailable",
        "UnknownNamespace",
        "UnknownReservation",
        "from_code",
    },
    "kvpool.types": {
        "CHECKSUM_BYTES",
        "DATA_PARALLEL_RANKS_MAX",
        "DEFAULT_TENANT",
        "FORMAT_VERSION",
        "KEY_BYTES",
        "NO_PARENT",
        "PARTS_MAX",
        "PART_BYTES_MAX",
        "RECORD_BYTES_MAX",
        "BlockStatus",
        "EngineRecord",
        "Intent",
        "IntentAnswer",
        "Keys",
        "Namespace",
        "NamespaceRecord",
        "Outcome",
        "PartKind",
        "PartSpec",
        "Presence",
        "Recompute",
        "pack_keys",
        "plain_parts",
        "split_keys",
        "api_path_of",
    },
}
METHODS = {
    "Client": {
        "abort",
        "acquire",
        "acquire_each",
        "attach_device",
        "available",
        "close",
        "commit",
        "commit_parts",
        "contains",
        "dropped",
        "follow",
        "get",
        "get_into",
        "incarnation",
        "join",
        "match",
        "open",
        "pin",
        "present",
        "present_in",
        "pull",
        "put",
        "put_each",
        "release",
        "remove",
        "remove_each",
        "reserve",
        "reserve_parts",
        "socket_path",
        "stats",
        "warm",
    },
    "Intents": {"declare", "declare_on"},
    "Namespaces": {"clear", "close", "generation", "reset"},
    "OwnEngine": {"announce", "follow_events"},
    "Routing": {"engines", "prefixes", "why_missing"},
    "Sessions": {"end", "end_request", "turn"},
    "OperatorClient": set(),
    "OperatorRequests": {
        "ask_node",
        "clear",
        "cluster",
        "configure",
        "drain",
        "evict",
        "inspect",
        "locate",
        "pin_blocks",
    },
    "Lease": {"check", "release", "release_later", "report", "valid"},
    "Reservation": {"abandon", "abort", "checksums", "settled", "slots"},
    "Slots": {"device_table", "expected", "fd", "offsets", "table", "view", "wrong"},
}
"""Methods and properties of the client's classes; what a class inherits stands with the one that it is from."""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == PUBLIC[module]
    assert all(hasattr(loaded, name) for name in loaded.__all__)


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_client(name):
    from kvpool import client

    kind = getattr(client, name)
    found = {one for one, value in vars(kind).items() if is_member(one, value)}
    assert found == METHODS[name]


def test_nothing_public_is_without_a_description():
    missing = []
    for module, names in PUBLIC.items():
        loaded = importlib.import_module(module)
        assert loaded.__doc__, module
        for name in names:
            value = getattr(loaded, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            if not own_docstring(value):
                missing.append(f"{module}.{name}")
            if inspect.isclass(value):
                missing += [
                    f"{module}.{name}.{one}"
                    for one, member in vars(value).items()
                    if is_member(one, member) and not own_docstring(member)
                ]
    assert not missing


def is_member(name: str, value: object) -> bool:
    """A public method or property; fields and slots are described with their class."""
    kinds = (property, staticmethod, classmethod)
    return not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))


def own_docstring(value: object) -> str | None:
    """As written: a dataclass without one is given its signature for one."""
    text = value.__doc__
    made = inspect.isclass(value) and text is not None and text.startswith(f"{value.__name__}(")
    return None if made else text
