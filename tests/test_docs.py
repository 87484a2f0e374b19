"""What the documents say is so: targets, links and code."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.config import SETTINGS

REPO_ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [
        *REPO_ROOT.glob("*.md"),
        *(REPO_ROOT / "docs").rglob("*.md"),
        *(REPO_ROOT / "changes").glob("*.md"),
        *(REPO_ROOT / "bench").rglob("*.md"),
        *(REPO_ROOT / "deploy").rglob("*.md"),
    ]
)
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO_ROOT))
)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE_SPAN = re.compile(r"`([^`\n]+)`")


def code_blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """Yields each block with the number of the line it begins on."""
    for match in FENCE.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start(2)) + 1, match[2]


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = HEADING.findall(prose(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def make_targets() -> set[str]:
    makefile = (REPO_ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def targets_mentioned(text: str) -> set[str]:
    commands = CODE_SPAN.findall(prose(text))
    for _, block in code_blocks(text, "console"):
        commands += [line.removeprefix("$ ") for line in block.splitlines()]
    matches = (re.match(r"make ([a-z][a-z-]*)", command) for command in commands)
    return {match[1] for match in matches if match}


def test_every_make_target_is_in_the_readme() -> None:
    assert make_targets() <= targets_mentioned((REPO_ROOT / "README.md").read_text())


def test_every_make_target_says_what_it_does() -> None:
    makefile = (REPO_ROOT / "Makefile").read_text()
    described = set(re.findall(r"^([a-z][a-z-]*):.* ## \S", makefile, re.MULTILINE))
    assert described == make_targets()


@each_document
def test_mentioned_make_targets_exist(document: Path) -> None:
    assert targets_mentioned(document.read_text()) <= make_targets()


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(prose(document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert not broken


@each_document
def test_python_blocks_compile(document: Path) -> None:
    for line, block in code_blocks(document.read_text(), "python"):
        # Blank lines in front, so that a syntax error names the document's own line.
        compile("\n" * (line - 1) + block, str(document), "exec")


def test_every_setting_is_documented(repo_root: Path) -> None:
    text = (repo_root / "docs" / "config.md").read_text()
    missing = [name for name in SETTINGS if f"| `{name}` |" not in text]
    assert not missing, f"docs/config.md says nothing of {missing}"
