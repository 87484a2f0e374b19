"""The daemon's collector never walks all that lives long."""

import subprocess
import sys

CODE = """
import gc
from kvpool.daemon.server.server import _tune_gc

long_lived = [[n] for n in range(200_000)]
_tune_gc()
before = gc.get_stats()[2]["collections"]
young = gc.get_stats()[0]["collections"]
kept = []
for n in range(2_000_000):
    kept.append([n])  # tracked, and never freed: the worst there is
    if n % 1000 == 0:
        cycle = []
        cycle.append(cycle)
print(gc.get_stats()[2]["collections"] - before, gc.get_stats()[0]["collections"] - young)
print(gc.get_freeze_count() >= 200_000, gc.isenabled())
"""


def test_no_full_collections():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    counts, state = done.stdout.splitlines()
    full, young = map(int, counts.split())
    assert full == 0
    assert young > 100, "what is young is collected: cycles do go"
    assert state == "True True"
