"""scripts/code_lines.py: which lines are code."""

import subprocess
import sys
from pathlib import Path

import pytest

MODULE = '''"""A docstring

of three lines."""

import os  # counts

# A comment.
SETTING: int = 1
"""A docstring of a field."""


def function(
    argument: str,
) -> str:
    """A docstring."""
    return """a value
    of two lines"""
'''
CODE_LINES = 7


@pytest.fixture
def count(repo_root: Path, tmp_path: Path):
    def run(ceiling: int) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "pyproject.toml").write_text(f"[tool.kvpool]\ncode_lines_max = {ceiling}\n")
        command = [sys.executable, repo_root / "scripts/code_lines.py", tmp_path]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    (tmp_path / "kvpool").mkdir()
    (tmp_path / "kvpool/one.py").write_text(MODULE)
    (tmp_path / "kvpool/one_pb2.py").write_text(MODULE)
    (tmp_path / "kvpool/one.proto").write_text("// A comment.\n\nmessage One {\n}\n")
    return run


def test_docstrings_comments_blank_lines_and_generated_code_are_not_counted(count):
    done = count(CODE_LINES + 2)
    assert done.returncode == 0
    assert done.stdout == f"{CODE_LINES + 2} lines of code, at most {CODE_LINES + 2}\n"


def test_more_than_the_ceiling_fails(count):
    done = count(CODE_LINES + 1)
    assert done.returncode == 1
    assert "only ever lowered" in done.stdout
