"""From which address of this machine a connection comes."""

import contextlib
import socket
import threading

import pytest

from kvpool.errors import KvpoolError, Unavailable
from kvpool.transfer.addresses import split_source
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.connections import Connections
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("tcp://a:1", ("tcp://a:1", "")),
        ("tcp://a:1?source=10.0.0.1", ("tcp://a:1", "10.0.0.1")),
        ("tcp://[::1]:1?source=fd00::2", ("tcp://[::1]:1", "fd00::2")),
    ],
)
def test_a_url_may_say_it(url, parts):
    assert split_source(url) == parts


@pytest.fixture
def connections():
    made = Connections(Identity("c", "n", "i"), TransferLimits())
    yield made
    made.close()


@pytest.mark.parametrize("source", ["", "127.0.0.5"])
def test_a_connection_comes_from_there(connections, source):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}" + (
            f"?source={source}" if source else ""
        )

        def connect():
            # Nobody introduces itself here: that it came is all that is looked at.
            with contextlib.suppress(KvpoolError):
                connections.connect(url, Deadline(PATIENCE_S), Stop())

        thread = threading.Thread(target=connect)
        thread.start()
        accepted, (address, _) = listener.accept()
        accepted.close()
        thread.join()
    assert address == (source or "127.0.0.1")


@pytest.mark.parametrize("source", ["192.0.2.77", "fd00::2"])
def test_an_address_that_is_not_ours_is_no_way_to_anybody(connections, source):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}?source={source}"
        with pytest.raises(Unavailable, match="cannot be reached"):
            connections.connect(url, Deadline(PATIENCE_S), Stop())
