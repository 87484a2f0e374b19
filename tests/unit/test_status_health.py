"""What `kvpool status --all` calls well, degraded and lost. No daemon."""

import pytest

from kvpool.cli.machine import servers
from kvpool.cli.render.health import ClusterHealth, health_view, judge
from tests.support.printed import printed
from tests.support.stats import node_stats

WELL = {"cluster": {"state": "serving", "standing": "member"}}
DISK = {"path": "/mnt/a", "state": "serving"}


def cluster(*names: str) -> dict:
    records = [{"node": name, "state": "serving"} for name in names]
    return {"cluster": "prod", "node": names[0], "nodes": records}


def judged(**sections) -> ClusterHealth:
    return judge(cluster("a"), {"a": node_stats(**WELL | sections)}, {}, 0)


def test_all_well():
    stats = {name: node_stats(**WELL, tiers={"ssd": [DISK]}) for name in "ab"}
    found = judge(cluster("a", "b"), stats, {}, 2)
    assert [each.health for each in found.nodes] == ["well", "well"]
    assert found.problem == ""


def test_a_node_that_does_not_answer_is_lost():
    found = judge(cluster("a", "b"), {"a": node_stats(**WELL), "b": None}, {"b": "timed out"}, 0)
    assert [(each.node, each.health, each.reasons) for each in found.nodes] == [
        ("a", "well", ()),
        ("b", "lost", ("timed out",)),
    ]
    assert found.problem == "1 of 2 nodes is not well: b is lost"
    assert judge(cluster("a", "b"), {"a": node_stats(**WELL)}, {}, 0).nodes[1].health == "lost"


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"cluster": {"state": "draining", "standing": "member"}}, "it is draining"),
        ({"cluster": {"state": "serving", "standing": "away"}}, "etcd does not answer"),
        ({"cluster": WELL["cluster"] | {"membership_error": "no space"}}, "etcd: no space"),
        (
            {"cluster": WELL["cluster"] | {"directory": {"connected": False}}},
            "the directory does not answer",
        ),
        (
            {"tiers": {"ssd": [DISK | {"state": "failed", "error": "I/O error"}]}},
            "ssd /mnt/a: failed: I/O error",
        ),
        ({"tiers": {"object": [DISK | {"state": "failing"}]}}, "object /mnt/a: failing"),
        ({"audit": {"lost": 2}}, "the audit file lacks 2 records"),
    ],
)
def test_what_makes_a_node_degraded(sections, reason):
    found = judged(**sections)
    assert (found.nodes[0].health, found.nodes[0].reasons) == ("degraded", (reason,))
    assert found.problem == "1 of 1 node is not well: a is degraded"


SILENT = {"url": "tcp://x:1", "silent_s": 30.0, "error": "refused"}


def test_a_silent_peer_of_the_configuration_degrades_the_node_that_tells_of_it():
    told = cluster("a", "b") | {"silent_peers": [SILENT]}
    found = judge(told, {name: node_stats(**WELL) for name in "ab"}, {}, 0)
    assert [each.health for each in found.nodes] == ["degraded", "well"]
    assert found.nodes[0].reasons == ("peer tcp://x:1 has not answered for 30 s: refused",)
    [finding] = servers(told)
    assert finding.found == found.nodes[0].reasons[0]


def test_fewer_nodes_than_expected():
    found = judge(cluster("a"), {"a": node_stats(**WELL)}, {}, 3)
    assert found.nodes[0].health == "well"
    assert found.problem == "1 node where 3 are expected"


def test_it_fits_a_terminal():
    long = {"ssd": [DISK | {"path": "/mnt/" + "p" * 90, "state": "failed"}]}
    text = printed(health_view(judged(tiers=long)))
    assert max(map(len, text.splitlines())) <= 80
    assert "degraded" in text
