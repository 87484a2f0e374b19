"""The dashboard's views with a real cluster's data, measured in a real Chromium: at each width and in both colours nothing
sticks out, lies over other text, is left empty or cannot be read."""

import contextlib
import json
import urllib.request

import pytest
from playwright.sync_api import expect

from kvpool.types import EngineRecord
from tests.integration.admin.conftest import open_gate
from tests.integration.admin.ui_browser import PATIENCE_MS, Tab
from tests.integration.cluster.conftest import PLAIN
from tests.support.programs import program
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S, until

WIDTHS = (360, 820, 1000, 1366)
HEIGHT = 740
SCHEMES = ("light", "dark")
CONTRAST = 4.5  # WCAG's AA
HEADER_SHARE = 0.15  # of a phone's screen
ROUTER_TOKEN = "a router's token, long enough"
SPACE = PLAIN.digest().hex()
# A view, and what opens a dialog there.
DIALOGS = (
    ("jobs", "Evict…"),
    (f"namespaces/default/{SPACE}", "Configure…"),
    (f"namespaces/default/{SPACE}", "Pin…"),
    (f"namespaces/default/{SPACE}", "Warm…"),
    ("nodes/a", "Drain…"),
    ("settings", "Change replication_bandwidth"),
)
# What is wrong inside `root`, in words. Text that is cut off must be in something that scrolls, and that shows it does.
MEASURE = r"""
async (selector) => {
  await new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)));
  const root = document.querySelector(selector);
  const faults = [];
  const name = (e) => `${e.tagName.toLowerCase()}.${e.getAttribute('class') ?? ''} "${(e.textContent ?? '').trim().slice(0, 40)}"`;
  const clipped = (e) => e !== null && (getComputedStyle(e).clipPath !== 'none' || clipped(e.parentElement));
  const unseen = (e) => e.closest('.skip, option, noscript, script') || !e.getClientRects().length || clipped(e)
    || getComputedStyle(e).visibility === 'hidden';
  const scrolls = (e) => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
  const inner = new Map(); // the nearest box that scrolls, or null
  const scroller = (e) => {
    if (!e || e === document.body) return null;
    if (!inner.has(e)) inner.set(e, scrolls(e) ? e : scroller(e.parentElement));
    return inner.get(e);
  };
  const far = root === document.body ? innerWidth : Math.min(innerWidth, root.getBoundingClientRect().right);
  if (document.documentElement.scrollWidth > innerWidth) faults.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const e of root.querySelectorAll('*')) {
    if (unseen(e)) continue;
    const box = e.getBoundingClientRect();
    const around = scroller(e.parentElement);
    if (!around && box.width && (box.right > far + 1 || box.left < -1) && !(e instanceof SVGElement)) faults.push(`sticks out: ${name(e)}`);
    if (scrolls(e) && e.nodeName !== 'DIALOG' && e.scrollWidth > e.clientWidth + 1) {
      const style = getComputedStyle(e);
      if (!/gradient/.test(style.backgroundImage) || !/local/.test(style.backgroundAttachment)) faults.push(`is cut off without a hint: ${name(e)}`);
    }
    if (/^(TD|TH|DT|DD|LI)$/.test(e.nodeName) || e.matches('.tile, .pill, .card, button, summary')) {
      if (!e.innerText.trim() && !e.querySelector('input, select, button, .bar')) faults.push(`is empty: ${name(e)}`);
    }
    if (e.matches('.tiles') && Math.abs([...e.children].at(-1).getBoundingClientRect().right - box.right) > 3) faults.push(`is not filled: ${name(e)}`);
  }
  const texts = [];
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    const e = node.parentElement;
    if (!node.data.trim() || unseen(e)) continue;
    if (/\b(undefined|NaN|null|Infinity)\b|\[object/.test(node.data)) faults.push(`says ${node.data.trim()}`);
    const range = document.createRange();
    range.selectNodeContents(node);
    const around = scroller(e)?.getBoundingClientRect();
    const cell = e.closest('td, th, button, .tile, .pill, .card, dialog');
    const hold = cell?.getBoundingClientRect();
    for (const box of range.getClientRects()) {
      if (hold && !scroller(e)?.contains(cell) === !scroller(e) && (box.right > hold.right + 1 || box.left < hold.left - 1)) faults.push(`leaves its box: ${name(e)}`);
      const left = Math.max(box.left, around?.left ?? -Infinity) + 1;
      const right = Math.min(box.right, around?.right ?? Infinity) - 1;
      const top = Math.max(box.top, around?.top ?? -Infinity) + 3;
      const bottom = Math.min(box.bottom, around?.bottom ?? Infinity) - 3;
      if (left < right && top < bottom) texts.push({ node, left, right, top, bottom });
    }
  }
  texts.sort((one, other) => one.top - other.top);
  texts.forEach((one, n) => {
    for (let m = n + 1; m < texts.length && texts[m].top < one.bottom; m += 1) {
      const other = texts[m];
      if (other.node !== one.node && other.left < one.right && one.left < other.right) {
        faults.push(`"${one.node.data.trim().slice(0, 30)}" lies over "${other.node.data.trim().slice(0, 30)}"`);
      }
    }
  });
  if (!texts.length) faults.push('says nothing');
  return [...new Set(faults)].slice(0, 12);
}
"""


@pytest.fixture(scope="module")
def busy(shared_cluster, tmp_path_factory):
    """Two nodes with blocks, pins, an engine, jobs and a router. `gate`, `views`: by their addresses."""
    folder = tmp_path_factory.mktemp("layout")
    with contextlib.ExitStack() as stack:
        engine = json.loads(
            stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
        )["url"]
        router = f"http://127.0.0.1:{free_port()}"
        command = ("kvpool.cli", "router", "--engine", engine, "--no-daemon", "--listen")
        stack.enter_context(program(*command, router[7:], KVPOOL_ROUTER_TOKEN=ROUTER_TOKEN))
        world = stack.enter_context(shared_cluster(nodes=1, ssd="64MiB"))
        world.gate = gate = open_gate(
            world, folder, KVPOOL_ROUTERS=router, KVPOOL_ROUTER_TOKEN=ROUTER_TOKEN
        )
        a, g = world.seat("a"), world.seat("g")
        some = list(range(40))
        a.put(some)
        assert a.read(some) == 40
        until(lambda: g.read([*some[:20], 999]) == 20, "the other node knows where they are")
        a.client.engine.announce(a.ns, EngineRecord("http://10.20.30.40:8000", model="a/model"))
        key = some[3].to_bytes(16, "big").hex()
        gate.change("POST", "/v1/pins", {"keys": [key], "kind": "soft", "namespace": SPACE})
        for spec, dry_run in (
            ({"kind": "evict", "namespace": SPACE}, True),
            ({"kind": "scrub"}, False),
        ):
            job = gate.change("POST", "/v1/jobs", {"spec": spec, "dry_run": dry_run})["job"]
            until(
                lambda job=job: gate.get(f"/v1/jobs/{job}")["state"] == "done", "the job has ended"
            )
        asked = urllib.request.Request(
            f"{router}/v1/completions",
            json.dumps({"model": "stub", "prompt": "hello there", "max_tokens": 2}).encode(),
            {"Authorization": f"Bearer {ROUTER_TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            request = answer.headers["x-kvpool-request-id"]
        world.views = (
            *("cluster", "nodes/a", "namespaces", f"namespaces/default/{SPACE}"),
            *(f"blocks/default/{SPACE}/{key}", "jobs", "requests", f"requests/{request}"),
            *("events", "settings", "audit"),
        )
        until(lambda: len(gate.get("/v1/history")["samples"]) >= 2, "there is something to draw")
        yield world


@pytest.fixture
def open_tab(browser, busy):
    with contextlib.ExitStack() as stack:

        def open_one():
            url = f"http://127.0.0.1:{busy.gate.port}"
            tab = Tab(browser, url, color_scheme="light", reduced_motion="reduce")
            stack.callback(tab.close)
            tab.enter(busy.gate.tokens["root"])
            return tab

        yield open_one


def shown(tab, view):
    """All that a view has, with what can be opened open."""
    tab.go(view)
    expect(tab.page.get_by_text("Loading…")).to_have_count(0, timeout=PATIENCE_MS)
    if view == "cluster":
        expect(tab.page.locator(".plot .series").first).to_be_attached(timeout=PATIENCE_MS)
    tab.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")


def faults_of(tab, root="body", widths=WIDTHS):
    """What is wrong, with the width and the colours in which it is."""
    found = []
    for width in widths:
        tab.page.set_viewport_size({"width": width, "height": HEIGHT})
        for scheme in SCHEMES:
            tab.page.emulate_media(color_scheme=scheme)
            faults = tab.page.evaluate(MEASURE, root)
            if width in (WIDTHS[0], WIDTHS[-1]):  # the same elements are shown between
                ratio, where = tab.contrasts()[0]
                if ratio < CONTRAST:
                    faults.append(f"a contrast of {ratio:.2f}: {where}")
            found += [f"at {width}, {scheme}: {fault}" for fault in faults]
    return found


def test_every_view_at_every_width_in_both_colours(busy, open_tab, tmp_path):
    tab = open_tab()
    faults = {}
    for view in busy.views:
        shown(tab, view)
        if found := faults_of(tab):
            faults[view] = found
            tab.page.screenshot(path=tmp_path / f"{view.replace('/', '-')}.png", full_page=True)
    assert faults == {}, f"pictures are in {tmp_path}"
    assert tab.said == []


def test_every_dialog_in_both_colours(open_tab):
    """Wide screens are one to a dialog, whose width has a limit."""
    tab = open_tab()
    faults = {}
    for view, button in DIALOGS:
        tab.page.set_viewport_size({"width": WIDTHS[-1], "height": HEIGHT})
        shown(tab, view)
        tab.page.get_by_role("button", name=button).first.click()
        expect(tab.page.get_by_role("dialog")).to_be_visible()
        if found := faults_of(tab, "dialog", (WIDTHS[0], WIDTHS[-1])):
            faults[button] = found
    assert faults == {}
    assert tab.said == []


def test_on_a_phone_the_header_is_two_lines_and_has_a_menu(open_tab):
    tab = open_tab()
    page = tab.page
    page.set_viewport_size({"width": WIDTHS[0], "height": HEIGHT})
    for view in ("cluster", "audit"):
        tab.go(view)
        box = page.locator("nav").bounding_box()
        assert box["y"] + box["height"] < HEADER_SHARE * HEIGHT
        current = page.locator("nav [aria-current]").bounding_box()
        assert current["x"] >= 0 and current["x"] + current["width"] <= WIDTHS[0]
    menu = page.get_by_role("button", name="Menu")
    expect(page.get_by_role("button", name="Sign out")).to_be_hidden()
    menu.click()
    expect(menu).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    assert page.evaluate(MEASURE, "body") == []
    page.get_by_label("Colours").select_option("dark")
    assert "dark" in page.evaluate("getComputedStyle(document.documentElement).colorScheme")
    menu.click()
    expect(page.get_by_role("button", name="Sign out")).to_be_hidden()


def test_a_tab_says_what_it_shows_and_of_which_cluster(busy, open_tab):
    tab = open_tab()
    for view, words in (("jobs", "Jobs"), ("nodes/a", "a · Node"), ("cluster", "Cluster")):
        tab.go(view)
        expect(tab.page).to_have_title(f"{words} · {busy.name} · kvpool")
