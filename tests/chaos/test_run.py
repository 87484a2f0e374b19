"""One short run of chaos: its history passes, and it is not empty of what the rules are about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import checker
from tests.chaos.run import WITNESSES, Size, run

SEED = 1
SIZE = Size(seconds=30.0, processes=1, threads=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_violates_nothing(tmp_path_factory, monkeypatch, repo_root: Path):
    monkeypatch.setenv("PYTHONPATH", str(repo_root))
    folder = tmp_path_factory.mktemp("chaos")
    records = run(folder, SEED, SIZE, lambda line: None)
    violations = checker.check(records)
    found = checker.summary(records)
    assert not violations, f"{folder}: {violations[:10]}; {found}"
    assert found["at deaths"]["reads"] >= WITNESSES // 2
    assert found["parts compared"]["parts"] > 100
    assert sum(found["faults"].values()) > 3
