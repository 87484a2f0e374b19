"""Count the product's lines of code, and fail above the ceiling in pyproject.toml: `code_lines.py [FOLDER]`.

Code is what the wheel ships in Python, and the definitions that generated modules come from. Docstrings, comments and
blank lines are not counted. Formatting decides what a line is, so the count holds for ruff's settings of today.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("kvpool", "storage", "engine_plugins")
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def python_lines(path: Path) -> int:
    """Return the number of lines with code in a Python file."""
    with path.open("rb") as file:
        lines = {
            line
            for token in tokenize.tokenize(file.readline)
            if token.type not in NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
    # A string that stands alone is a docstring, of a field too.
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def proto_lines(path: Path) -> int:
    """Return the number of lines with code in a protocol buffer definition."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(1 for line in lines if line and not line.startswith("//"))


def counted(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield each counted file with its lines of code."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):  # does not follow the links between them
            if path.suffix == ".proto":
                yield path, proto_lines(path)
            elif path.suffix == ".py" and not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path, python_lines(path)


def main(root: Path) -> int:
    """Print the count beside the ceiling; return the exit status."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    ceiling = project["tool"]["kvpool"]["code_lines_max"]
    total = sum(lines for _, lines in counted(root))
    print(f"{total} lines of code, at most {ceiling}")
    if total > ceiling:
        print("take away as much as the change adds; the ceiling is only ever lowered")
    return int(total > ceiling)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
