"""How many requests the limit of open files allows."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvpool.router.config import EngineTable, RouterConfig
from kvpool.router.descriptors import OF_AN_ENGINE, connections_max, fitted


@given(
    descriptors=st.integers(0, 1 << 17), engines=st.integers(0, 8), wanted=st.integers(1, 1 << 16)
)
def test_requests_connections_and_calls_fit(descriptors: int, engines: int, wanted: int) -> None:
    tables = tuple(EngineTable(url=f"http://e{number}") for number in range(engines))
    config = RouterConfig(requests_max=wanted, engines=tables)
    fit = fitted(config, descriptors)
    assert 1 <= fit.requests_max <= wanted
    assert msgspec.structs.replace(fit, requests_max=wanted) == config
    # Connections of clients, and calls to two engines for each request; probes and events.
    needed = connections_max(fit, descriptors) + 2 * fit.requests_max + OF_AN_ENGINE * engines
    assert needed <= descriptors or fit.requests_max == 1
    if fit.requests_max < wanted:
        assert descriptors - needed < 100, "no fewer than necessary"


def test_usual_limits() -> None:
    assert fitted(RouterConfig(), 1 << 20).requests_max == RouterConfig().requests_max
    assert connections_max(RouterConfig(), 1 << 20) == 2 * 2048 + 512
    assert connections_max(RouterConfig(requests_max=2), 1 << 20) == 2 * 2 + 512
    assert 180 <= fitted(RouterConfig(), 1024).requests_max <= 200
