"""The SSD store after SIGKILL of a real process, and after power cuts replayed from a recorded one."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest

from tests.support.ssd_kills import KilledStore
from tests.support.ssd_replay import Recording, inspect_image, record

MIB = 1 << 20


@pytest.fixture
def memory(tmp_path):
    """A folder for images, of which thousands are written."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize(("packed", "nbytes"), [(False, 8192), (True, 16384)])
def test_killed_under_load(tmp_path, packed, nbytes):
    killed = KilledStore(tmp_path / "store", 8 * MIB, nbytes=nbytes, seed=1, packed=packed)
    held = small = 0
    for _ in range(3 if packed else 5):
        found = killed.round(lines_max=1000)
        assert (found.wrong, found.torn, found.lost) == (0, 0, 0)
        held += len(found.held)
        small += found.packed
    assert killed.acknowledged > 100 and held > 100, "there was something to lose"
    assert (30 < small < held - 30) == packed


@pytest.mark.parametrize(("packed", "nbytes"), [(False, 4096), (True, 12288)])
def test_power_cuts(tmp_path, memory, packed, nbytes):
    """At every few events: all written, only what was synced, and random parts, torn ones among them."""
    recording = record(tmp_path, 4 * MIB, nbytes, batches=10, threads=2, packed=packed)
    assert len(recording.writes) > 100 and len(recording.said) > 100
    dice, held, small, images = random.Random(7), 0, 0, 0
    for cut in recording.cuts()[:: 8 if packed else 4]:
        for image in recording.images(cut, subsets=3, dice=dice):
            found = inspect_image(recording, image, cut, memory)
            assert (found.wrong, found.torn, found.lost) == (0, 0, 0), f"after event {cut}"
            held, small = max(held, len(found.held)), max(small, found.packed)
            images += 1
    assert held > 50 and images > (100 if packed else 200)
    assert (20 < small < held - 20) == packed


def test_the_replay_notices_a_lost_sync(tmp_path, memory):
    """The same record, had nobody synced: the replay finds blocks that are gone."""
    whole = record(tmp_path, 4 * MIB, nbytes=4096, batches=4, threads=1)
    syncs = [sync for sync in whole.syncs if sync[0] != "segment"]
    careless = Recording(whole.base, whole.size, whole.nbytes, whole.writes, syncs, whole.said)
    cut = careless.cuts()[-1]
    _, only_synced, *_ = careless.images(cut, 0, random.Random(1))
    assert inspect_image(careless, only_synced, cut, memory).lost > 0
