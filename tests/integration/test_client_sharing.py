"""Several at once: threads, processes, instances, tenants."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.errors import NotAuthenticated, PoolFull, Unavailable
from kvpool.types import NamespaceRecord
from tests.support.client_inside import close_idle, note_requests, numbers_of
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord.simple("script", block_bytes=4096, block_tokens=16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> bytes:
    return bytes([number % 251]) * 4096


@pytest.fixture
def ns(client):
    return client.open(RECORD)


# ---- races ---------------------------------------------------------------------------------------------


def together(n: int, work) -> list:
    """Results of n threads that begin at once; what one raises is raised."""
    barrier = threading.Barrier(n)
    results: list = [None] * n

    def run(at: int) -> None:
        barrier.wait()
        try:
            results[at] = work(at)
        except BaseException as error:  # noqa: BLE001  # raised below
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("size", [4096, 1 << 20], ids=["small", "large"])
def test_threads_race_on_the_same_keys(daemon, client, size):
    """One copy of each, and all succeed, by either way of putting."""
    ns = client.open(NamespaceRecord.simple("race", block_bytes=size, block_tokens=16))
    for turn in range(10):
        keys = [key(turn * 100 + n) for n in range(5)]
        data = b"".join(bytes([turn + n]) * size for n in range(5))
        new = together(3, lambda _, keys=keys, data=data: client.put(ns, keys, data))
        assert sum(new) == 5
        assert b"".join(client.get(ns, keys)) == data
        client.remove(ns, keys)
    space = daemon.space()
    assert space.space.bytes_used == space.granted_bytes


def test_large_puts_take_one_exchange_beside_grants_of_other_sizes(
    start_one, monkeypatch: pytest.MonkeyPatch
):
    """Of 6 MiB that may be granted here, other blocks hold a part: what is left has no room for two large puts, but for
    one.
    """
    with start_one("--memory", "96MiB") as daemon, daemon.client(connect=True) as client:
        small = client.open(NamespaceRecord.simple("small", block_bytes=128 << 10, block_tokens=16))
        large = client.open(NamespaceRecord.simple("large", block_bytes=448 << 10, block_tokens=16))
        for turn in range(3):
            client.put(small, [key(turn * 10 + n) for n in range(4)], bytes(4 * 128 << 10))
        granted = daemon.space().granted_bytes
        assert 1 << 20 <= granted <= 2 << 20
        asked = note_requests(monkeypatch)
        for turn in range(20):
            data = bytes([turn]) * (6 * 448 << 10)
            keys = [key(1000 + turn * 10 + n) for n in range(6)]
            if turn == 3:
                asked.clear()  # by then the daemon knows what such a put takes
            assert client.put(large, keys, data) == 6
            assert b"".join(client.get(large, keys)) == data
        assert Counter(name for name in asked if name != "Acquire") == {"Store": 17}
        assert daemon.space().granted_bytes <= 6 << 20


def test_two_reservations_of_one_key(client, ns):
    """Both writers are given a slot, both commits succeed, one copy stays."""
    before = client.stats().tenants["default"].space.bytes_used
    one, two = client.reserve(ns, [key(1)]), client.reserve(ns, [key(1)])
    for reservation in (one, two):
        reservation.slots.view(0)[:] = block(1)
    assert client.commit(two) == 1
    assert client.commit(one) == 0
    assert client.get(ns, [key(1)]) == [block(1)]
    assert client.stats().tenants["default"].space.bytes_used == before + 4096


def test_processes_race_on_the_same_keys(daemon, client, ns):
    writers = [
        daemon.script(
            """
client = Client(SOCKET, timeout_s=60, connect=True)
ns = client.open(RECORD)
say("ready")
new = 0
hear()
for n in range(200):
    new += client.put(ns, [key(n), key(n + 1)], block(n) + block(n + 1))
say(str(new))
"""
        )
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.hear() == "ready"
    for writer in writers:
        writer.say("go")
    assert sum(int(writer.hear()) for writer in writers) == 201
    assert client.get(ns, [key(n) for n in range(201)]) == [block(n) for n in range(201)]
    assert client.stats().tenants["default"].blocks == 201


class Hammer:
    """Threads on one client and a pool that is too small: each byte read must be its key's."""

    KEYS = 3000

    def __init__(self, client: Client, spaces: list) -> None:
        self.client = client
        self.spaces = spaces
        self.done: Counter[str] = Counter()

    def expected(self, space: int, n: int) -> np.ndarray:
        nbytes = self.spaces[space].parts[0].nbytes
        return np.random.default_rng(space * self.KEYS + n).integers(0, 256, nbytes, np.uint8)

    def work(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        client = self.client
        for _ in range(120):
            space = int(random.integers(len(self.spaces)))
            ns = self.spaces[space]
            first = int(random.integers(self.KEYS - 16))
            numbers = range(first, first + int(random.integers(1, 16)))
            keys = [key(n) for n in numbers]
            what = random.choice(["put", "put", "get", "get_into", "acquire", "match", "remove"])
            if what == "put":
                try:
                    client.put(ns, keys, [self.expected(space, n) for n in numbers])
                except PoolFull:
                    what = "full"
            elif what == "get":
                for n, got in zip(numbers, client.get(ns, keys), strict=True):
                    if got is not None:
                        assert got == self.expected(space, n).tobytes(), f"wrong bytes of {n}"
                        self.done["hits"] += 1
            elif what == "get_into":
                out = np.empty((len(keys), ns.parts[0].nbytes), np.uint8)
                for at in np.flatnonzero(client.get_into(ns, keys, out)):
                    assert (out[at] == self.expected(space, numbers[at])).all(), "wrong bytes"
                    self.done["hits"] += 1
            elif what == "acquire":
                lease = client.acquire(ns, keys)
                if lease is not None:
                    with lease:
                        copies = [bytes(lease.slots[0].view(at)) for at in range(lease.blocks)]
                        lease.check()
                    for n, got in zip(numbers, copies, strict=False):
                        assert got == self.expected(space, n).tobytes(), "wrong bytes"
                        self.done["hits"] += 1
            elif what == "match":
                assert 0 <= client.match(ns, keys) <= len(keys)
            else:
                client.remove(ns, keys[:2])
            self.done[what] += 1


def test_threads_on_one_client_never_read_a_wrong_byte(start):
    daemon = start("--memory", "16MiB")
    with daemon.client(timeout_s=PATIENCE_S, connect=True, connections_max=5) as client:
        spaces = [
            client.open(NamespaceRecord.simple(f"hammer {size}", block_bytes=size, block_tokens=16))
            for size in (4096, 5000, 40_000)
        ]
        hammer = Hammer(client, spaces)
        together(8, hammer.work)
        assert hammer.done["hits"] > 50
        stats = client.stats()
        assert stats.counters.evicted > 0, "the pool was too small"
        assert stats.leases == 0
        mine = stats.tenants["default"]
        # What is in use are blocks and slots for the next puts, and nothing else.
        blocks = sum(
            one.blocks[0] * (-(-one.part_bytes[0] // 4096) * 4096)
            for one in mine.namespaces.values()
        )
        assert mine.space.bytes_used == blocks + mine.granted_bytes


def test_more_threads_than_connections_wait_for_their_turn(daemon, ns):
    with daemon.client(timeout_s=PATIENCE_S, connections_max=2) as client:
        mine = client.open(RECORD)

        def work(at: int) -> int:
            return sum(
                client.put(mine, [key(at * 1000 + n)], block(at * 1000 + n)) for n in range(30)
            )

        assert together(8, work) == [30] * 8
        assert client.match(mine, [key(n) for n in range(30)]) == 30
        assert client.stats().connections <= 2 + 1


def test_namespaces_that_nobody_needs_make_room_for_more(daemon, client, ns, until):
    """A tenant may have 1,024; each of these clients opens some that it never fills."""
    client.put(ns, [key(1)], block(1))
    idle, absent = daemon.client(), daemon.client()
    records = [NamespaceRecord.simple(name, block_bytes=4096, block_tokens=16) for name in "ia"]
    opened = idle.open(records[0])
    forgotten = absent.open(records[1])
    # To the daemon it is a new client when it comes back.
    before = client.stats().clients
    close_idle(absent)
    until(lambda: client.stats().clients == before - 1, "its end, to the daemon")
    for number in range(3):
        with daemon.client() as short:
            for revision in range(400):
                short.open(
                    NamespaceRecord.simple(
                        f"{number}.{revision}", block_bytes=4096, block_tokens=16
                    )
                )
        until(lambda: client.stats().clients == before - 1, "its end")
    assert client.stats().tenants["default"].namespaces.keys() >= {ns.digest.hex()}
    number = numbers_of(idle)[opened.digest]
    gone = numbers_of(absent)[forgotten.digest]
    assert client.match(ns, [key(1)]) == 1
    assert idle.put(opened, [key(2)], block(2)) == 1
    assert absent.put(forgotten, [key(3)], block(3)) == 1
    assert numbers_of(idle)[opened.digest] == number
    assert numbers_of(absent)[forgotten.digest] != gone
    assert absent.match(forgotten, [key(2), key(3)]) == 0
    assert absent.get(forgotten, [key(3)]) == [block(3)]
    for each in (idle, absent):
        each.close()


def test_closed_clients_say_so(daemon):
    client = daemon.client(connect=True)
    ns = client.open(RECORD)
    client.close()
    client.close()
    assert not client.available
    assert client.match(ns, [key(1)]) == 0
    with pytest.raises(Unavailable, match="closed"):
        client.put(ns, [key(1)], block(1))


# ---- leases across processes ---------------------------------------------------------------------------


WORKER = """
client = Client(SOCKET, timeout_s=60, instance="engine", connect=True)
lease = client.join(hear())
say("none" if lease is None else f"{lease.blocks} {bytes(lease.slots[0].view(0)) == block(1)}")
hear()
if lease is not None:
    lease.release()
client.stats()
say("released")
hear()
"""


def test_a_worker_joins_its_scheduler_s_lease(daemon, client):
    with daemon.client(instance="engine", connect=True) as scheduler:
        ns = scheduler.open(RECORD)
        scheduler.put(ns, [key(1), key(2)], block(1) + block(2))
        lease = scheduler.acquire(ns, [key(1), key(2), key(3)], lease_s=60)
        token = lease.token
        workers = [daemon.script(WORKER) for _ in range(2)]
        for worker in workers:
            worker.say(token)
            assert worker.hear() == "2 True"
        lease.release()
        assert scheduler.stats().leases == 1, "the workers still hold it"
        client.remove(client.open(RECORD), [key(1), key(2)])
        for worker in workers:
            assert scheduler.stats().leases == 1
            worker.say()
            assert worker.hear() == "released"
        assert scheduler.stats().leases == 0
        late = daemon.script(WORKER)
        late.say(token)
        assert late.hear() == "none"


def test_a_scheduler_killed_while_its_worker_holds_the_lease(daemon, client, ns, until):
    client.put(ns, [key(1)], block(1))
    scheduler = daemon.script(
        """
client = Client(SOCKET, timeout_s=60, instance="engine", connect=True)
lease = client.acquire(client.open(RECORD), [key(1)], lease_s=60)
say(lease.token)
hear()
"""
    )
    token = scheduler.hear()
    worker = daemon.script(WORKER)
    worker.say(token)
    assert worker.hear() == "1 True"
    scheduler.kill()
    until(lambda: client.stats().clients == 2, what="the scheduler's death is noticed")
    assert client.stats().leases == 1
    worker.say()
    assert worker.hear() == "released"
    assert client.stats().leases == 0


def test_another_instance_cannot_join(daemon, client, ns):
    client.put(ns, [key(1)], block(1))
    began = time.monotonic()
    with client.acquire(ns, [key(1)], lease_s=60) as lease:
        # The daemon counts from some moment of it, the client from its beginning.
        took_s = time.monotonic() - began
        with daemon.client(instance="somebody else") as other:
            assert other.join(lease.token) is None
        with daemon.client(instance=client.instance) as mate:
            joined = mate.join(lease.token)
            assert joined is not None
            assert joined.slots[0].view(0) == block(1)
            assert joined.deadline <= lease.deadline + took_s
            joined.release()
        assert client.join("no.such") is None
        assert lease.valid


# ---- tenants -------------------------------------------------------------------------------------------


TENANTS = """
memory = "16MiB"
[tenants.red]
memory = "8MiB"
token = "rot und sehr geheim"
[tenants.blue]
memory = "8MiB"
token = "blåmes är en liten fågel"
"""


@pytest.fixture
def two(start):
    daemon = start(config=TENANTS)
    with (
        daemon.client(tenant="red", token="rot und sehr geheim", connect=True) as red,
        daemon.client(tenant="blue", token="blåmes är en liten fågel", connect=True) as blue,
    ):
        yield daemon, red, blue


def test_tenants_do_not_meet(two):
    daemon, red, blue = two
    mine = red.open(RECORD)
    red.put(mine, [key(1)], block(1))
    theirs = blue.open(RECORD)
    assert blue.match(theirs, [key(1)]) == 0
    blue.put(theirs, [key(1)], block(2))
    assert red.get(mine, [key(1)]) == [block(1)]
    assert blue.get(theirs, [key(1)]) == [block(2)]
    assert blue.remove(theirs, [key(1)]) == 1
    assert red.match(mine, [key(1)]) == 1
    with daemon.client() as anybody:
        assert anybody.match(anybody.open(RECORD), [key(1)]) == 0


def test_a_tenant_cannot_address_another_s_namespaces(two):
    _, red, blue = two
    mine = red.open(RECORD)
    red.put(mine, [key(1)], block(1))
    number = numbers_of(red)[mine.digest]
    theirs = blue.open(RECORD)
    own = numbers_of(blue)[theirs.digest]
    assert own != number
    for ask, answer in (
        (lambda: blue.match(theirs, [key(1)]), 0),
        (lambda: blue.get(theirs, [key(1)]), [None]),
        (lambda: blue.remove(theirs, [key(1)]), 0),
        (lambda: blue.pin(theirs, [key(1)]), 0),
        (lambda: len(blue.reserve(theirs, [key(2)]).slots), 1),
        (lambda: blue.put(theirs, [key(2)], block(2)), 1),
    ):
        # As if it had guessed the number: it is refused, and the client opens its own namespace again.
        numbers_of(blue)[theirs.digest] = number
        assert ask() == answer, "of its own, which is empty"
        assert numbers_of(blue)[theirs.digest] == own
    assert red.get(mine, [key(1), key(2)]) == [block(1), None]


def test_a_tenant_cannot_join_another_s_lease(two):
    daemon, red, _ = two
    mine = red.open(RECORD)
    red.put(mine, [key(1)], block(1))
    with (
        red.acquire(mine, [key(1)], lease_s=60) as lease,
        daemon.client(
            tenant="blue", token="blåmes är en liten fågel", instance=red.instance
        ) as thief,
    ):
        assert thief.join(lease.token) is None


def test_stats_show_one_s_own(two):
    _, red, blue = two
    red.put(red.open(RECORD), [key(1)], block(1))
    stats = blue.stats()
    assert list(stats.tenants) == ["blue"]
    assert stats.tenants["blue"].blocks == 0
    assert stats.tenants["blue"].namespaces == {}
    assert stats.tenants["blue"].segment_bytes == 8 << 20
    assert red.stats().tenants["red"].blocks == 1


def test_a_full_tenant_takes_nothing_from_another(two):
    _, red, blue = two
    mine, theirs = red.open(RECORD), blue.open(RECORD)
    blue.put(theirs, [key(1)], block(1))
    for n in range(0, 4096, 64):
        numbers = range(n, n + 64)
        red.put(mine, [key(n) for n in numbers], [block(n) for n in numbers])
    assert blue.get(theirs, [key(1)]) == [block(1)]


@pytest.mark.parametrize(
    ("tenant", "token"),
    [
        ("red", None),
        ("red", ""),
        ("red", "blåmes är en liten fågel"),
        ("red", "röt und geheim"),
        ("green", "rot und sehr geheim"),
        ("", None),
        ("red\0", "rot und sehr geheim"),
    ],
)
def test_the_wrong_tenant_or_token(two, tenant, token):
    daemon, red, _ = two
    with pytest.raises(NotAuthenticated, match="token") as caught:
        daemon.client(tenant=tenant, token=token, connect=True)
    assert "rot und sehr geheim" not in str(caught.value)
    red.stats()
