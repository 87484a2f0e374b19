"""How mkdocs makes a site of documents that are written to be read on GitHub: `make docs`.

The first page is the README. Links to files outside of `docs/` lead nowhere in the site, so only their text is kept.
Anchors are those that GitHub makes of headings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
HOME = "index.md"


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def page_text(text: str, folder: str) -> str:
    """The text of a page whose links lead to pages of the site, or are text alone.

    folder: of its file, from the repository's root.
    """
    # Between blocks of code, which are left as they are.
    parts = CODE.split(text)
    parts[::2] = [
        LINK.sub(lambda link: _link(link[1], link[2], folder), part) for part in parts[::2]
    ]
    return "".join(parts)


def _link(text: str, target: str, folder: str) -> str:
    path, hash_, fragment = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return f"[{text}]({target})"
    path = posixpath.normpath(posixpath.join(folder, path))
    if path == "README.md":
        path = f"docs/{HOME}"
    elif not path.startswith("docs/"):
        return text
    elif (ROOT / path).is_dir():
        path += "/README.md"
    base = folder if folder.startswith("docs") else "docs"
    return f"[{text}]({posixpath.relpath(path, base)}{hash_}{fragment})"


# ---- what mkdocs calls -------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    folder = "." if uri == HOME else posixpath.dirname(posixpath.join("docs", uri))
    return page_text(markdown, folder)
