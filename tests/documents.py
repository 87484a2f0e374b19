"""The documents, as those read them who do what they say: code blocks, and the commands in these.

Loaded by path: tests are collected so that they cannot import one another.

A block may have an HTML comment on the line before it, which no reader sees:

    <!-- given: NAMES -->    a fragment of Python, for which these names are there
    <!-- on: HOST -->        where of several hosts it is typed
    <!-- file: NAME -->      what it is kept as
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "changes").glob("*.md"),
        *(ROOT / "bench").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)

FENCE = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PUNCTUATION = "();<>|&"
_KEYWORDS = {"do", "done", "else", "fi", "for", "if", "then", "while"}


@dataclass(frozen=True)
class Block:
    """line: the one it begins on, the first after the fence. hidden: what the comment before it says, or ""."""

    document: Path
    line: int
    language: str
    text: str
    hidden: str

    @property
    def where(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    def said(self, what: str) -> str:
        """Of its hidden comment, what stands after `what:`."""
        name, _, value = self.hidden.partition(":")
        return value.strip() if name == what else ""


@dataclass(frozen=True)
class Command:
    """What is typed after one `$`, continued lines included. printed: the lines shown below it, its output."""

    where: str
    text: str
    printed: tuple[str, ...] = ()

    def simple(self) -> list[list[str]]:
        """The words of each program that it runs, as the shell splits them; variables stay as they are."""
        return simple_commands(self.text)


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(
            document,
            text.count("\n", 0, match.start(3)) + 1,
            match[2],
            match[3],
            match[1] or "",
        )
        for match in FENCE.finditer(text)
    ]


def section(document: Path, heading: str) -> list[Block]:
    """The blocks below a heading of the second level, up to the next one."""
    lines = document.read_text().splitlines()
    begin = lines.index(f"## {heading}") + 1
    ends = [number for number, line in enumerate(lines) if line.startswith("## ")]
    end = next((number for number in ends if number >= begin), len(lines))
    return [block for block in blocks(document) if begin < block.line <= end]


def prose(text: str) -> str:
    return FENCE.sub("", text)


def commands(block: Block) -> list[Command]:
    """Of a console block. Raises `ValueError` for one that does not end."""
    found: list[Command] = []
    begun: list[str] = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        if not begun and not line.startswith("$ "):
            if found:
                found[-1] = replace(found[-1], printed=(*found[-1].printed, line))
            continue
        if not begun:
            where = f"{block.document.relative_to(ROOT)}:{number}"
        begun.append(line if begun else line.removeprefix("$ "))
        if _is_whole(text := "\n".join(begun)):
            found.append(Command(where, text))
            begun = []
    if begun:
        raise ValueError(f"{where}: the command does not end: {begun[0]}")
    return found


def printed(block: Block) -> list[str]:
    """Of a console block, the lines that are no commands."""
    typed = {line for command in commands(block) for line in command.text.splitlines()}
    return [line for line in block.text.splitlines() if line.removeprefix("$ ") not in typed]


def all_commands(documents: Iterable[Path] = DOCUMENTS) -> Iterator[Command]:
    for document in documents:
        for block in blocks(document):
            if block.language == "console":
                yield from commands(block)


def simple_commands(text: str) -> list[list[str]]:
    """Without assignments before them, redirections and the shell's own words. Raises `ValueError`."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word.strip(_PUNCTUATION):
            if found[-1] or not (_ASSIGNMENT.match(word) or word in _KEYWORDS):
                found[-1].append(word)
        elif "<" in word or ">" in word:
            next(words, None)
        else:
            found.append([])
    return [each for each in found if each]


def kvpool_arguments(words: list[str]) -> list[str] | None:
    """What `kvpool` is given by a simple command; None: it is another program's."""
    if Path(words[0]).name == "kvpool":
        return words[1:]
    if words[0] == "docker" and "kvpool" in words:
        return words[len(words) - words[::-1].index("kvpool") :]
    return None


def option(words: list[str], name: str) -> str | None:
    """The value of an option of any program, in either form."""
    for number, word in enumerate(words):
        if word == name:
            return words[number + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _is_whole(text: str) -> bool:
    if text.endswith("\\"):
        return False
    try:
        simple_commands(text)
    except ValueError:  # a quotation that is not closed
        return False
    return True
