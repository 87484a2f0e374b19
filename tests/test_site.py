"""`make docs`: every document is a page, the build is strict, and no page needs the internet."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Browser

from tests.support.servers.chromium import chromium

REPO_ROOT = Path(__file__).resolve().parent.parent
DOCS = REPO_ROOT / "docs"


def build(into: Path, root: Path = REPO_ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    into = tmp_path_factory.mktemp("site")
    done = build(into)
    assert done.returncode == 0, done.stdout + done.stderr
    return into


@pytest.fixture(scope="module")
def api() -> dict:
    return runpy.run_path(str(REPO_ROOT / "scripts" / "reference.py"))


def in_nav(entry) -> set[str]:
    if isinstance(entry, str):
        return {entry}
    inner = entry.values() if isinstance(entry, dict) else entry
    return set().union(*map(in_nav, inner))


class Loads(HTMLParser):
    """What a page makes a browser load, and the anchors and links that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag, attrs) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.loaded += [given[name] for name in ("src", "srcset", "data") if name in given]
        if tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given["href"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


def read(page: Path) -> Loads:
    found = Loads()
    found.feed(page.read_text())
    return found


def test_every_document_is_in_the_navigation_and_in_the_readme() -> None:
    written = yaml.safe_load((REPO_ROOT / "mkdocs.yml").read_text())
    pages = {path.name for path in DOCS.glob("*.md")}
    assert in_nav(written["nav"]) - {"index.md", "decisions/README.md"} == pages
    readme = (REPO_ROOT / "README.md").read_text()
    listed = re.findall(r"^\| \[[^\]]+\]\(docs/([^)]+)\) \| \S", readme, re.MULTILINE)
    assert sorted(listed) == sorted([*pages, "decisions/README.md"])


def test_every_decision_is_listed() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text()
    missing = [path.name for path in DOCS.glob("decisions/0*.md") if path.name not in listed]
    assert missing == []


def test_every_document_is_a_page(site) -> None:
    for path in DOCS.rglob("*.md"):
        name = "index" if path.name == "README.md" else path.stem
        assert (site / path.relative_to(DOCS).parent / f"{name}.html").is_file(), path
    assert "cluster-wide KV cache pool" in (site / "index.html").read_text()


@pytest.mark.parametrize(
    ("page", "part"),
    [
        ("cli.html", "kvpool drain [OPTIONS]"),
        ("config.html", "cluster_secret_file"),
        ("router.html", "probe_s"),
        ("metrics.html", "kvpool_uptime_seconds"),
        ("metrics.html", "kvpool_router_requests_total"),
        ("python.html", "Client.reserve_parts"),
        ("compatibility.html", "Programs written for Mooncake Store"),
        ("answers.html", "POST /v1/completions"),
        ("kvpool.1", r".SS kvpool job list"),
    ],
)
def test_what_is_declared_is_in_the_site(site, page: str, part: str) -> None:
    text = (site / page).read_text()
    assert part in text
    assert "Made by <code>make docs" not in text


def test_nothing_is_loaded_from_elsewhere(site) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        loaded = read(page).loaded
        assert loaded
        for url in loaded:
            assert not re.match(r"([a-z]+:)?//", url), (page, url)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?([a-z]+:)?//|@import", sheet.read_text()), sheet


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_the_search_finds_something_in_pages_that_are_opened_as_files(site, browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        for name in ("index.html", "decisions/index.html"):
            page.goto((site / name).as_uri())
            page.click("[data-md-component=search-query]")
            page.keyboard.type("hard pins")
            page.wait_for_selector(".md-search-result__item a[href*='tiers.html']")


def test_no_page_is_wider_than_a_phone(site, browser) -> None:
    with browser.new_context(viewport={"width": 320, "height": 800}) as context:
        page = context.new_page()
        for path in sorted(site.glob("*.html")):
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == 320, path.name


def test_links_and_anchors_lead_somewhere(site) -> None:
    pages = {page: read(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, found in pages.items():
        for link in found.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or not anchor:
                continue
            target = pages.get((page.parent / path).resolve() if path else page)
            if target is None or anchor not in target.ids:
                broken.append((page.name, link))
    assert broken == []


def test_a_broken_link_ends_the_build(tmp_path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts").mkdir()
    hook = "scripts/site_hooks.py"
    (tmp_path / hook).write_text((REPO_ROOT / hook).read_text())
    settings = (REPO_ROOT / "mkdocs.yml").read_text().replace("scripts/reference.py, ", "")
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"nav:\n(  .*\n)*\Z", "", settings))
    (tmp_path / "README.md").write_text("# Home\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text("# A page\n\n[here](#a-page)\n")
    assert build(tmp_path / "site", tmp_path).returncode == 0
    for link in ("#no-such-heading", "none.md"):
        page.write_text(f"# A page\n\n[here]({link})\n")
        done = build(tmp_path / "site", tmp_path)
        assert done.returncode != 0, link
        assert link in done.stderr


def test_links_out_of_the_documents_are_text_alone() -> None:
    text = runpy.run_path(str(REPO_ROOT / "scripts" / "site_hooks.py"))["page_text"]
    assert text("[a](../README.md#x) [b](cli.md) [c](../deploy/README.md)", "docs") == (
        "[a](index.md#x) [b](cli.md) c"
    )
    assert text("[cli](docs/cli.md#x) [l](LICENSE) [w](https://a.b/c)", ".") == (
        "[cli](cli.md#x) l [w](https://a.b/c)"
    )
    assert text("[c](../cli.md) [h](#x)", "docs/decisions") == "[c](../cli.md) [h](#x)"
    assert text("```\n[c](../none)\n```", "docs") == "```\n[c](../none)\n```"


# ---- the Python API ----------------------------------------------------------------------------------


def test_docstrings_become_lists_and_code(api) -> None:
    made = list(
        api["prose"](
            """What it does.

            one, two: of these
                and more.
            Raises `KvpoolError`.

                a tree
                  of words
            """
        )
    )
    assert made == [
        "What it does.",
        "- `one`, `two`: of these and more.\n\nRaises `KvpoolError`.",
        "```text\na tree\n  of words\n```",
    ]


def test_signatures_say_types_and_defaults(api) -> None:
    def act(one: "int", *, two: "str" = "") -> "bool":
        return bool(one and two)

    assert api["call"]("act", act) == "```text\nact(one: int, *, two: str = '') -> bool\n```"
