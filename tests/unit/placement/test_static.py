"""The static membership beyond the contract: its file, and the faults that a simulation makes."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError, Unavailable
from kvpool.placement.membership.base import Standing
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.records import SettingsChange
from tests.contract.suites.membership import entry, record

DIGEST = entry().digest


async def started(cluster: StaticCluster) -> StaticMembership:
    member = StaticMembership(cluster)
    await member.start()
    return member


# ---- the file -----------------------------------------------------------------------------------------


def test_epochs_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "namespaces.json"

    async def live(expected: int) -> None:
        member = await started(StaticCluster(path=path))
        assert (await member.register(entry())).epoch == expected
        await member.bump_epoch("t", DIGEST, expected, fence=True)
        change = SettingsChange(replicas=1 + expected, write="through" if expected else None)
        await member.configure("t", DIGEST, change)
        await member.close()

    for epoch in range(3):
        asyncio.run(live(epoch))
        (stored,) = msgspec.json.decode(path.read_bytes())["namespaces"]
        assert (stored["epoch"], stored["fence"]) == (epoch + 1, epoch + 1)
        kept = stored["settings"]
        assert (kept["replicas"], kept["write"]) == (1 + epoch, "through" if epoch else "")
    assert [p.name for p in tmp_path.iterdir()] == ["namespaces.json"]


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b'{"namespaces": 5}', b'{"namespaces": [], "format": 99}']
)
def test_a_file_that_cannot_be_read_is_an_error_and_stays(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "namespaces.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"namespaces\.json"):
        StaticCluster(path=path)
    assert path.read_bytes() == data


def test_an_epoch_that_cannot_be_kept_does_not_begin(tmp_path: Path) -> None:
    """Else a restart would go back to the one before, and old blocks would be hits."""
    folder = tmp_path / "data"
    folder.mkdir()

    async def main() -> None:
        member = await started(StaticCluster(path=folder / "namespaces.json"))
        await member.register(entry())
        (folder / "namespaces.json").unlink()
        folder.rmdir()
        with pytest.raises(Unavailable, match=r"namespaces\.json"):
            await member.bump_epoch("t", DIGEST, 0, fence=True)
        assert member.view.namespaces[("t", DIGEST)].epoch == 0
        folder.mkdir()
        assert (await member.bump_epoch("t", DIGEST, 0, fence=True)).epoch == 1

    asyncio.run(main())


def test_a_half_written_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "namespaces.json"

    async def main() -> None:
        member = await started(StaticCluster(path=path))
        await member.register(entry())
        before = path.read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(Unavailable, match="No space"):
            await member.bump_epoch("t", DIGEST, 0, fence=True)
        assert path.read_bytes() == before

    asyncio.run(main())


# ---- faults -------------------------------------------------------------------------------------------


def test_a_lease_that_ended_unheard_of_is_unsure_then_lost() -> None:
    held: list[Callable[[], None]] = []

    async def main() -> None:
        cluster = StaticCluster(deliver=lambda member, tell: held.append(tell))
        member = await started(cluster)
        lost: list[bool] = []
        member.on_lost(lambda: lost.append(True))
        await member.join(record("a"))
        cluster.expire("a")
        assert member.standing(0.0) is Standing.UNSURE
        assert not await member.lead("chore")
        assert lost == []
        for tell in held * 2:
            tell()
        assert member.standing(0.0) is Standing.LOST
        assert lost == [True]
        await member.join(record("a"))
        for tell in held:
            tell()
        assert member.standing(0.0) is Standing.MEMBER
        assert lost == [True]

    asyncio.run(main())


def test_one_node_is_cut_off_and_its_lease_ends() -> None:
    async def main() -> None:
        cluster = StaticCluster()
        a, b = await started(cluster), await started(cluster)
        await a.join(record("a"))
        await b.join(record("b"))
        cluster.go_away("a")
        assert (a.standing(0.0), b.standing(0.0)) == (Standing.AWAY, Standing.MEMBER)
        cluster.expire("a")
        assert (set(a.view.nodes), set(b.view.nodes)) == ({"a", "b"}, {"b"})
        assert a.standing(0.0) is Standing.AWAY
        with pytest.raises(Unavailable):
            await a.set_drain("b", wanted=True)
        cluster.come_back("a")
        assert a.standing(0.0) is Standing.LOST
        assert set(a.view.nodes) == {"b"}

    asyncio.run(main())


@settings(max_examples=200)
@given(st.integers(0, 1 << 32))
def test_late_lost_and_repeated_notifications_never_turn_a_view_back(seed: int) -> None:
    rng = random.Random(seed)
    held: list[Callable[[], None]] = []

    def deliver(_member: StaticMembership, tell: Callable[[], None]) -> None:
        held.extend([tell] * rng.choice([0, 1, 1, 2]))

    async def main() -> None:
        cluster = StaticCluster(deliver=deliver)
        members = [await started(cluster) for _ in range(3)]
        seen = [0] * 3
        for _ in range(40):
            number = rng.randrange(3)
            member, name = members[number], "abc"[number]
            match rng.randrange(5):
                case 0 if member.standing(0.0) in {Standing.OUT, Standing.LOST}:
                    await member.join(record(name))
                    assert name in member.view.nodes
                case 1:
                    await member.leave()
                    assert member.standing(0.0) is Standing.OUT
                case 2:
                    cluster.expire(name)
                case 3:
                    await member.set_drain(name, wanted=rng.random() < 0.5)
                case _:
                    rng.shuffle(held)
                    for tell in held[: len(held) // 2]:
                        tell()
                    del held[: len(held) // 2]
            for n, each in enumerate(members):
                assert each.view.revision >= seen[n]
                seen[n] = each.view.revision
                assert (each.standing(0.0) is Standing.MEMBER) == (
                    each.node in cluster.view.nodes
                    and each.standing(0.0) is not Standing.OUT
                    and each.standing(0.0) is not Standing.LOST
                )
        cluster.come_back()
        for tell in held:
            tell()
        for member in members:
            member.hear(cluster.view)
            assert member.view == cluster.view
            assert member.standing(0.0) is not Standing.UNSURE

    asyncio.run(main())
