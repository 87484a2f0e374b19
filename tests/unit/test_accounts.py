"""Accounts and receipts against an oracle that counts by itself: a day with quotas, evictions, restarts and crashes."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import msgspec
import pytest

from kvpool.daemon.core.blocks import Lease, Origin, PartTable
from kvpool.daemon.core.events import PartRefused, Put, Read, Refused, Stage
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.accounts import Accounts, of_kept
from kvpool.daemon.features.traffic import TrafficCounts
from kvpool.daemon.ops.receipts import (
    BISECTED_BYTES,
    FILE,
    QUERIES_WAITING_MAX,
    ROWS_OF_TOTAL_MAX,
    AccountPeriods,
    ReceiptsFile,
)
from kvpool.errors import LimitExceeded, PoolFull
from kvpool.storage.eviction import DEFAULT_POLICY, policy_maker
from kvpool.storage.stack import dram_costs
from kvpool.telemetry.receipts import MODEL_MAX, Booked, facts_of
from kvpool.telemetry.receipts_export import flat, to_csv, to_lines
from kvpool.types import NamespaceRecord, PartSpec
from kvpool.wire import operator as operator_wire

NBYTES, TOKENS, DAY_S, PERIOD_S = 4096, 16, 86_400.0, 300.0
TENANTS = ("blue", "red")
EVER = operator_wire.ListAccounts(0.0, 1e12, 0, 10_000, total=True)


class Life:
    """A daemon's rules with its accounts, from a start to an end."""

    def __init__(
        self,
        number: int,
        now: float,
        folder: Path | None,
        nbytes: int = 64 << 20,
        *,
        kind: type[Accounts] = Accounts,
        file_kind: type[ReceiptsFile] = ReceiptsFile,
    ) -> None:
        self.now = now
        self.began_s = 1.7e9
        self.node = Node(
            make_policy=policy_maker(DEFAULT_POLICY, dram_costs(disks=False)),
            incarnation=f"life-{number}",
        )
        self.traffic = TrafficCounts()
        self.accounts = kind("a", self.node, self.traffic, lambda: self.now, self.wall)
        self.node.events.subscribe("accounts", self.accounts.handlers)
        file = None if folder is None else file_kind(folder, nbytes)
        self.keeper = AccountPeriods(self.accounts, file, self.wall)
        self.holders = {}
        self.spaces = {}
        self.tickets = 0
        for segment, tenant in enumerate(TENANTS):
            made = self.node.add_tenant(tenant, segment, 256 * NBYTES, 64 * NBYTES)
            self.holders[tenant] = self.node.holders.own(tenant, "client")
            for model in ("small", "large"):
                record = NamespaceRecord(
                    {"model": model, "block_tokens": TOKENS}, (PartSpec(NBYTES),)
                )
                space = self.node.namespaces.open(
                    made, record.digest(), record.canonical(), list(record.parts)
                )
                self.spaces[tenant, model] = space
        self.node.quotas.set(self.spaces["red", "small"], 32 * NBYTES)

    def wall(self) -> float:
        return self.began_s + self.now

    def open(self, tenant: str, model: str) -> Any:
        """A further namespace."""
        record = NamespaceRecord({"model": model}, (PartSpec(NBYTES),))
        return self.node.namespaces.open(
            self.node.tenants[tenant], record.digest(), record.canonical(), list(record.parts)
        )

    def put(self, space: Any, keys: list[bytes], request: str = "") -> int:
        """As a client's put; how many are new."""
        holder = self.holders[space.tenant.name]
        self.tickets += 1
        requests = [(request, len(keys))] if request else ()
        try:
            self.node.puts.reserve(holder, space, 0, self.tickets, keys)
        except (PoolFull, LimitExceeded):
            self.refused(space, [PartRefused(0, "full")], len(keys), requests)
            return 0
        reservation = holder.reservations.get(self.tickets)
        if reservation is None:
            return 0
        new = self.node.puts.commit(holder, self.tickets, bytes(16 * len(reservation.rows)))
        self.written(reservation.table, new, requests)
        return new

    def read(self, space: Any, keys: list[bytes], request: str = "") -> int:
        holder = self.holders[space.tenant.name]
        lease = self.node.leases.acquire(holder, space, [], keys, 5.0, self.now)
        if lease is None:
            return 0
        lease.request = request
        self.was_read(lease)
        self.node.leases.release(holder, lease.token)
        return lease.blocks

    def was_read(self, lease: Lease) -> None:
        namespace: Any = None  # the lease says it
        self.node.events.emit(Read(namespace, [], b"", [], 0, 0, Stage.HERE, None, lease))

    def written(self, table: PartTable, new: int, requests: Any = ()) -> None:
        self.node.events.emit(Put(table, b"", new, requests))

    def refused(self, space: Any, parts: Any, *rest: Any) -> None:
        self.node.events.emit(Refused(space, parts, *rest))

    def account(self, space: Any) -> Booked:
        return self.traffic.of(space.tenant.name).account

    def end_period(self) -> None:
        self.keeper.end_period()
        self.keeper.write()

    def held(self) -> dict[tuple[str, str], int]:
        self.node.settle()
        return {
            name: len(space.tables[0].blocks) * space.tables[0].stride
            for name, space in self.spaces.items()
        }


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def rows(keeper: AccountPeriods, m: operator_wire.ListAccounts = EVER) -> Any:
    return asyncio.run(keeper.accounts(m))


def booked_of(item: Booked) -> Booked:
    return Booked(item.reads, item.written, item.refused, item.kept_byte_s)


def named(item: Any) -> tuple[Any, ...]:
    return item.tenant, item.namespace, item.model, booked_of(item)


def by_name(life: Life, found: Any) -> dict[tuple[str, str], Booked]:
    digests = {space.base_hex: model for (_, model), space in life.spaces.items()}
    return {(each.tenant, digests[each.namespace]): booked_of(each) for each in found.rows}


class Oracle:
    """Counts the same by itself, of what lives did: in periods that ended, in the open one, and what crashes lost."""

    def __init__(self) -> None:
        self.closed: Any = Counter()
        self.open: Any = Counter()
        self.lost: Any = Counter()

    def passes(self, life: Life, until: float) -> None:
        """Nothing happens until then."""
        for name, nbytes in life.held().items():
            self.open[(*name, "kept")] += nbytes * (until - life.now)
        life.now = until

    def ends(self, into: Any) -> None:
        into.update(self.open)
        self.open.clear()

    @staticmethod
    def total(counted: Any, what: str) -> int:
        return sum(int(count) for (_, _, each), count in counted.items() if each == what)


def test_a_day_with_clean_restarts_and_crashes_adds_up(tmp_path: Path) -> None:
    draw, oracle, counters = random.Random(7), Oracle(), Counter[str]()
    life = Life(0, 0.0, tmp_path)
    lives = crashes = 0
    cut_at, end_at = PERIOD_S, draw.uniform(2000, 8000)
    while life.now < DAY_S:
        happens_at = life.now + draw.expovariate(1 / 20)
        while cut_at <= happens_at:
            oracle.passes(life, cut_at)
            life.end_period()
            oracle.ends(oracle.closed)
            cut_at += PERIOD_S
        oracle.passes(life, happens_at)
        name = (draw.choice(TENANTS), draw.choice(("small", "large")))
        first = draw.randrange(1500)
        keys = [key(first + at) for at in range(draw.randrange(1, 40))]
        request = draw.choice(("", f"r{draw.randrange(50)}"))
        if draw.random() < 0.5:
            oracle.open[(*name, "written")] += life.put(life.spaces[name], keys, request)
        else:
            oracle.open[(*name, "read")] += life.read(life.spaces[name], keys, request)
        if life.now >= end_at or life.now >= DAY_S:
            counters["read"] += life.node.counters.leased_blocks
            counters["written"] += life.node.counters.committed
            counters["evicted"] += life.node.counters.evicted
            counters["over quota"] += life.node.counters.evicted_by_quota
            crash = draw.random() < 0.5
            if not crash:
                life.keeper.close()
            oracle.ends(oracle.lost if crash else oracle.closed)
            lives, crashes = lives + 1, crashes + crash
            life, end_at = Life(lives, life.now, tmp_path), life.now + draw.uniform(2000, 8000)
    assert lives > 8
    assert crashes > 2
    assert counters["over quota"] > 100
    assert counters["evicted"] > 1000

    found = by_name(life, rows(life.keeper))
    assert set(found) == set(life.spaces)
    for name, booked in found.items():
        read, written = booked.reads["dram"], booked.written
        assert read.blocks == oracle.closed[(*name, "read")]
        assert written.blocks == oracle.closed[(*name, "written")]
        for amount in (read, written):
            assert amount.tokens == amount.blocks * TOKENS
            assert amount.nbytes == amount.blocks * NBYTES
        assert booked.kept_byte_s["dram"] == pytest.approx(oracle.closed[(*name, "kept")], rel=1e-9)
    # What crashes lost is missing, at most a period each: the daemons' own counters say the same.
    for what, got in (
        ("read", sum(each.reads["dram"].blocks for each in found.values())),
        ("written", sum(each.written.blocks for each in found.values())),
    ):
        assert got == oracle.total(oracle.closed, what)
        assert got + oracle.total(oracle.lost, what) == counters[what]
        assert oracle.total(oracle.lost, what) < crashes * counters[what] * 2 * PERIOD_S / DAY_S


def test_receipts_and_what_has_no_label_are_the_account() -> None:
    life = Life(0, 0.0, None)
    space = life.spaces["red", "large"]
    some = [key(at) for at in range(8)]
    assert life.put(space, some, "one") == 8
    assert life.read(space, some, "one") == 8
    assert life.read(space, some[:3], "two") == 3
    assert life.read(space, some[:5]) == 5
    life.refused(space, [PartRefused(0, "quota")], 4, [("two", 4)])
    assert life.accounts.ended(space, "one", "s")
    assert not life.accounts.ended(space, "unknown")
    one, two = life.accounts.receipts(lambda _: True)
    assert (one.request, one.session, one.ended_s) == ("one", "s", 1.7e9)
    assert (two.request, two.ended_s) == ("two", None)
    account = life.account(space)
    (row,) = life.accounts.open_period().rows
    assert row.booked.written == account.written == one.booked.written
    read = [each.booked.reads["dram"].blocks for each in (one, two)]
    assert account.reads["dram"].blocks == row.booked.reads["dram"].blocks == sum(read) + 5
    assert two.booked.refused == row.booked.refused == account.refused


def test_blocks_that_a_reader_waited_for_count_once_for_where_they_came_from() -> None:
    life = Life(0, 0.0, None)
    space, holder = life.spaces["red", "large"], life.holders["red"]
    some = [key(at) for at in range(6)]
    life.put(space, some[:2])
    life.node.puts.reserve(holder, space, 0, 900, some)
    life.node.puts.commit(holder, 900, bytes(16 * 4), None, Origin(tier="ssd"))
    for _ in range(2):
        assert life.read(space, some) == 6
    reads = life.account(space).reads
    assert {tier: amount.blocks for tier, amount in reads.items()} == {"dram": 8, "ssd": 4}
    assert {tier: amount.tokens for tier, amount in reads.items()} == {"dram": 128, "ssd": 64}


def test_an_ended_epoch_is_kept_for_nobody() -> None:
    life = Life(0, 0.0, None)
    space = life.spaces["red", "large"]
    life.put(space, [key(at) for at in range(10)])
    life.node.settle()
    life.now = 10.0
    life.node.namespaces.set_epoch(space, 1, 1)
    life.now = 100.0
    life.node.ended_epochs.reclaim(100)
    life.accounts.settle()
    assert life.account(space).kept_byte_s == {"dram": 10 * NBYTES * 10.0}


def test_the_file_survives_a_torn_line_and_pages_share_no_row(tmp_path: Path) -> None:
    life = Life(0, 0.0, tmp_path)
    for minute in range(1, 90):
        life.put(life.spaces["red", "large"], [key(minute)])
        life.put(life.spaces["blue", "small"], [key(minute)])
        life.now = minute * PERIOD_S
        life.end_period()
    life.put(life.spaces["red", "small"], [key(1)])
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"node":"a","incarn')
    again = Life(1, life.now, tmp_path)
    again.keeper.close()
    assert all(json.loads(line) for line in (tmp_path / FILE).read_text().splitlines())
    for reader in (life, again):
        seen: list[tuple[str, float, str]] = []
        place, more = (0, 0), True
        while more:
            wanted = operator_wire.ListAccounts(0.0, 1e12, place[0], 7, from_row=place[1])
            page = rows(reader.keeper, wanted)
            assert len(page.rows) == 7 or not page.more
            seen += [(each.incarnation, each.end_s, each.tenant) for each in page.rows]
            place, more = (page.next_sequence, page.next_row), page.more
        assert len(seen) == len(set(seen))
        assert sum(incarnation == "life-0" for incarnation, _, _ in seen) >= 2 * 89
    red = rows(life.keeper, operator_wire.ListAccounts(0.0, 1e12, 0, 1000, ["red"]))
    assert {each.tenant for each in red.rows} == {"red"}
    assert [each.open for each in red.rows if each.open] == []


def test_old_files_go_first_and_the_whole_stays_bounded(tmp_path: Path) -> None:
    life = Life(0, 0.0, tmp_path, 8000)
    for minute in range(1, 200):
        life.now = minute * PERIOD_S
        life.put(life.spaces["red", "large"], [key(minute)])
        life.end_period()
    assert len(list(tmp_path.iterdir())) == 4
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 8000
    numbers = numbers_in(tmp_path)
    assert numbers == list(range(numbers[0], 200)), "the last ones, in their order"


def numbers_in(folder: Path) -> list[int]:
    files = [folder / f"{FILE}.{number}" for number in (3, 2, 1)] + [folder / FILE]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [json.loads(line)["number"] for line in lines]


def minutes(life: Life, count: int) -> None:
    """That many periods, in each of which one block is written."""
    for _ in range(count):
        life.written(life.spaces["red", "large"].tables[0], 1)
        life.now += PERIOD_S
        life.end_period()


def written(found: Any) -> int:
    return sum(each.written.blocks for each in found.rows)


def pages(keeper: AccountPeriods, count: int) -> list[Any]:
    found = [rows(keeper, operator_wire.ListAccounts(0.0, 1e12, 0, count))]
    while found[-1].more:
        last = found[-1]
        wanted = operator_wire.ListAccounts(
            0.0, 1e12, last.next_sequence, count, from_row=last.next_row
        )
        found.append(rows(keeper, wanted))
    return found


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_is_set_back_hides_nothing(tmp_path: Path, restart: bool) -> None:
    life = Life(0, 0.0, tmp_path)
    minutes(life, 150)
    if restart:
        life = Life(1, -86_400.0, tmp_path)
    else:
        life.began_s -= 86_400
    for told in range(160, 290, 10):
        minutes(life, 10)
        assert written(rows(life.keeper)) == told
    found = pages(life.keeper, 50)
    assert len(found) == 6
    assert sum(map(written, found)) == 280


def test_a_file_that_cannot_be_read_is_told_and_the_rest_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(0, 0.0, tmp_path)
    minutes(life, 70)
    (tmp_path / f"{FILE}.1").mkdir()
    for _ in range(2):
        found = rows(life.keeper)
        assert found.incomplete
        assert written(found) == 70
    assert len([each for each in caplog.records if "cannot be read" in each.message]) == 1
    (tmp_path / f"{FILE}.1").rmdir()
    assert not rows(life.keeper).incomplete


def test_a_tenant_has_a_bounded_part_of_a_period_and_sums_stay(tmp_path: Path) -> None:
    life = Life(0, 0.0, tmp_path)
    life.written(life.spaces["blue", "small"].tables[0], 1)
    for number in range(300):
        life.written(life.open("red", "x" * 5000 + str(number)).tables[0], 1)
    life.now += 5.0
    wanted = operator_wire.ListAccounts(0.0, 1e12, 0, 1000, ["red"])
    before = rows(life.keeper, wanted)
    assert len(before.rows) == Accounts.ROWS_MAX + 1
    life.end_period()
    assert [named(each) for each in rows(life.keeper, wanted).rows] == [
        named(each) for each in before.rows
    ]
    again = Life(1, life.now, tmp_path)
    old = rows(again.keeper, wanted)
    assert [named(each) for each in old.rows] == [named(each) for each in before.rows]
    assert written(old) == 300
    assert old.rows[-1].namespace == ""
    assert {len(each.model) for each in old.rows} == {0, MODEL_MAX}
    assert (tmp_path / FILE).stat().st_size < 40_000
    assert sum(map(written, pages(again.keeper, 7))) == 301


def test_all_periods_together_have_a_bounded_number_of_rows() -> None:
    life = Life(0, 0.0, None)
    spaces = []
    for number in range(ROWS_OF_TOTAL_MAX):
        spaces.append(life.open("red", f"m{number}"))
        life.written(spaces[-1].tables[0], 1)
        if (number + 1) % Accounts.ROWS_MAX == 0:
            life.now += PERIOD_S
            life.end_period()
    life.written(life.spaces["red", "small"].tables[0], 7)
    life.written(life.spaces["blue", "small"].tables[0], 1)
    life.now += 1.0
    found = {(each.tenant, each.namespace): each for each in rows(life.keeper).rows}
    small = life.spaces["blue", "small"]
    own = {("red", space.base_hex) for space in spaces}
    assert set(found) == own | {("red", ""), ("blue", small.base_hex)}
    assert {found[name].written.blocks for name in own} == {1}
    assert found["red", ""].written.blocks == 7
    assert [found["red", name].open for name in (spaces[0].base_hex, "")] == [False, True]


def test_a_full_disk_costs_the_oldest_periods_and_no_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(0, 0.0, tmp_path, 8000)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", Mock(side_effect=OSError(28, "full")))
        minutes(life, 100)
    minutes(life, 1)
    numbers = numbers_in(tmp_path)
    assert numbers == list(range(numbers[0], 102))
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 2000, "all that waited"
    assert f"the file lacks {numbers[0] - 1} periods" in caplog.text


def test_files_that_are_rotated_while_somebody_reads_are_read(tmp_path: Path) -> None:
    life = Life(0, 0.0, tmp_path, 40_000)
    minutes(life, 100)
    opened, _ = ReceiptsFile(tmp_path, 40_000).open()
    lines = chain.from_iterable(opened)
    seen = [next(lines)]
    begun = (tmp_path / FILE).stat().st_ino
    while (tmp_path / FILE).stat().st_ino == begun:
        minutes(life, 1)
    seen += lines
    numbers = [json.loads(line)["number"] for line in seen]
    assert numbers == list(range(1, numbers[-1] + 1))
    assert numbers[-1] >= 100
    for each in opened:
        each.close()


def test_a_page_begins_near_its_first_period(tmp_path: Path) -> None:
    seen: list[int] = []

    class Opened(io.BufferedReader):
        def __next__(self) -> bytes:
            line = super().__next__()
            seen.append(json.loads(line)["number"])
            return line

    class Watched(ReceiptsFile):
        def open(self) -> tuple[list[BinaryIO], list[OSError]]:
            opened, failed = super().open()
            for each in opened:
                each.close()
            return [Opened(io.FileIO(each.name)) for each in opened], failed

    life = Life(0, 0.0, tmp_path, 4 << 20)
    spaces = [life.open("red", str(number).ljust(MODEL_MAX, "x")) for number in range(20)]
    for _ in range(250):
        for space in spaces:
            life.written(space.tables[0], 1)
        life.now += PERIOD_S
        life.end_period()
    files = list(tmp_path.iterdir())
    line_bytes = sum(each.stat().st_size for each in files) // 250
    assert len(files) == 2
    assert 4 < BISECTED_BYTES // line_bytes < 20
    again = Life(1, life.now, tmp_path, 4 << 20, file_kind=Watched)
    first = rows(again.keeper, operator_wire.ListAccounts(0.0, 1e12, 0, 1))
    begin = first.next_sequence
    assert seen[0] == 1
    for number in (0, 1, 2, 100, 177, 248, 249):
        seen.clear()
        wanted = operator_wire.ListAccounts(0.0, 1e12, begin + number, 10_000)
        page = rows(again.keeper, wanted)
        assert number + 1 - (BISECTED_BYTES // line_bytes + 2) < seen[0] <= number + 1
        assert seen == list(range(seen[0], 251))
        assert page.rows[0].number == number + 1


def test_questions_that_wait_are_bounded(tmp_path: Path) -> None:
    life = Life(0, 0.0, tmp_path)
    minutes(life, 3)

    async def ask() -> list[Any]:
        asked = (life.keeper.accounts(EVER) for _ in range(QUERIES_WAITING_MAX + 1))
        return await asyncio.gather(*asked, return_exceptions=True)

    *told, refused = asyncio.run(ask())
    assert [written(each) for each in told] == [3] * QUERIES_WAITING_MAX
    assert isinstance(refused, LimitExceeded)


def test_tables_and_lines_have_every_number() -> None:
    life = Life(0, 0.0, None)
    life.put(life.spaces["red", "large"], [key(1)], "=cmd")
    life.now = 3.0
    found = rows(life.keeper, operator_wire.ListAccounts(0.0, 1e12, 0, 10))
    items = msgspec.to_builtins(found.rows)
    head, line = to_csv(items).splitlines()
    table = dict(zip(head.split(","), line.split(","), strict=True))
    assert table["written_tokens"] == "16" and table["refused_quota_parts"] == "0"
    assert set(flat(items[0])) <= set(table)
    assert json.loads(to_lines(items)) == items[0]


def test_a_clients_text_stays_in_its_cell() -> None:
    model, _ = facts_of({"model": "\t=1+1\x1b[2J" + "x" * 500})
    assert model == "=1+1[2J" + "x" * (MODEL_MAX - 7)
    life = Life(0, 0.0, None)
    minutes(life, 1)
    (found,) = rows(life.keeper, operator_wire.ListAccounts(0.0, 1e12, 0, 10)).rows
    for text, told in (("\t=1", "' =1"), ("\r=1", "' =1"), ("a\nb", "a b"), ("@x", "'@x")):
        found.model = text
        table = to_csv([msgspec.to_builtins(found)])
        (line,) = csv.DictReader(io.StringIO(table))
        assert line["model"] == told


def test_labels_follow_the_keys_that_found_a_slot() -> None:
    requests = [("a", 3), ("b", 2), ("c", 4)]
    assert of_kept(requests, [0, 2, 4, 5, 8]) == [("a", 2), ("b", 1), ("c", 2)]
    assert of_kept(requests, []) == [("a", 0), ("b", 0), ("c", 0)]


def test_namespaces_beyond_the_limit_have_one_row_together() -> None:
    class OneRow(Accounts):
        ROWS_MAX = 1

    life = Life(0, 0.0, None, kind=OneRow)
    for model in ("small", "large"):
        life.put(life.spaces["red", model], [key(1)])
    life.now = 5.0
    found = {row.namespace: row.booked.written.blocks for row in life.accounts.cut().rows}
    assert found == {life.spaces["red", "small"].base_hex: 1, "": 1}


def test_a_tenant_with_many_requests_gives_up_its_own_receipts() -> None:
    class SixReceipts(Accounts):
        RECEIPTS_MAX = 6

    life = Life(0, 0.0, None, kind=SixReceipts)
    life.put(life.spaces["blue", "large"], [key(1)], "kept")
    for number in range(20):
        life.put(life.spaces["red", "large"], [key(number)], f"r{number}")
    names = [each.request for each in life.accounts.receipts(lambda _: True)]
    assert names == ["kept", "r17", "r18", "r19"]


def parts_of(life: Life, *parts: PartSpec) -> Any:
    record = NamespaceRecord({"model": "parts", "block_tokens": TOKENS}, parts)
    tenant = life.node.tenants["red"]
    return life.node.namespaces.open(tenant, record.digest(), record.canonical(), list(parts))


@pytest.mark.parametrize(
    ("takes", "taken", "requests", "parts"),
    [
        ((0, 0, 0), 0, {"A": 1, "B": 1, "": 1}, {"A": 9, "B": 6, "": 3}),
        # A part that takes the first four keys has something of A, and the beginning of B.
        ((0, 4, 0), 4, {"A": 0, "B": 0, "": 1}, {"A": 6, "B": 5, "": 3}),
        ((1, 0, 1), 1, {"A": 0, "B": 1, "": 1}, {"A": 7, "B": 6, "": 3}),
        ((3, 3, 3), 3, {"B": 1, "": 1}, {"B": 6, "": 3}),
        # Another part, which is not among those refused, takes all.
        ((0, 0, 0), 6, {"A": 0, "B": 0, "": 0}, {"A": 9, "B": 6, "": 3}),
    ],
)
def test_a_request_is_refused_once_whatever_its_parts(
    takes: tuple[int, ...], taken: int, requests: dict[str, int], parts: dict[str, int]
) -> None:
    life = Life(0, 0.0, None)
    space = parts_of(life, *(PartSpec(NBYTES),) * 3)
    told = [PartRefused(part, "full", first) for part, first in enumerate(takes)]
    # Of A there are two runs.
    life.refused(space, told, 6, [("A", 1), ("A", 2), ("B", 2)], taken)
    account = life.account(space).refused["full"]
    assert (account.requests, account.parts) == (sum(requests.values()), sum(parts.values()))
    assert account.nbytes == account.parts * NBYTES
    for each in life.accounts.receipts(lambda _: True):
        refused = each.booked.refused["full"]
        assert (refused.requests, refused.parts) == (requests[each.request], parts[each.request])
    (row,) = life.accounts.open_period().rows
    assert row.booked.refused == life.account(space).refused


def test_a_request_that_two_reasons_refuse_counts_with_the_first() -> None:
    life = Life(0, 0.0, None)
    space = parts_of(life, PartSpec(NBYTES), PartSpec(2 * NBYTES))
    life.refused(space, [PartRefused(0, "full"), PartRefused(1, "quota")], 2, ())
    refused = life.account(space).refused
    assert {why: (it.requests, it.parts, it.nbytes) for why, it in refused.items()} == {
        "full": (1, 2, 2 * NBYTES),
        "quota": (0, 2, 4 * NBYTES),
    }


def test_rows_of_blocks_that_no_client_put_here_have_their_model() -> None:
    life = Life(0, 0.0, None)
    space, holder = life.spaces["red", "large"], life.holders["red"]
    life.node.puts.reserve(holder, space, 0, 900, [key(1)])
    life.node.puts.commit(holder, 900, bytes(16))
    life.node.settle()
    for now in (5.0, 9.0):
        life.now = now
        (row,) = life.accounts.cut().rows
        assert row.model == "large"


def test_one_tenants_namespaces_take_no_model_from_anothers_rows() -> None:
    class TwoRows(Accounts):
        ROWS_MAX = 2

    life = Life(0, 0.0, None, kind=TwoRows)
    life.put(life.spaces["blue", "small"], [key(1)])
    for number in range(10):
        life.written(life.open("red", f"m{number}").tables[0], 1)
    life.accounts.cut()
    life.now = 60.0
    models = {row.tenant: row.model for row in life.accounts.cut().rows if row.namespace}
    assert models["blue"] == "small"


def test_scattered_reads_count_what_a_put_of_the_same_counts() -> None:
    life = Life(0, 0.0, None)
    space, holder = parts_of(life, PartSpec(NBYTES, stride=4)), life.holders["red"]
    some = [key(at) for at in range(8)]
    assert life.put(space, some) == 8
    lease = life.node.leases.acquire(holder, space, [0], some, 5.0, life.now, scattered=True)
    assert lease is not None
    life.was_read(lease)
    account = life.account(space)
    assert account.reads["dram"] == account.written
    assert account.written.blocks == 32


def test_arrivals_are_forgotten_with_their_blocks_and_by_tenant() -> None:
    class FourArrivals(Accounts):
        ARRIVALS_MAX = 4

    life = Life(0, 0.0, None, kind=FourArrivals)

    def arrive(tenant: str, keys: list[bytes]) -> None:
        life.tickets += 1
        puts, space = life.node.puts, life.spaces[tenant, "large"]
        puts.reserve(life.holders[tenant], space, 0, life.tickets, keys)
        sums = bytes(16 * len(keys))
        puts.commit(life.holders[tenant], life.tickets, sums, None, Origin(tier="ssd"))
        life.node.settle()

    def came(tenant: str, keys: list[bytes]) -> int:
        """How many of these blocks are read as blocks from the disk."""
        reads = life.traffic.of(tenant).account.reads
        before = reads["ssd"].blocks if "ssd" in reads else 0
        assert life.read(life.spaces[tenant, "large"], keys) == len(keys)
        return reads["ssd"].blocks - before

    arrive("blue", [key(1), key(2)])
    arrive("red", [key(at) for at in range(9)])
    assert came("red", [key(at) for at in range(9)]) == 4, "the last ones"
    blue, large = life.node.tenants["blue"], life.spaces["blue", "large"]
    life.node.removal.remove(large, [key(1)])
    life.put(large, [key(1)])
    assert came("blue", [key(1), key(2)]) == 1, "the other one was put again"
    arrive("blue", [key(3)])
    assert life.node.eviction.evict_least(blue, 10) == (3, 3 * NBYTES)
    life.put(large, [key(3)])
    assert came("blue", [key(3)]) == 0


def test_receipts_that_are_used_stay() -> None:
    class FourReceipts(Accounts):
        RECEIPTS_MAX = 4

    life = Life(0, 0.0, None, kind=FourReceipts)
    for number, request in enumerate(("old", "one", "old", "two")):
        life.put(life.spaces["red", "large"], [key(number)], request)
    assert {each.request for each in life.accounts.receipts(lambda _: True)} == {"old", "two"}


def test_a_commit_tells_which_of_its_blocks_are_new() -> None:
    life = Life(0, 0.0, None)
    space, holder, puts = life.spaces["red", "large"], life.holders["red"], life.node.puts
    some = [key(at) for at in range(6)]
    puts.reserve(holder, space, 0, 900, some)
    reservation = holder.reservations[900]
    assert life.put(space, [some[0], some[3]]) == 2
    assert puts.commit(holder, 900, bytes(16 * 2), [3, 4]) == 1
    assert reservation.new == [1]
    assert puts.commit(holder, 900, bytes(16), [5]) == 1
    assert reservation.new is None, "all of them"
    assert puts.commit(holder, 900, bytes(16 * 3)) == 2
    assert reservation.new == [1, 2]
