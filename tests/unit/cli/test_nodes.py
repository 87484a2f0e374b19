"""What is shown of a cluster: its nodes, namespaces and replicas."""

import json

import pytest

from kvpool.cli.asking import namespace_rows
from kvpool.cli.naming import quotas
from kvpool.cli.render.cluster import (
    namespaces_view,
    nodes_view,
    not_found,
    replicas_view,
)
from kvpool.errors import InvalidRequest
from tests.support.printed import printed
from tests.support.stats import node_stats
from tests.unit.cli.answers import (
    CLUSTER,
    DEFAULTS,
    DIGEST,
    DIRECTORY,
    DRAIN,
    ENTRY,
    FOUND,
    STATS,
    line_with,
    node,
    shown,
)


def test_the_nodes_of_a_cluster_on_a_narrow_terminal():
    text = printed(nodes_view(CLUSTER))
    assert text.startswith("cluster prod, seen by node host-1: 2 nodes, version 1.2.3\n")
    words = line_with(text, "* host-1").split()
    assert words[:4] == ["*", "host-1", "serving", "a" * 8]
    assert words[-3:] == ["1.5/64", "GiB", "tcp://10.0.0.1:7070"]
    assert line_with(text, "  host-2").split()[:3] == ["host-2", "serving", "b" * 8]
    assert "rack=7, zone=a" in text
    assert "lag 0.2 s, 12 queued" in text
    assert text.count("host-2") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_seldom_wanted_makes_room_for_addresses() -> None:
    text = printed(nodes_view(CLUSTER), width=70)
    assert "incarnation" not in text
    assert line_with(text, "* host-1").endswith("1.5/64 GiB  tcp://10.0.0.1:7070")


def test_facts_of_a_namespace_stand_below_it_where_the_terminal_is_narrow() -> None:
    fields = json.dumps({"model": "meta-llama/Llama-3.1-70B", "tp_size": 8})
    long = ENTRY | {"fields": fields}
    known = CLUSTER | {"namespaces": [long | {"digest": "d" * 32}, long | {"digest": "e" * 32}]}
    rows = namespace_rows(known, node_stats(**STATS), "red")
    lines = printed(namespaces_view(rows), width=70).splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("d" * 12))
    assert lines[at + 1].rstrip() == "    model=meta-llama/Llama-3.1-70B, tp_size=8"
    assert lines[at + 2].startswith("e" * 12)
    assert "fields" not in lines[0]


def test_copies_of_what_others_keep_are_part_of_what_is_used() -> None:
    assert "secondary" not in printed(nodes_view(CLUSTER))
    tier = {"name": "dram", "capacity_bytes": 64 << 30, "used_bytes": 0, "secondary_bytes": 5 << 30}
    nodes = [node("host-1", "a", tiers=[tier]), node("host-2", "b")]
    lines = printed(nodes_view(CLUSTER | {"nodes": nodes}), width=200).splitlines()
    head = next(line for line in lines if "secondary" in line)
    first = next(line for line in lines if "host-1 " in line and "tcp" in line)
    second = next(line for line in lines if "host-2 " in line and "tcp" in line)
    end = head.index("secondary") + len("secondary")
    assert first[:end].endswith("5 GiB") and "5/64 GiB" in first
    assert second[:end].endswith(" 0 B")


def test_what_is_expected_of_pulling_from_others():
    link = {
        "node": "host-2",
        "incarnation": "b" * 16,
        "distance": "zone",
        "latency_s": 0.00125,
        "bytes_s": 200 << 20,
        "latency_age_s": 2.0,
        "bytes_age_s": None,
        "inflight_bytes": 0,
        "path": "nixl://10.0.0.2:7071",
    }
    text = printed(nodes_view(CLUSTER | {"links": [link]}), width=120)
    words = line_with(text, "nixl://10.0.0.2:7071")
    assert "zone" in words
    assert "1.2 ms" in words
    assert "200 MiB/s" in words
    assert "rate assumed" in words
    assert "Pulling from others" not in printed(nodes_view(CLUSTER))


def test_versions_are_shown_where_they_differ():
    nodes = [
        node("host-1", "a"),
        node("host-2", "b", version="1.2.4"),
        node("host-3", "c", version="2.0.0", protocol=3),
    ]
    text = printed(nodes_view(CLUSTER | {"nodes": nodes}), width=120)
    assert "version 1.2.3" not in text.splitlines()[0]
    assert " 1.2.3 " in line_with(text, "* host-1")
    assert " 1.2.4 " in line_with(text, "host-2")
    assert " 2.0.0, protocol 3 " in line_with(text, "host-3")


def test_nodes_that_are_drained():
    draining = node("host-2", "b", state="draining", drain=DRAIN | {"failed": 7})
    waiting = node("host-3", "c", state="draining", drain=DRAIN | {"phase": "waiting", "leases": 1})
    nodes = [node("host-1", "a"), draining, waiting]
    text = printed(
        nodes_view(CLUSTER | {"nodes": nodes, "drains": ["host-1", "host-2", "host-9"]}), width=200
    )
    assert "serving, to drain" in line_with(text, "* host-1")
    assert "draining 45%" in line_with(text, "  host-2")
    assert (
        "host-2 is being drained: 450 of 1,000 blocks looked at, 120 copied, 1.5 GiB, "
        "7 that only it has found no other place\n"
    ) in text
    assert "waiting for 1 lease to end" in line_with(text, "host-3 is being drained")
    assert "`kvpool drain host-9 --cancel`" in line_with(text, "host-9 is drained and not here")
    assert text.count("is drained and not here") == 1


@pytest.mark.parametrize(
    ("standing", "state", "words"),
    [
        ("away", "serving", "etcd does not answer"),
        ("unsure", "serving", "stopped or asleep"),
        ("lost", "serving", "as a new incarnation"),
        ("out", "joining", "its log says why"),
        ("out", "gone", "`kvpool drain host-1 --cancel` brings it back"),
    ],
)
def test_a_node_that_is_no_member_says_so_loudly(standing, state, words):
    known = CLUSTER | {"standing": standing, "state": state}
    text = printed(nodes_view(known), width=400)
    assert text.splitlines()[1].startswith(f"this node is not a member ({standing}): ")
    assert words in text.splitlines()[1]
    text = shown(
        STATS
        | {"node": "host-1", "cluster": STATS["cluster"] | {"standing": standing, "state": state}},
        width=400,
    )
    assert words in line_with(text, "not a member")


def test_a_member_says_nothing_of_its_standing():
    assert "member" not in printed(nodes_view(CLUSTER)) + shown(STATS)


def test_the_state_of_the_directory():
    assert "connected" in printed(nodes_view(CLUSTER))
    broken = DIRECTORY | {"connected": False, "failures": 1, "repairing": 300}
    text = printed(nodes_view(CLUSTER | {"directory": broken}), width=200)
    line = line_with(text, "directory does not answer")
    assert "300 to be announced again" in line
    assert "1 failure" in line
    text = printed(nodes_view(CLUSTER | {"directory": None}))
    assert "no directory: other nodes are asked one by one" in text


def test_a_node_that_is_alone():
    alone = CLUSTER | {
        "nodes": [node("host-1", "a", labels={}, transports=[])],
        "peers": ["tcp://x:1"],
        "directory": None,
    }
    text = printed(nodes_view(alone))
    assert "labels" not in text
    assert "none" in line_with(text, "* host-1")
    assert "tcp://x:1" in line_with(text, "pulls also from")


@pytest.mark.parametrize("width", [60, 80, 300])
def test_any_width_of_terminal_for_the_cluster(width):
    rows = namespace_rows(CLUSTER, node_stats(**STATS), "red")
    for text in (printed(nodes_view(CLUSTER), width), printed(namespaces_view(rows), width)):
        assert max(map(len, text.splitlines())) <= width


def test_namespaces_of_the_cluster_and_of_this_node():
    other = "f" * 32
    mine = STATS["tenants"]["red"]
    here = mine["namespaces"] | {
        other: {
            "fields": {"model": "new"},
            "epoch": 0,
            "settings": DEFAULTS,
            "blocks": [9],
            "part_bytes": [1024],
        }
    }
    foreign = ENTRY | {"tenant": "blue", "digest": "e" * 32}
    absent = ENTRY | {"digest": "d" * 32, "epoch": 5, "fence": 5}
    known = CLUSTER | {"namespaces": [ENTRY, foreign, absent]}
    stats = STATS | {"tenants": {"red": mine | {"namespaces": here}}}
    rows = {row["digest"]: row for row in namespace_rows(known, node_stats(**stats), "red")}
    assert len(rows) == 4
    assert (rows[DIGEST]["blocks"], rows[DIGEST]["bytes"]) == (700, 1400 << 20)
    assert (rows["e" * 32]["blocks"], rows["e" * 32]["bytes"]) == (None, None)
    assert (rows["e" * 32]["asked"], rows[other]["asked"]) == (None, 0)
    assert (rows["d" * 32]["blocks"], rows["d" * 32]["bytes"]) == (0, 0)
    assert (rows[other]["agreed"], rows[other]["bytes"]) == (False, 9 << 10)
    text = printed(namespaces_view(list(rows.values())), width=120)
    line = line_with(text, DIGEST[:12])
    assert line.split()[0] == "red"
    assert "model=llama [8b]" in line
    assert line.split()[-7:] == ["2", "3", "2", "MiB", "700", "1.4", "GiB"]
    assert "0?" in line_with(text, other[:12]).split()
    assert "?: not agreed with the cluster yet" in text
    assert f"fenced at this epoch: {'d' * 12}. " in text
    assert "format_version" not in text
    assert "SSD" not in text


def test_a_node_that_is_alone_agrees_with_itself_and_says_what_its_disks_hold():
    mine = STATS["tenants"]["red"]
    disk = {"where": "/d", "namespaces": {DIGEST: {"held_bytes": 3 << 30}}}
    spaces = {DIGEST: mine["namespaces"][DIGEST] | {"blocks": [0], "part_bytes": [1024]}}
    tenant = mine | {"namespaces": spaces, "usage": {"ssd": [disk]}}
    known = CLUSTER | {"namespaces": [], "joined": False}
    rows = namespace_rows(known, node_stats(**STATS | {"tenants": {"red": tenant}}), "red")
    assert (rows[0]["agreed"], rows[0]["ssd_bytes"]) == (True, 3 << 30)
    text = printed(namespaces_view(rows), width=120)
    assert "on SSD" in text and "3 GiB" in line_with(text, DIGEST[:12])
    assert "?" not in text and "agreed" not in text


def test_settings_are_shown_where_a_namespace_has_them():
    kept = DEFAULTS | {"write": "through", "ttl_s": 43_200.0}
    rows = namespace_rows(
        CLUSTER | {"namespaces": [ENTRY | {"settings": kept}]}, node_stats(**STATS), "red"
    )
    other = rows[0] | {"digest": "f" * 32, "settings": DEFAULTS}
    text = printed(namespaces_view([*rows, other]), width=200)
    assert f"\n{DIGEST[:12]}  write through, ttl 12h\n" in text
    assert text.count("f" * 12) == 1, "it has no settings"
    assert "Settings" not in printed(namespaces_view([other]))
    coded = rows[0] | {"settings": DEFAULTS | {"ssd_codec": "blosc2"}}
    text = printed(namespaces_view([coded]))
    assert f"\n{DIGEST[:12]}  ssd-codec blosc2" in text
    limited = rows[0] | {"settings": DEFAULTS | {"dram_quota": 0.125, "ssd_quota": 50 << 30}}
    text = printed(namespaces_view([limited]))
    shown_quota = line_with(text, "quota").split()[-1]
    assert shown_quota == "dram=12.5%,ssd=50GiB"
    assert quotas(shown_quota) == {"dram": 0.125, "ssd": 50 << 30}, "it can be typed"
    assert max(map(len, text.splitlines())) <= 80
    foreign = limited | {"tenant": "blue", "blocks": None, "bytes": None, "ssd_bytes": None}
    text = printed(namespaces_view([limited, foreign]))
    assert f"blue    {DIGEST[:12]}  quota dram=12.5%,ssd=50GiB" in text


def test_peers_of_the_configuration_that_do_not_answer():
    silent = {"url": "tcp://x:1", "silent_s": 30.0, "error": ""}
    told = CLUSTER | {"peers": ["tcp://x:1"], "silent_peers": [silent]}
    assert "peer tcp://x:1 has not answered for 30 s; `kvpool doctor`" in printed(nodes_view(told))
    assert "has not answered" not in printed(nodes_view(CLUSTER | {"peers": ["tcp://x:1"]}))


def test_quotas_are_sizes_or_shares_by_tier():
    assert quotas("dram=20%,ssd=50GiB") == {"dram": 0.2, "ssd": 50 << 30}
    assert quotas("ssd=100%") == {"ssd": 1.0}
    assert isinstance(quotas("ssd=100%")["ssd"], float), "a whole number is bytes"
    assert quotas("dram=none, ssd=0") == {"dram": 0, "ssd": 0}
    for wrong in ("", "dram", "20%", "dram=", "dram=lots", "gpu=1GiB", "ssd=1,ssd=2", "ssd=120%"):
        with pytest.raises(InvalidRequest, match="quota"):
            quotas(wrong)


def test_no_namespaces():
    nothing = CLUSTER | {"namespaces": []}
    stats = STATS | {"tenants": {"red": STATS["tenants"]["red"] | {"namespaces": {}}}}
    assert "no engine has opened" in printed(
        namespaces_view(namespace_rows(nothing, node_stats(**stats), "red"))
    )


def test_replicas_of_a_block():
    text = printed(replicas_view(FOUND))
    assert line_with(text, "host-1").split() == [
        "00" * 16,
        DIGEST[:12],
        "host-1",
        "dram",
        "2",
        "of",
        "2",
    ]
    assert line_with(text, "host-2").split()[-4:] == ["gpu", "1", "of", "2"]
    assert printed(replicas_view([])) == ""


def test_what_was_not_found_is_named():
    assert not_found([bytes(16)], FOUND, DIRECTORY) == ""
    others = [bytes([n]) * 16 for n in range(1, 6)]
    text = not_found([bytes(16), *others[:1]], FOUND, DIRECTORY)
    assert text.startswith(f"not found: {'01' * 16} (")
    assert "directory" not in text
    text = not_found(others, FOUND, None)
    assert f"{'03' * 16} and 2 more" in text
    assert "without a directory nodes know only what they hold themselves" in text
    assert "does not answer" in not_found(others, [], DIRECTORY | {"connected": False})
