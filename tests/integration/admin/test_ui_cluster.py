"""The dashboard in a real Chromium, before the real gateway of two real daemons."""

import re

import pytest
from playwright.sync_api import expect

from kvpool.types import NamespaceRecord
from tests.integration.admin.conftest import gateway_pid, open_gate
from tests.integration.admin.ui_browser import PATIENCE_MS, Tab
from tests.integration.cluster.conftest import NBYTES, PLAIN

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def pair(start_cluster, tmp_path):
    """Nodes a and g; g has the gateway, `world.gate`."""
    world = start_cluster(nodes=1, ssd="64MiB")
    world.gate = open_gate(world, tmp_path)
    world.until_all_see([world.seat(node.name) for node in world.nodes])
    return world


@pytest.fixture
def open_tab(browser, pair):
    tabs = []

    def open_one(who, view="cluster", **settings):
        tabs.append(Tab(browser, f"http://127.0.0.1:{pair.gate.port}", **settings))
        tabs[-1].enter(pair.gate.tokens[who], view)
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


def test_what_two_daemons_tell(pair, open_tab, numbers):
    a, g = (
        pair.seat("a"),
        pair.seat("g", NamespaceRecord.simple(HOSTILE, block_bytes=NBYTES, block_tokens=16)),
    )
    some = numbers(60)
    a.put(some)
    g.put(some[:5])
    assert a.read(some) == 60
    tab = open_tab("root")
    page = tab.page
    expect(page.locator("#session")).to_contain_text("root admin")
    expect(page.locator("#cluster-name")).to_have_text(f"cluster {pair.name}")
    expect(page.locator(".node")).to_have_count(2)
    expect(page.locator(".tile").first).to_contain_text("2 of 2")
    expect(page.locator(".node").first).to_contain_text("of 16 MiB")
    expect(page.get_by_text("1 read of one prefix")).to_be_visible(timeout=PATIENCE_MS)
    planned = page.get_by_role("region", name="What more memory would give")
    expect(planned).to_contain_text("More memory would give no more hits", timeout=PATIENCE_MS)
    planned.get_by_text("Show as table").click()
    expect(planned.get_by_role("row", name=re.compile("infinite"))).to_be_visible()
    assert g.read(numbers(3)) == 0
    why = page.get_by_role("region", name="Why blocks were missed")
    expect(why).to_contain_text("never stored", timeout=PATIENCE_MS)
    views = {
        "nodes/a": "Links to other nodes",
        "nodes/g": "DRAM by tenant",
        "namespaces": HOSTILE,
        f"namespaces/default/{PLAIN.digest().hex()}": "In memory, by node",
        f"blocks/default/{PLAIN.digest().hex()}/{some[3].to_bytes(16, 'big').hex()}": "What the nodes say",
        "jobs": "No jobs since the nodes started",
        "requests": "No router is configured",
        "settings": "replication_bandwidth",
        "events": "Incarnation: ",
        "audit": "Nobody has changed anything.",
    }
    for view, text in views.items():
        tab.go(view)
        expect(page.get_by_text(text).first).to_be_visible()
        expect(page.get_by_text("Loading…")).to_have_count(0)
        expect(page.get_by_role("alert")).to_have_count(0)
        assert page.locator("img").count() == 1
    assert "owned" not in page.title()
    assert tab.said == [] and tab.hosts == {f"127.0.0.1:{pair.gate.port}"}


def test_blocks_are_evicted_after_they_were_counted(pair, open_tab, numbers, until):
    a, g = pair.seat("a"), pair.seat("g")
    mine, others = numbers(40), numbers(25)
    a.put(mine)
    g.put(others)
    tab = open_tab("op", f"namespaces/default/{PLAIN.digest().hex()}")
    page = tab.page
    page.get_by_role("button", name="Evict…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Nodes").select_option("a")
    dialog.get_by_role("button", name="Count first").click()
    expect(dialog).to_contain_text("Would evict 40 blocks")
    assert (a.here(mine), g.here(others)) == (40, 25), "nothing yet"
    dialog.get_by_role("button", name="Evict 40 blocks").click()
    row = page.locator("tr.chosen")
    expect(row).to_contain_text("done", timeout=PATIENCE_MS)
    expect(row).to_contain_text("op")
    until(lambda: a.here(mine) == 0)
    assert (a.get(mine), g.get(others)) == (0, 25)
    tab.go("events")
    expect(page.get_by_role("log")).to_contain_text("Job ended")
    assert tab.said == []


def test_blocks_are_warmed_and_pinned(pair, open_tab, numbers, until):
    a, g = pair.seat("a"), pair.seat("g")
    some = numbers(30)
    a.put(some)
    space = f"namespaces/default/{PLAIN.digest().hex()}"
    tab = open_tab("op", space)
    page = tab.page
    page.get_by_role("button", name="Warm…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Into the memory of").select_option("g")
    dialog.get_by_label("What", exact=True).select_option("a")
    dialog.get_by_role("button", name="Count first").click()
    expect(dialog).to_contain_text("Would bring 30 blocks")
    assert g.here(some) == 0, "nothing yet"
    dialog.get_by_role("button", name="Warm 30 blocks").click()
    row = page.locator("tr.chosen")
    expect(row).to_contain_text("done", timeout=PATIENCE_MS)
    expect(row.locator("th")).to_have_text(re.compile("^warm-[0-9a-f]{8}$"))
    until(lambda: g.here(some) == 30)
    key = some[0].to_bytes(16, "big").hex()
    tab.go(f"blocks/default/{PLAIN.digest().hex()}/{key}")
    page.get_by_role("button", name="Pin…").click()
    dialog.get_by_label("Nodes").select_option("g")
    dialog.get_by_label("Pin", exact=True).select_option("hard")
    dialog.get_by_role("button", name="Pin 1 block").click()
    expect(page.get_by_text("Pinned on g: 1.")).to_be_visible()
    found = pair.gate.change(
        "POST", "/v1/blocks", {"keys": [key], "namespace": PLAIN.digest().hex()}
    )
    pins = {node: each["pin"] for node, (each,) in found["nodes"].items()}
    assert pins == {"a": "none", "g": "hard"}
    assert tab.said == []


def test_namespaces_are_configured_and_settings_changed(pair, open_tab, until):
    pair.seat("a")
    digest = PLAIN.digest().hex()
    tab = open_tab("root", f"namespaces/default/{digest}")
    page = tab.page
    page.get_by_role("button", name="Configure…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Kept unused for").fill("12h")
    dialog.get_by_label("DRAM quota").fill("50%")
    dialog.get_by_role("button", name="Configure").click()
    expect(page.get_by_text("The namespace is configured anew")).to_be_visible()
    until(lambda: pair.gate.get(f"/v1/namespaces/{digest}")["settings"]["ttl_s"] == 43_200)
    assert pair.gate.get(f"/v1/namespaces/{digest}")["settings"]["dram_quota"] == 0.5
    tab.go("settings/a")
    page.get_by_role("button", name="Change replication_bandwidth").click()
    expect(dialog.get_by_label("Value")).to_have_value("256MiB")
    dialog.get_by_label("Value").fill("64MiB")
    dialog.get_by_label("Where").select_option("All nodes")
    dialog.get_by_role("button", name="Change", exact=True).click()
    expect(page.get_by_text("replication_bandwidth is changed on a, g.")).to_be_visible()
    for node in "ag":
        items = pair.gate.get(f"/v1/config?node={node}")["nodes"][node]
        assert 64 << 20 in [e["value"] for e in items if e["name"] == "replication_bandwidth"]
    page.get_by_role("button", name="Change replication_bandwidth").click()
    dialog.get_by_label("Value").fill("much")
    dialog.get_by_role("button", name="Change", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("replication_bandwidth")


def test_a_drain_is_refused_to_a_viewer(pair, open_tab):
    tab = open_tab("eye", "nodes/a")
    page = tab.page
    expect(page.get_by_text("Links to other nodes")).to_be_visible()
    expect(page.get_by_role("button", name="Drain…")).to_have_count(0)
    status = page.evaluate(
        "fetch('/v1/operator/drain', {method: 'POST', body: '{\"node\": \"a\"}', headers: {"
        "Authorization: 'Bearer ' + Object.values(sessionStorage)[0], 'Content-Type': 'application/json'"
        "}}).then((answer) => answer.status)"
    )
    assert status == 403
    assert not pair.gate.get("/v1/nodes/a")["node"]["drain_wanted"]


def test_a_node_is_drained(pair, open_tab, numbers, until):
    a, g = pair.seat("a"), pair.seat("g")
    some = numbers(30)
    a.put(some)
    tab = open_tab("op", "nodes/a")
    page = tab.page
    page.get_by_role("button", name="Drain…").click()
    page.get_by_label("Type a to confirm").fill("a")
    page.keyboard.press("Enter")
    expect(page.get_by_text("a is being drained.")).to_be_visible()
    until(lambda: "a" not in g.members or g.members["a"]["state"] != "serving")
    until(lambda: g.get(some) == 30)
    tab.page.goto(f"{tab.url}/ui/#/cluster")
    tile = page.locator(".tile").first
    expect(tile).to_contain_text(re.compile("1 of [12]"), timeout=PATIENCE_MS)


def test_a_gateway_that_is_killed_is_waited_for(pair, open_tab, until):
    tab = open_tab("eye")
    page = tab.page
    expect(page.locator(".node")).to_have_count(2)
    first = gateway_pid(pair.node("g"))
    pair.node("g").stop()
    expect(page.locator("#session")).to_contain_text("reconnecting", timeout=PATIENCE_MS)
    pair.node("g").start()
    pair.gate.wait()
    assert gateway_pid(pair.node("g")) != first
    expect(page.locator("#session")).to_contain_text("live", timeout=PATIENCE_MS)
    expect(page.locator(".tile").first).to_contain_text("2 of 2", timeout=PATIENCE_MS)


def test_a_tenants_token(pair, open_tab):
    """It sees no node's memory and no history, and the page says so without asking for them."""
    tab = open_tab("redop")
    page = tab.page
    expect(page.locator(".node")).to_have_count(2)
    expect(page.get_by_role("slider")).to_have_count(0)
    expect(page.locator(".tile")).to_have_count(1)
    tab.go("nodes/a")
    expect(page.get_by_text("Links to other nodes")).to_have_count(0)
    expect(page.get_by_text("A token for all tenants is needed")).to_be_visible()
    expect(page.get_by_role("button", name="Drain…")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    assert tab.said == []
