"""Every transport passes the same tests."""

import itertools
import tomllib
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.net import scheme_of
from kvpool.transfer import GROUP, TRANSPORTS, transport_for
from tests.contract.suites.transport import TransportContract

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

_names = itertools.count()


class TestInproc(TransportContract):
    def url(self) -> str:
        return f"inproc://side-{next(_names)}"


class TestTcp(TransportContract):
    def url(self) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpOverIPv6(TransportContract):
    def url(self) -> str:
        return "tcp://[::1]:0"


def test_unknown_schemes_are_refused_by_name() -> None:
    for scheme in TRANSPORTS:
        assert callable(transport_for(f"{scheme}://x"))
    with pytest.raises(ConfigError, match=r"'carrier-pigeon'.*inproc, nixl, tcp"):
        transport_for("carrier-pigeon://roof")
    for url in ("", "tcp", "tcp:", "tcp://", "://x"):
        with pytest.raises(ConfigError, match="not a transport URL"):
            scheme_of(url)


def test_the_entry_points_of_kvpool_itself_are_its_table() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["entry-points"][GROUP] == TRANSPORTS
