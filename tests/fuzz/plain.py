"""Inputs from a seed, without guidance."""

from __future__ import annotations

import random
import traceback
from typing import NamedTuple

from tests.fuzz import targets

POOL_MAX = 256  # inputs that were not refused, to go on from
FINDINGS_MAX = 20


class Finding(NamedTuple):
    """An input, and what a target raised for it."""

    target: str
    data: bytes
    trace: str


def fuzz(name: str, count: int, seed: int) -> list[Finding]:
    """This many inputs for a target. Those that it accepts are changed further."""
    rng = random.Random(f"{name} {seed}")
    target = targets.TARGETS[name]
    pool = list(target.seeds)
    findings: list[Finding] = []
    for _ in range(count):
        data = target.mutated(rng.choice(pool), rng)
        try:
            taken = accepted(target, data)
        except Exception:  # noqa: BLE001  (whatever it is, it is a finding)
            findings.append(Finding(name, data, traceback.format_exc()))
            if len(findings) >= FINDINGS_MAX:
                break
            continue
        if taken and len(data) < 4096:
            if len(pool) < POOL_MAX:
                pool.append(data)
            else:
                pool[rng.randrange(len(target.seeds), POOL_MAX)] = data
    return findings


def accepted(target: targets.Target, data: bytes) -> bool:
    """Whether it was taken for right. Raises what it must not raise."""
    try:
        target.take(data)
    except targets.EXPECTED:
        return False
    return True
