"""What routers are told of the engines that were announced."""

import msgspec

from kvpool.daemon.cluster.engine_registry import describe
from kvpool.placement.records import LinkRecord, NodeRecord
from kvpool.types import EngineRecord
from tests.contract.suites.membership import record


def test_links_are_told_once_a_node() -> None:
    """With any first engine of the tenant; routers ask every second, and take those of the first one."""

    def node(name: str, *tenants: str) -> NodeRecord:
        engines = tuple(
            EngineRecord(f"http://{name}:{number}", tenant=tenant)
            for number, tenant in enumerate(tenants)
        )
        links = (LinkRecord("rack", 0.001, 1e9, 32.0, 1, name),)
        return record(name, engines=engines, links=links, host=f"host of {name}")

    here, other, silent = node("a", "red", "red"), node("b", "blue", "red", "red"), node("c")
    told = describe([other, here, silent], here, "red")
    assert [(each["url"], each["node"], each["here"]) for each in told] == [
        ("http://a:0", "a", True),
        ("http://a:1", "a", True),
        ("http://b:1", "b", False),
        ("http://b:2", "b", False),
    ]
    links = [each.get("links") for each in told]
    assert links[1] is links[3] is None
    assert [msgspec.convert(each, list[LinkRecord])[0].node for each in (links[0], links[2])] == [
        *"ab"
    ]
    assert all(each["host"] == f"host of {each['node']}" for each in told)
