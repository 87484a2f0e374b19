"""Nodes on machines with networks of their own: the scenarios run in a namespace, in another process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.netns import inside, unavailable

SCENARIOS = Path(__file__).parent / "network_scenarios.py"


@pytest.mark.slow
def test_cuts_between_two_nodes_that_both_reach_etcd_and_redis(repo_root):
    """`test_peer_faults.py` has the like of it with a proxy, for machines without namespaces."""
    if reason := unavailable():
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SCENARIOS)]
    done = subprocess.run(
        inside(command), capture_output=True, text=True, cwd=repo_root, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
