"""A transport of another distribution, found by its entry point: it passes the same tests as ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.transfer import transport_for
from kvpool.transfer.base import Stop
from kvpool.types import BlockStatus
from tests.contract.suites.transport import Side, TransportContract, key_of, order
from tests.support.transfer_worker import MoverSide

MODULE = """
import msgspec

from kvpool.transfer.tcp import TcpTransport


class CarrierTransport(TcpTransport):
    def listen(self, url):
        return super().listen("tcp" + url.removeprefix("carrier")).replace("tcp", "carrier", 1)

    def pull(self, order, stop):
        pulled = super().pull(_over_tcp(order), stop)
        error = pulled.error.replace("tcp://", "carrier://")
        return msgspec.structs.replace(pulled, error=error)

    def ask(self, order, stop):
        return super().ask(_over_tcp(order), stop)


def _over_tcp(order):
    return msgspec.structs.replace(order, url="tcp" + order.url.removeprefix("carrier"))
"""
POINTS = """[kvpool.transports]
carrier = kvpool_carrier:CarrierTransport
broken = kvpool_carrier:NoSuchThing
absent = kvpool_absent:Transport
tcp = kvpool_carrier:CarrierTransport
"""
URL = "carrier://127.0.0.1:0"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the distribution is installed, on `sys.path`."""
    (tmp_path / "kvpool_carrier.py").write_text(MODULE)
    info = tmp_path / "kvpool_carrier-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpool-carrier\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("kvpool_carrier", None)


@pytest.mark.usefixtures("site")
class TestInstalled(TransportContract):
    def url(self) -> str:
        return URL


@pytest.mark.usefixtures("site")
def test_what_is_installed_is_named_where_a_scheme_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"'pigeon'.*absent, broken, carrier, inproc, nixl, tcp"):
        transport_for("pigeon://roof")


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("scheme", ["broken", "absent"])
def test_what_does_not_load_is_said(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"'{scheme}' .* cannot be loaded"):
        transport_for(f"{scheme}://x")


@pytest.mark.usefixtures("site")
def test_nobody_takes_the_names_of_ours() -> None:
    assert transport_for("tcp://x").__module__ == "kvpool.transfer.tcp"


def test_a_transfer_worker_listens_by_it(site: Path) -> None:
    """In a process of its own, as in a daemon."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    owner = MoverSide(URL, environ={"PYTHONPATH": path})
    reader = Side(URL)
    try:
        url = owner.transport.listen(URL)
        assert url.startswith("carrier://127.0.0.1:")
        owner.source.stride = 4096
        owner.source.put(key_of(1), 0, b"x" * 4096)
        pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [1]), Stop())
        assert list(pulled.status) == [BlockStatus.PRESENT], pulled.error
        assert reader.block(1, 4096, 4096) == b"x" * 4096
    finally:
        reader.transport.close()
        owner.transport.close()
