"""TCP inside of TLS: the same contract. (Where its connections are cut: `test_transport_cuts`.)"""

from contextlib import AbstractContextManager

import pytest

from kvpool.testing.pki import Pki
from kvpool.testing.transport import Side, TransportContract
from kvpool.transfer.credentials import Credentials


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Pki(tmp_path_factory.mktemp("pki") / "ca").credentials("node")


class TestTls(TransportContract):
    @pytest.fixture(autouse=True)
    def _with_credentials(self, credentials: Credentials) -> None:
        self.credentials = credentials

    def url(self) -> str:
        return "tcp://127.0.0.1:0"

    def pair(
        self, *args: int, **side: object
    ) -> AbstractContextManager[tuple[Side, Side, str, list[bytes]]]:
        return super().pair(*args, **{"tls": self.credentials, **side})  # type: ignore[arg-type]
