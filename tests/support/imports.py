"""What a fresh interpreter loads."""

from __future__ import annotations

import json
import subprocess
import sys


def modules_after(statement: str) -> set[str]:
    """The names of what a fresh interpreter has loaded once it has run `statement`."""
    code = f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))
