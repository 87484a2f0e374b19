"""vLLM for CUDA with its defaults there, which CPUs do not have: async scheduling, second model runner, CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and vLLM for it")
@pytest.mark.timeout(900)
def test_engines_share_blocks_with_the_defaults_of_a_gpu(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    bench = [sys.executable, str(ROOT / "bench/gpu_engine.py"), "--small", "--quick"]
    ran = subprocess.run(
        [*bench, "--json", str(found)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads(found.read_text())
    engines = [row for row in document["rows"] if row["name"].startswith("engine ")]
    assert len(engines) == 3
    assert all(row["async_scheduling"] and row["second_model_runner"] for row in engines)
    assert all("FULL" in row["cuda_graphs"] for row in engines)
    checks = {check["name"]: check["value"] for check in document["checks"]}
    assert checks["gpu_wrong_or_missed"] == 0
