"""One short run of chaos: it works, and says nothing false. What depends on time is for `make chaos`, which has longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import checker
from tests.chaos.run import Size, run

SEED = 1
SIZE = Size(seconds=10.0, processes=1, threads=3)
RULES = {"no_wrong_byte", "no_exit_unordered", "nothing_broken_said"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run(tmp_path_factory, monkeypatch, repo_root: Path):
    monkeypatch.setenv("PYTHONPATH", str(repo_root))
    folder = tmp_path_factory.mktemp("chaos")
    records = run(folder, SEED, SIZE, lambda line: None)
    violations = [one for one in checker.check(records) if one.rule in RULES]
    found = checker.summary(records)
    assert not violations, f"{folder}: {violations[:10]}; {found}"
    assert found["parts compared"]["parts"] > 0
    assert sum(found["faults"].values()) > 0
