"""Every transport passes the same tests: NIXL, between two processes, over what UCX has on every machine."""

import pytest

from kvpool.transfer import nixl_agent
from tests.contract.suites.transport import Side, TransportContract
from tests.support.transfer_worker import MoverSide
from tests.support.waiting import PATIENCE_S

pytest.importorskip("nixl_cu12", reason="NIXL is not installed: pip install --no-deps nixl-cu12")


class NixlContract(TransportContract):
    """The owner is a transfer worker; the reader is here."""

    lanes: str

    @pytest.fixture(autouse=True)
    def choose_lanes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", self.lanes)
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        # There is a way to each peer here, however long it takes to be found.
        monkeypatch.setattr(nixl_agent, "TRIAL_S", PATIENCE_S)

    def url(self) -> str:
        return "nixl://127.0.0.1:0"

    def owner(self, url: str, **side: object) -> Side:
        return MoverSide(url, **side)


class TestNixlOverTcp(NixlContract):
    lanes = "tcp"


class TestNixlOverSharedMemory(NixlContract):
    # Without UCX's tcp lane there is no agent: nothing else here tells it when a peer dies.
    lanes = "posix,cma,tcp"


BYTES = {
    "arrive",
    "slots",
    "neighbouring",
    "absent",
    "flipped",
    "ten_thousand",
    "large",
    "several",
    "waits",
    "row_that_holds",
}
"""What differs between lanes; what is said over the control connection has been tested above."""

for name in [name for name in dir(TransportContract) if name.startswith("test_")]:
    if not any(word in name for word in BYTES):
        setattr(TestNixlOverSharedMemory, name, None)
