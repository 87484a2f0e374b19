"""The dashboard in a real Chromium, before a gateway that answers as the test wishes."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.integration.admin.ui_browser import PATIENCE_MS, Tab
from tests.integration.admin.ui_server import DIGESTS, HOSTILE, UI, job, node, problem, ui_server
from tests.support.waiting import until

VIEWER, OPERATOR, ADMIN = "v" * 20, "o" * 20, "a" * 20
SPACE = f"namespaces/default/{DIGESTS[0]}"
VIEWS = (
    "cluster",
    "nodes/a",
    "namespaces",
    SPACE,
    f"namespaces/default/{DIGESTS[1]}",
    f"blocks/default/{DIGESTS[0]}/{'0' * 32}",
    "jobs",
    "requests",
    "requests/req-1",
    "events",
    "settings",
    "audit",
)


@pytest.fixture(scope="module")
def served():
    with ui_server() as server:
        yield server


@pytest.fixture
def server(served):
    served.reset()
    return served


@pytest.fixture
def open_tab(browser, server):
    tabs = []

    def open_one(**settings):
        tabs.append(Tab(browser, server.url, **settings))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


@pytest.fixture
def tab(open_tab):
    return open_tab()


# ---- who is there --------------------------------------------------------------------------------------


def test_sign_in_by_typing(tab):
    page = tab.page
    page.goto(f"{tab.url}/ui/")
    expect(page.get_by_label("Token")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_text("This token is not known here.")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_label("Token").fill(OPERATOR)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Cluster", exact=True)).to_be_visible()
    expect(page.locator("#session")).to_contain_text("the operator operator")
    assert page.evaluate("Object.values(sessionStorage)") == [OPERATOR]
    assert page.evaluate("Object.values(localStorage)") == []
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0
    expect(page.locator("nav")).to_be_hidden()


def test_sign_in_by_address(tab, server):
    page = tab.enter(VIEWER)
    assert VIEWER not in page.url
    page.go_back()
    assert VIEWER not in page.url, "nor is it in the history"
    page.goto(f"{tab.url}/ui/#/jobs")
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.goto("about:blank")
    page.goto(f"{tab.url}/ui/")
    expect(page.get_by_role("heading", name="Cluster", exact=True)).to_be_visible()
    other = tab.context.new_page()
    other.goto(f"{tab.url}/ui/")
    expect(other.get_by_label("Token")).to_be_visible()


def test_an_address_with_a_wrong_token(tab):
    """In a page that is open, and in one that is not: the same words."""
    page = tab.enter(VIEWER)
    for before in (page.url, "about:blank"):
        page.goto(before)
        page.goto(f"{tab.url}/ui/#token=wrong")
        expect(page.get_by_text("Your token is not known here.")).to_be_visible()


def test_a_token_that_was_taken_away(tab, server):
    page = tab.enter(VIEWER)
    server.answers["cluster"] = problem(401, "Unauthorized", "gone")
    expect(page.get_by_text("Your token is not taken any more")).to_be_visible(timeout=PATIENCE_MS)
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (VIEWER, {"operates": 0, "Audit": 0}),
        (OPERATOR, {"operates": 1, "Audit": 0}),
        (ADMIN, {"operates": 1, "Audit": 1}),
    ],
)
def test_what_a_role_does_not_allow_is_not_shown(tab, token, shown):
    page = tab.enter(token)
    expect(page.get_by_role("link", name="Audit")).to_have_count(shown["Audit"])
    for view, told, operators, admins in (
        ("nodes/a", "Links to other nodes", ["Drain…"], []),
        ("jobs", "warm-2", ["Evict…", "Stop evict-1"], []),
        (SPACE, "What must agree", ["Pin…", "Warm…", "Evict…"], ["Configure…"]),
        (f"blocks/default/{DIGESTS[0]}/{'0' * 32}", "What the nodes say", ["Pin…", "Warm…"], []),
        ("settings", "ssd_flush_s", [], ["Change ssd_flush_s"]),
    ):
        tab.go(view)
        expect(page.get_by_text(told, exact=True).first).to_be_visible()
        for name in operators:
            expect(page.get_by_role("button", name=name)).to_have_count(shown["operates"])
        for name in admins:
            expect(page.get_by_role("button", name=name)).to_have_count(shown["Audit"])
    tab.go("audit")
    heading = "Audit" if shown["Audit"] else "Nothing here"
    expect(page.get_by_role("heading", name=heading)).to_be_visible()


# ---- what is shown -------------------------------------------------------------------------------------


def test_the_map(tab, server):
    server.lost = {"c"}
    page = tab.enter(VIEWER)
    cards = page.locator(".node")
    expect(cards).to_have_count(3)
    a, b, c = (cards.nth(n) for n in range(3))
    expect(a).to_contain_text("serving")
    expect(a).to_contain_text("44 GiB of 64 GiB, 68.8 %")
    expect(a).to_contain_text("220 GiB of 1000 GiB, 22.0 %")
    meter = a.get_by_role("meter").first
    assert meter.get_attribute("aria-valuenow") == "68.8"
    shares = "[...e.children].map((part) => part.getBoundingClientRect().width / e.getBoundingClientRect().width)"
    page.wait_for_function(
        f"(e) => {shares}.every((share, n) => Math.abs(share - [41 / 64, 3 / 64][n]) < 0.01)",
        arg=meter.element_handle(),
    )
    expect(page.locator(".tile").nth(1)).to_contain_text("6 GiB of it secondary replicas")
    expect(b).to_contain_text("draining")
    expect(b).to_contain_text("400 of 1,000 blocks, 400 MiB copied")
    expect(c).to_contain_text("unreachable")
    expect(page.locator(".tile").first).to_contain_text("1 of 3")
    server.answers["nodes"] = [node("a", version="0.2.0")]
    expect(cards.nth(2)).to_contain_text("No member any more", timeout=PATIENCE_MS)
    expect(cards.nth(1)).to_contain_text("It was being drained, and has left")
    expect(cards.nth(0)).to_contain_text("kvpool 0.2.0")
    expect(page.locator(".tile").first).to_contain_text("1 of 2")


def test_a_node(tab):
    page = tab.enter(VIEWER)
    page.get_by_role("link", name="a", exact=True).first.click()
    expect(page.get_by_role("heading", name="a", exact=True)).to_be_visible()
    links = page.get_by_role("region", name="Links, table")
    expect(links).to_contain_text("suspended")
    expect(links.get_by_role("link")).to_have_text(["b", "c"])
    own = page.get_by_role("region", name="Lower tiers, table")
    expect(own).to_contain_text("SSD of this node")
    expect(own.get_by_role("link")).to_have_count(0)
    expect(links.get_by_role("row").nth(1)).to_contain_text("4 GiB")
    expect(page.get_by_role("region", name="DRAM by tenant, table")).to_contain_text(
        "2 MiB: 900 of 924"
    )
    expect(page.get_by_role("region", name="Tiers", exact=True)).to_contain_text(
        "3 GiB of it secondary replicas"
    )
    page.get_by_text("Counters").click()
    expect(page.get_by_text("20 MiB")).to_be_visible()
    page.get_by_text("Tenants", exact=True).click()
    tenants = page.locator("details", has=page.get_by_text("Tenants", exact=True))
    expect(tenants.get_by_role("heading", name="llama")).to_be_visible()
    expect(tenants.get_by_role("row", name="Never stored")).to_contain_text("80")
    expect(tenants).to_contain_text("Mean200 ms")
    assert not set(tenants.inner_text()) & set("{}[]"), "rows, and no JSON"


def test_a_node_that_is_no_member(tab, server):
    page = tab.enter(OPERATOR, "nodes/b")
    expect(page.get_by_text("400 of 1,000 blocks")).to_be_visible()
    everybody = server.answers["nodes"]
    server.answers["nodes"] = [node("a")]
    expect(page.get_by_text("It was being drained, and has left")).to_be_visible(
        timeout=PATIENCE_MS
    )
    expect(page.get_by_role("heading", name="b", exact=True)).to_be_visible()
    expect(page.get_by_text("400 of 1,000 blocks")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    server.answers["nodes"] = everybody
    page.get_by_role("button", name="Take the drain back").click()
    until(lambda: server.changes, "the page asks for it")
    assert server.changes == [("POST", "operator/drain", {"node": "b", "wanted": False})]
    expect(page.get_by_text("400 of 1,000 blocks")).to_be_visible()
    tab.go("nodes/z")
    expect(page.get_by_text("No node of this cluster is called z.")).to_be_visible()
    expect(page.get_by_role("button", name="drain")).to_have_count(0)


def test_charts_are_read_by_keys_and_as_a_table(tab):
    page = tab.enter(VIEWER)
    plot = page.get_by_role("slider", name=re.compile("Throughput"))
    told = re.compile(r"^\d\d:\d\d:\d\d: Written .+/s, Read .+/s, Pulled from peers .+/s$")
    expect(plot).to_have_attribute("aria-valuetext", told)  # the samples come after the page
    plot.focus()
    assert tab.focus_is_seen()
    newest = plot.get_attribute("aria-valuetext")
    page.keyboard.press("Home")
    oldest = plot.get_attribute("aria-valuetext")
    page.keyboard.press("ArrowRight")
    second = plot.get_attribute("aria-valuetext")
    assert len({newest, oldest, second}) == 3
    assert plot.get_attribute("aria-valuenow") == "1"
    shown = page.locator(".when").first
    expect(shown).to_contain_text(f"at {second[:8]}")
    page.get_by_text("Show as table").first.click()
    table = page.get_by_role("region", name="Throughput as a table")
    expect(table.get_by_role("row").nth(30)).to_be_attached()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    expect(shown).to_contain_text("at ")

    def at() -> float:
        return int(plot.get_attribute("aria-valuenow")) / int(plot.get_attribute("aria-valuemax"))

    until(lambda: 0.4 < at() < 0.6, "it is at the middle")


def test_charts_have_a_range(tab):
    page = tab.enter(VIEWER)
    plot = page.get_by_role("slider", name=re.compile("Throughput"))
    expect(plot).to_have_attribute("aria-valuemax", re.compile(r"7\d\d"))
    page.get_by_label("Time range").select_option("The last 5 minutes")
    expect(plot).to_have_attribute("aria-valuemax", re.compile(r"^[56]\d$"))
    tab.page.evaluate("location.hash = '#/nodes/a'")
    expect(page.get_by_role("heading", name="a", exact=True)).to_be_visible()
    expect(page.get_by_label("Time range")).to_have_value("300")
    expect(page.locator(".when").first).to_contain_text("UTC")


def test_what_is_no_nodes_name_is_no_error(tab):
    page = tab.enter(VIEWER, "nodes/ssd%20of%20this%20node")
    expect(page.get_by_text("No node of this cluster is called ssd of this node.")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_blocks_are_found_by_node_and_key(tab, server):
    page = tab.enter(VIEWER, SPACE)
    rows = page.get_by_role("region", name="Blocks, table").locator("tbody tr")
    expect(rows).to_have_count(100)
    key = page.get_by_label("Key, or how it begins")
    key.fill("0" * 30 + "0")
    expect(rows).to_have_count(16)
    expect(page.get_by_text("16 of the 100 blocks loaded so far.")).to_be_visible()
    page.get_by_label("Node", exact=True).select_option("b")
    until(lambda: "b" in server.blocks_of, "the gateway is asked for the node's")
    key.fill(f"{7:032x}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"{7:032x}")


def test_without_a_router_the_form_says_so_at_once(tab, server):
    server.answers["cluster"] = {**server.answers["cluster"], "routers": 0}
    page = tab.enter(VIEWER, "requests")
    expect(page.get_by_text("No router is configured for this gateway")).to_be_visible()
    expect(page.get_by_label("Request id")).to_have_count(0)


def test_blocks_come_by_the_page(tab):
    page = tab.enter(VIEWER, SPACE)
    rows = page.get_by_role("region", name="Blocks, table").locator("tbody tr")
    expect(rows).to_have_count(100)
    more = page.get_by_role("button", name="Show more")
    more.click()
    expect(rows).to_have_count(200)
    more.click()
    expect(rows).to_have_count(250)
    expect(more).to_be_hidden()
    rows.nth(0).get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("0" * 32)


def test_a_request_is_explained(tab):
    page = tab.enter(VIEWER, "requests")
    page.get_by_label("Request id").fill("req-1")
    page.keyboard.press("Enter")
    chosen = page.locator("tr.chosen").first
    expect(chosen).to_contain_text("e0")
    expect(chosen).to_contain_text("24 ms")
    expect(page.locator(".timeline > li")).to_have_count(2)
    page.get_by_label("Request id").fill("nobody's")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("There is no requests/nobody's here.")


def test_events_come_as_they_happen(open_tab, server):
    tab = open_tab(timezone_id="UTC")
    page = tab.enter(VIEWER, "events")
    rows = page.get_by_role("log").locator("li")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("ops")
    expect(rows.nth(1)).to_contain_text(f"Node: {HOSTILE}")
    server.events.append(
        {"number": 3, "at_s": 2e9, "node": "c", "kind": "job ended", "details": {"job": "evict-9"}}
    )
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("evict-9")
    server.stop()
    expect(page.locator("main")).to_contain_text("reconnecting")
    server.events.append({"number": 4, "at_s": 2e9 + 1, "node": "c", "kind": "late", "details": {}})
    server.start()
    expect(rows).to_have_count(4, timeout=PATIENCE_MS)
    page.get_by_label("Show only events with").fill("EVICT-9")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("2033-05-18 03:33:20")
    expect(page.get_by_text("Times are UTC, by the clock of the node")).to_be_visible()
    page.get_by_label("Show only events with").fill("")
    page.get_by_label("Kind").select_option("Node joined")
    expect(rows).to_have_count(1)
    page.get_by_label("Kind").select_option("")
    page.get_by_label("Node", exact=True).select_option("c")
    expect(rows).to_have_count(2)


def test_what_the_gateway_refuses_is_told_in_its_words(tab, server):
    page = tab.enter(VIEWER)
    server.answers["jobs"] = problem(503, "Unavailable", "node b did not answer within 2 s")
    tab.page.goto(f"{tab.url}/ui/#/jobs")
    expect(page.get_by_role("alert")).to_have_text("Unavailable: node b did not answer within 2 s")
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    server.answers["jobs"] = [job("evict-1", "running")]
    expect(page.get_by_text("evict-1")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_role("alert")).to_have_count(0)
    server.answers["jobs"] = lambda: problem(503, "Unavailable", "node b did not answer within 2 s")
    expect(page.get_by_role("alert")).to_have_text(
        "Unavailable: node b did not answer within 2 s. What is shown below is older.",
        timeout=PATIENCE_MS,
    )


def test_empty_lists_say_so(tab, server):
    for name in ("namespaces", "jobs", "audit", "engines", f"namespaces/{DIGESTS[0]}/blocks"):
        server.answers[name] = []
    for by in ("prefix", "tenant"):
        server.answers[f"hot?{by}"]["items"] = []
    page = tab.enter(ADMIN)
    for view, text in (
        ("cluster", "Nothing was read in the last minute."),
        ("cluster", "No prefix was read in the last ten minutes."),
        ("cluster", "No engine has been announced."),
        ("namespaces", "No namespace yet"),
        ("jobs", "No jobs since the nodes started"),
        ("audit", "Nobody has changed anything."),
        (SPACE, "No such blocks."),
    ):
        tab.go(view)
        expect(page.get_by_text(text).first).to_be_visible()


def test_names_are_shown_as_text(tab):
    """A model, an engine, an error: whatever others may have chosen is never HTML."""
    page = tab.enter(ADMIN)
    for view in VIEWS:
        tab.go(view)
        if view in {"cluster", "nodes/a", "namespaces", "events", VIEWS[4]}:
            expect(page.get_by_text(HOSTILE).first).to_be_visible()
        assert page.locator("img").count() == 1, (view, "the mark in the corner")
        assert "owned" not in page.title(), view
        assert tab.said == [], view


# ---- what is done --------------------------------------------------------------------------------------


def test_eviction_counts_first(tab, server):
    page = tab.enter(OPERATOR, SPACE)
    page.get_by_role("button", name="Evict…").click()
    dialog = page.get_by_role("dialog", name="Evict blocks")
    evict = dialog.get_by_role("button", name=re.compile("^Evict"))
    expect(evict).to_be_disabled()
    dialog.get_by_label("Nodes").select_option("a")
    dialog.get_by_label("SSD").uncheck()
    dialog.get_by_label("Only what was not used for").fill("2")
    dialog.get_by_role("button", name="Count first").click()
    expect(dialog).to_contain_text("Would evict 90 blocks, 180 MiB. 1 pinned block would stay.")
    wanted = {
        "kind": "evict",
        "namespace": DIGESTS[0],
        "tiers": ["dram", "device"],
        "unused_s": 120,
    }
    assert server.changes == [("POST", "jobs", {"spec": wanted, "nodes": ["a"], "dry_run": True})]
    expect(evict).to_have_text("Evict 90 blocks")
    dialog.get_by_label("Unit of time").select_option("hours")
    expect(evict).to_be_disabled()
    dialog.get_by_role("button", name="Count first").click()
    expect(evict).to_be_enabled()
    evict.click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    expect(page.locator("tr.chosen")).to_contain_text("evict-5")
    spec = wanted | {"unused_s": 7200}
    assert server.changes[-1] == ("POST", "jobs", {"spec": spec, "nodes": ["a"], "dry_run": False})
    assert len(server.changes) == 3


def test_a_job_is_stopped(tab, server):
    page = tab.enter(OPERATOR, "jobs")
    expect(page.locator("tr").nth(1)).to_contain_text("25.0 %")
    page.get_by_role("button", name="Stop evict-1").click()
    expect(page.get_by_text("Job evict-1 is being stopped.")).to_be_visible()
    assert server.changes == [("DELETE", "jobs/evict-1", None)]


def test_the_newest_job_is_first(tab, server):
    """The interface has them by their names, which say nothing."""
    jobs = [job(name, "done") for name in ("a-old", "b-new", "c-older")]
    for one, age_s in zip(jobs, (60.0, 2.0, 90.0), strict=True):
        one["nodes"][0]["age_s"] = age_s
    server.answers["jobs"] = jobs
    page = tab.enter(VIEWER, "jobs")
    expect(page.locator("tbody th")).to_have_text(["b-new", "a-old", "c-older"])


def test_a_drain_takes_the_nodes_name(tab, server):
    page = tab.enter(OPERATOR, "nodes/c")
    page.get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog", name="Drain c?")
    drain = dialog.get_by_role("button", name="Drain", exact=True)
    typed = dialog.get_by_label("Type c to confirm")
    expect(typed).to_be_focused()
    for text in ("b", "C", "c "):
        typed.fill(text)
        expect(drain).to_be_disabled()
        page.keyboard.press("Enter")
    assert server.changes == []
    typed.fill("c")
    drain.click()
    expect(dialog).to_have_count(0)
    assert server.changes == [("POST", "operator/drain", {"node": "c"})]
    tab.go("nodes/b")
    page.get_by_role("button", name="Take the drain back").click()
    expect(page.get_by_text("The drain of b is taken back.")).to_be_visible()
    assert server.changes[-1] == ("POST", "operator/drain", {"node": "b", "wanted": False})


def test_blocks_are_pinned(tab, server):
    page = tab.enter(OPERATOR, f"blocks/default/{DIGESTS[0]}/{'0' * 32}")
    page.get_by_role("button", name="Pin…").click()
    dialog = page.get_by_role("dialog", name="Pin blocks")
    pin = dialog.get_by_role("button", name=re.compile("^(Pin|Unpin)"))
    expect(pin).to_have_text("Pin 1 block")
    dialog.get_by_label("Keys").fill(f"{'0' * 32} {'1' * 32}, {'1' * 32} no-key")
    expect(dialog).to_contain_text("no-key is no block's key")
    expect(pin).to_be_disabled()
    dialog.get_by_label("Keys").fill(f"{'0' * 32} {'1' * 32}, {'1' * 32}")
    dialog.get_by_label("Pin", exact=True).select_option("hard")
    expect(dialog).to_contain_text("takes up memory until it is unpinned")
    expect(pin).to_have_text("Pin 2 blocks")
    pin.click()
    expect(dialog).to_have_count(0)
    body = {"keys": ["0" * 32, "1" * 32], "kind": "hard", "namespace": DIGESTS[0]}
    assert server.changes == [("POST", "pins", body)]
    expect(page.get_by_text("Pinned on a: 2; b did not answer: no answer.")).to_be_visible()


def test_memory_is_warmed_after_it_was_counted(tab, server):
    page = tab.enter(OPERATOR, SPACE)
    page.get_by_role("button", name="Warm…").click()
    dialog = page.get_by_role("dialog", name="Warm memory")
    count = dialog.get_by_role("button", name="Count first")
    expect(dialog).to_contain_text("Name at least one block.")
    expect(count).to_be_disabled()
    expect(dialog.get_by_label("Move")).to_be_disabled()
    dialog.get_by_label("Into the memory of").select_option("b")
    dialog.get_by_label("What", exact=True).select_option("b")
    expect(dialog).to_contain_text("Choose two nodes that differ.")
    dialog.get_by_label("What", exact=True).select_option("a")
    expect(dialog.get_by_label("Keys")).to_be_disabled()
    dialog.get_by_label("Move").check()
    count.click()
    expect(dialog).to_contain_text("Would move 90 blocks")
    dialog.get_by_role("button", name="Move 90 blocks").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    spec = {"kind": "warm", "namespace": DIGESTS[0], "source": "a", "move": True}
    assert [body["spec"] for _, _, body in server.changes] == [spec, spec]
    assert [body["dry_run"] for _, _, body in server.changes] == [True, False]
    assert server.changes[0][2]["nodes"] == ["b"]


def test_a_namespace_is_configured(tab, server):
    page = tab.enter(ADMIN, SPACE)
    page.get_by_role("button", name="Configure…").click()
    dialog = page.get_by_role("dialog", name="Configure the namespace")
    go = dialog.get_by_role("button", name="Configure")
    expect(go).to_be_disabled()
    for label, wrong, right in (
        ("Kept unused for", "soon", "12h"),
        ("DRAM quota", "120%", "50GiB"),
    ):
        dialog.get_by_label(label).fill(wrong)
        expect(dialog).to_contain_text(f"Not understood: {label}.")
        expect(go).to_be_disabled()
        dialog.get_by_label(label).fill(right)
    dialog.get_by_label("Written to SSD").select_option("through")
    expect(dialog).to_contain_text("Kept unused for: no limit → 12 h 0 min")
    go.click()
    expect(dialog).to_have_count(0)
    changes = {"ttl_s": 43_200, "dram_quota": 50 << 30, "write": "through"}
    assert server.changes == [("PATCH", f"namespaces/{DIGESTS[0]}", changes)]


def test_a_setting_is_changed(tab, server):
    page = tab.enter(ADMIN, "settings")
    rows = page.get_by_role("region", name="Settings, table").locator("tbody tr")
    expect(rows.nth(2)).to_contain_text("64 GiB")
    expect(rows.nth(3)).to_contain_text("set")
    page.get_by_label("Show only settings with").fill("FLUSH")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Change ssd_flush_s").click()
    dialog = page.get_by_role("dialog", name="Change ssd_flush_s")
    go = dialog.get_by_role("button", name="Change", exact=True)
    expect(go).to_be_disabled()
    dialog.get_by_label("Value").fill("90")
    dialog.get_by_label("Where").select_option("All nodes")
    expect(dialog).to_contain_text("ssd_flush_s: 20 s → 90, on all nodes, until their daemons end.")
    go.click()
    expect(page.get_by_text("ssd_flush_s is changed on a, b.")).to_be_visible()
    assert server.changes == [("PATCH", "config", {"changes": {"ssd_flush_s": "90"}})]


# ---- how it behaves ------------------------------------------------------------------------------------


def test_a_gateway_that_is_restarted(tab, server):
    page = tab.enter(VIEWER)
    page.get_by_text("Show as table").first.click()
    server.stop()
    expect(page.locator("#session")).to_contain_text("reconnecting", timeout=PATIENCE_MS)
    expect(page.locator(".node")).to_have_count(3)
    expect(page.locator("main")).to_contain_text("What is shown below is older.")
    server.answers["nodes"] = [node("a"), node("b"), node("c"), node("d")]
    server.start()
    expect(page.locator("#session")).to_contain_text("live", timeout=PATIENCE_MS)
    expect(page.locator(".node")).to_have_count(4, timeout=PATIENCE_MS)
    expect(page.locator("main")).not_to_contain_text("What is shown below is older.")
    assert page.locator("details[open]").count() == 1, "what was open stays open"


def test_polling_stops_while_the_tab_is_hidden(tab, server):
    page = tab.page
    page.add_init_script(
        "window.hide = (value) => { Object.defineProperty(document, 'hidden', {value, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.clock.install()
    tab.enter(VIEWER, "jobs")
    expect(page.get_by_text("evict-1")).to_be_visible()

    def asked(milliseconds):
        """How often a view that polls every two seconds has asked."""
        before = server.asked.count("jobs")
        for _ in range(milliseconds // 1000):
            page.clock.run_for(1000)
            page.evaluate("fetch('/v1/me').then(() => 0)")  # answers come in turn
        return server.asked.count("jobs") - before

    assert 3 <= asked(10_000) <= 6
    page.evaluate("hide(true)")
    asked(1000)
    assert asked(30_000) == 0
    page.evaluate("hide(false)")
    assert asked(4000) >= 1


def test_by_keyboard_alone(tab, server):
    page = tab.enter(OPERATOR)
    expect(page.locator(".node")).to_have_count(3)
    page.evaluate("document.activeElement.blur()")
    walk = []
    for _ in range(16):
        page.keyboard.press("Tab")
        walk.append(tab.focused())
        assert tab.focus_is_seen(), walk[-1]
    assert walk[:10] == [
        "Skip to content", "kvpool", "Colours", "Sign out",
        "Cluster", "Namespaces", "Jobs", "Requests", "Events", "Settings",
    ]  # fmt: skip
    page.keyboard.press("Home")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert tab.focused() == "a"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="a", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Drain…")).to_be_visible()
    for _ in range(10):
        if tab.focused() == "Drain…":
            break
        page.keyboard.press("Tab")
    assert tab.focused() == "Drain…"
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    inside = "document.activeElement.closest('dialog') !== null"
    for key in ("Tab", "Tab", "Tab", "Shift+Tab", "Shift+Tab", "Shift+Tab", "Shift+Tab"):
        page.keyboard.press(key)
        assert page.evaluate(inside) and tab.focus_is_seen()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert tab.focused() == "Drain…", "where it was before"
    page.keyboard.press("Enter")
    page.keyboard.type("a")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    assert server.changes == [("POST", "operator/drain", {"node": "a"})]


def test_a_fresh_answer_takes_no_focus_away(tab, server):
    page = tab.enter(VIEWER)
    link = page.get_by_role("link", name="c", exact=True)
    link.focus()
    server.answers["nodes"] = [node("a"), node("aa"), node("c", labels={"zone": "new"})]
    expect(page.locator(".node").nth(1)).to_contain_text("aa", timeout=PATIENCE_MS)
    expect(page.get_by_text("zone new")).to_be_visible()
    expect(link).to_be_focused()


def test_a_phone(open_tab):
    tab = open_tab(viewport={"width": 360, "height": 740})
    page = tab.enter(ADMIN)
    for view in VIEWS:
        tab.go(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
    tab.go("namespaces")
    lines = "(e) => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).fontSize)"
    assert page.locator("tbody code").first.evaluate(lines) < 2, "a digest in one line"
    page.get_by_role("button", name="Evict…").click()
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_tab, server, scheme):
    server.lost = {"c"}
    tab = open_tab(color_scheme=scheme)
    page = tab.page
    page.goto(f"{tab.url}/ui/")
    expect(page.get_by_label("Token")).to_be_visible()
    assert tab.contrasts()[0][0] >= 4.5
    tab.enter(ADMIN)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == (scheme == "dark")
    for view in VIEWS:
        tab.go(view)
        ratio, where = tab.contrasts()[0]
        assert ratio >= 4.5, f"{view}: {where}"
    tab.go("namespaces")
    page.get_by_role("button", name="Evict…").click()
    page.get_by_role("button", name="Count first").click()
    expect(page.get_by_text("Would evict")).to_be_visible()
    ratio, where = tab.contrasts()[0]
    assert ratio >= 4.5, where


def test_the_switch_of_colours_is_remembered(open_tab):
    tab = open_tab(color_scheme="light")
    page = tab.enter(VIEWER)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    colours = page.get_by_label("Colours")
    expect(colours).to_have_value("system")
    colours.select_option("dark")
    assert page.evaluate(ground) != light
    page.reload()
    tab.main_heading()
    expect(colours).to_have_value("dark")
    assert page.evaluate(ground) != light
    colours.select_option("Colours: system")
    assert page.evaluate(ground) == light
    assert page.evaluate("localStorage.length") == 0


def test_less_motion(open_tab):
    durations = "[...document.querySelectorAll('*')].map((e) => getComputedStyle(e)).flatMap((s) => [s.transitionDuration, s.animationDuration])"
    found = {}
    for wish in ("no-preference", "reduce"):
        page = open_tab(reduced_motion=wish).enter(VIEWER)
        expect(page.locator(".node")).to_have_count(3)
        found[wish] = {text for text in page.evaluate(durations) if set(text) & set("123456789")}
    assert found["no-preference"] and not found["reduce"]


def test_nothing_that_axe_finds(tab):
    page = tab.enter(ADMIN)
    for view in VIEWS:
        tab.go(view)
        found = Axe().run(page).response["violations"]
        told = [(each["id"], [n["html"][:200] for n in each["nodes"]]) for each in found]
        assert told == [], view


def test_dialogs_please_axe_too(tab):
    page = tab.enter(ADMIN, "namespaces")
    page.get_by_role("button", name="Evict…").click()
    page.get_by_role("button", name="Count first").click()
    expect(page.get_by_text("Would evict")).to_be_visible()
    assert [each["id"] for each in Axe().run(page).response["violations"]] == []


def test_what_more_memory_would_give_and_why_blocks_were_missed(tab, server):
    page = tab.enter(ADMIN)
    planned = page.get_by_role("region", name="What more memory would give")
    expect(planned).to_contain_text("Hit rate now 41.2 %. At most 58.9 % with infinite memory")
    assert planned.get_by_role("img").count() == 1
    planned.get_by_text("Show as table").click()
    expect(planned.get_by_role("row")).to_have_count(10)
    expect(planned.get_by_role("row", name="256 GiB")).to_contain_text("47.1 %")
    expect(planned.get_by_role("row", name="infinite")).to_contain_text("58.9 %")
    why = page.get_by_role("region", name="Why blocks were missed").get_by_role("listitem")
    expect(why.first).to_contain_text("never stored 40 reads")
    expect(why.last).to_contain_text("1 block")
    server.answers["memory"] = {
        **server.answers["memory"],
        "misses": {},
        "curve": {**server.answers["memory"]["curve"], "hit": None},
    }
    page.reload()
    expect(planned).to_contain_text("No blocks have been asked for yet.", timeout=PATIENCE_MS)
    expect(page.get_by_text("No read has missed a block.")).to_be_visible()


def test_nothing_comes_from_elsewhere(tab, server):
    page = tab.enter(ADMIN)
    for view in VIEWS:
        tab.go(view)
        expect(page.get_by_text("Loading…")).to_have_count(0)
    assert tab.hosts == {f"127.0.0.1:{server.port}"}
    assert tab.said == []
    # The policy does what it says: a script that is written into the page is not run.
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert page.evaluate("window.ran") is None
    assert any("script-src" in each for each in tab.said)


def test_all_of_it_is_light():
    files = {path.name: path.stat().st_size for path in UI.iterdir()}
    assert {"index.html", "app.js", "style.css", "icon.svg"} <= files.keys()
    assert sum(files.values()) < 300_000


def test_every_module_is_told_of_at_once():
    """No module waits for another one to be read: each is named in the page's head."""
    head = (UI / "index.html").read_text()
    for path in UI.glob("*.js"):
        assert f'"/ui/{path.name}"' in head
