"""The directory on real Redis servers that die, stop, forget, refuse, and change places."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop

from kvpool.errors import ConfigError, NotAuthenticated, Unavailable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.directory.redis import RedisDirectory, open_directory
from kvpool.placement.key_groups import TAGS, tag_of
from kvpool.placement.redis.settings import RedisSettings, parse_url
from kvpool.placement.redis.shards import READING
from tests.contract.suites.directory import NAMESPACE, key_of, keys_of, node, sweep_all
from tests.support.proxy import BOTH, Fault, Proxy
from tests.support.servers.certificates import have_openssl, make_certificates
from tests.support.servers.redis import Redis, RedisCluster, RedisSentinel
from tests.support.waiting import PATIENCE_S

DRAM, SSD = TIERS["dram"], TIERS["ssd"]
KEYS = keys_of(range(200))

Test = Callable[[RedisDirectory], Awaitable[None]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    with Redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """For tests that neither harm the server nor need it empty."""
    with Redis(tmp_path_factory.mktemp("shared")) as server:
        yield server


def with_directory(
    url: str, test: Test, *, timeout_s: float = PATIENCE_S, cluster: str = "c", **access: Any
) -> None:
    """Run a test with a directory of its own, which is closed at the end."""

    async def main() -> None:
        directory = await open_directory(
            parse_url(url, **access),
            cluster=cluster,
            timeout_s=timeout_s,
            publish_timeout_s=max(timeout_s, 5.0),
        )
        try:
            await test(directory)
        finally:
            await directory.close()

    uvloop.run(main())


async def eventually(call: Callable[[], Awaitable[Any]], what: str = "") -> Any:
    """What the call returns as soon as it does not raise `Unavailable`."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except Unavailable as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"still not {what}") from error
            await asyncio.sleep(0.01)


async def until_so(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""

    async def so() -> None:
        if not condition():
            raise Unavailable("not yet")

    await eventually(so)


async def all_marks(directory: RedisDirectory) -> Sequence[bytes | None]:
    found = await directory.marks()
    if None in found:
        raise Unavailable("some shards do not answer")
    return found


async def publish(directory: RedisDirectory, keys: list[bytes], mask: int = 1) -> None:
    await directory.publish(NAMESPACE, 8, node(1), DRAM, keys, [mask] * len(keys))


async def present(directory: RedisDirectory, keys: list[bytes]) -> list[bytes]:
    found = await directory.locate(NAMESPACE, 8, keys)
    return [key for key, entries in zip(keys, found, strict=True) if entries]


# ---- what lies in Redis -----------------------------------------------------------------------------------


def redis_name(cluster: str, key: bytes) -> bytes:
    """By the documented format, written down once more."""
    return b"{kvpool1:%b:%02d}:b" % (cluster.encode(), key[15] % 64) + NAMESPACE + key


def test_the_documented_format(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        key = key_of(7)
        await directory.publish(NAMESPACE, 12, b"INCARNAT", SSD, [key], [0xA05])
        await directory.publish(NAMESPACE, 12, b"ANOTHER!", DRAM, [key], [1])
        with redis.Redis(port=server.port) as client:
            names = set(client.scan_iter(count=1000))
            marks = {b"{kvpool1:prod:%02d}:mark" % tag for tag in range(64)}
            assert names == {redis_name("prod", key), *marks}
            value = client.get(redis_name("prod", key))
            assert value == b"\x02\x00" + b"INCARNAT\x02\x05\x0a" + b"ANOTHER!\x01\x01\x00"
            assert {client.ttl(name) for name in names} == {-1}
        await directory.publish(NAMESPACE, 12, b"INCARNAT", SSD, [key], [0])
        await directory.publish(NAMESPACE, 12, b"ANOTHER!", DRAM, [key], [0])
        assert server.command("EXISTS", redis_name("prod", key)) == 0

    with_directory(server.url, test, cluster="prod")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x01",
        b"\x01\x00",
        b"\x01\x00" + b"i" * 9,  # an entry cut short
        b"\x01\x00" + b"i" * 8 + b"\x01\x01" + b"j",
        b"\x02\x00" + b"i" * 8 + b"\x01\x01\x00",  # of a namespace with more parts
        b"\x01\x00" + b"i" * 8 + b"\x63\x01",  # no such tier
        b"\x01\x00" + b"i" * 8 + b"\x01\x00",  # no part at all
        b"\xff" * 600,
    ],
    ids=lambda value: value[:14].hex(),
)
def test_a_value_that_is_none_reads_as_a_miss_is_counted_and_mended(
    shared: Redis, value: bytes
) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS[:3])
        shared.command("SET", redis_name("broken", KEYS[1]), value)
        good = [Entry(node(1), DRAM, 1)]
        assert await directory.locate(NAMESPACE, 8, KEYS[:3]) == [good, [], good]
        assert directory.stats["corrupt"] == 1
        assert (await sweep_all(directory, [node(5)], 100))[0] == 0, "it harms no sweep"
        await publish(directory, KEYS[:3])
        assert good[0] in (await directory.locate(NAMESPACE, 8, [KEYS[1]]))[0]

    with_directory(shared.url, test, cluster="broken")
    with redis.Redis(port=shared.port) as client:
        client.delete(*client.scan_iter(b"{kvpool1:broken:*"))


def test_a_name_that_holds_something_else_is_a_miss_until_it_is_published(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        server.command("LPUSH", redis_name("c", KEYS[0]), "not", "ours")
        assert await present(directory, KEYS) == []
        await publish(directory, KEYS)
        assert await present(directory, KEYS) == KEYS

    with_directory(server.url, test)


def test_parts_disagree(shared: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        await directory.publish(NAMESPACE, 8, node(1), DRAM, KEYS[:1], [1])
        assert await directory.locate(NAMESPACE, 9, KEYS[:1]) == [[]]
        await directory.publish(NAMESPACE, 9, node(1), DRAM, KEYS[:1], [256])
        assert await directory.locate(NAMESPACE, 9, KEYS[:1]) == [[Entry(node(1), DRAM, 256)]]

    with_directory(shared.url, test, cluster="parts")


def test_several_clusters_and_strangers_share_a_redis(server: Redis) -> None:
    """Names that begin alike, and keys of others, survive a sweep and a withdrawal."""
    foreign = [b"{kvpool1:a:00}:bx", b"{kvpool1:a:00}:b" + b"y" * 33, b"session:1", b"\xff\x00"]
    foreign += [
        b"{kvpool1:a:07}:b" + NAMESPACE + bytes(15) + b"\x01"
    ]  # in a group it does not belong to

    async def test(a: RedisDirectory) -> None:
        for name in foreign:
            server.command("SET", name, b"\x01\x00" + node(1) + b"\x01\x01")
        others = [RedisDirectory(a.settings, cluster=name) for name in ("a.b", "b", "A")]
        try:
            for directory in (a, *others):
                await publish(directory, KEYS)
            assert (await sweep_all(a, [node(1)], 50))[0] == len(KEYS)
            assert await present(a, KEYS) == []
            for directory in others:
                assert await present(directory, KEYS) == KEYS
            assert all(server.command("EXISTS", name) for name in foreign)
        finally:
            for directory in others:
                await directory.close()

    with_directory(server.url, test, cluster="a")


def test_the_database_of_the_url_is_the_one_that_is_used(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        with redis.Redis(port=server.port, db=5) as client:
            assert client.dbsize() == len(KEYS) + TAGS
        assert server.command("DBSIZE") == 0

    with_directory(f"{server.url}/5", test)


@pytest.mark.parametrize("name", ["", "a}b", "a*", "a b", "a" * 65, "ä", "a\n"])
def test_names_of_clusters_that_would_break_keys(name: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="cluster"):
            RedisDirectory(parse_url("redis://127.0.0.1:1"), cluster=name)

    uvloop.run(main())


def test_a_batch_is_cut_so_that_no_script_is_long(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        keys = keys_of(range(4096))
        before = calls(server)
        await publish(directory, keys)
        await directory.locate(NAMESPACE, 8, keys)
        after = calls(server)
        assert after["eval"] - before["eval"] == 8
        # Four for the lookup, and one in each script.
        assert after["mget"] - before["mget"] == 4 + 8

    def calls(server: Redis) -> dict[str, int]:
        stats = server.info("commandstats")
        return {
            name: int(stats.get(f"cmdstat_{name}", "calls=0,").split("calls=")[1].split(",")[0])
            for name in ("eval", "mget")
        }

    with_directory(server.url, test)


# ---- one server that dies, stops, forgets -----------------------------------------------------------------


def test_killed_and_back_empty(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        before = await directory.marks()
        server.kill()
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: directory.locate(NAMESPACE, 8, KEYS),
            lambda: publish(directory, KEYS),
            directory.marks,
            lambda: directory.sweep([node(1)], b"", 100),
        ]
        began = time.monotonic()
        for _ in range(50):
            for call in calls:
                with pytest.raises(Unavailable, match=server.address):
                    await call()
                await asyncio.sleep(0.001)
        # None of the 200 waited for its time.
        assert time.monotonic() - began < PATIENCE_S
        assert directory.stats["connects"] < 100, "it is left alone for a while"
        server.start()
        assert await eventually(lambda: present(directory, KEYS)) == []
        after = await directory.marks()
        assert all(old != new for old, new in zip(before, after, strict=True))
        await publish(directory, KEYS)
        assert await present(directory, KEYS) == KEYS

    with_directory(server.url, test)


def test_a_restart_between_two_calls_is_not_noticed_by_the_caller(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        server.restart()
        assert await present(directory, KEYS) == []
        await publish(directory, KEYS)
        assert directory.stats["failures"] == 0

    with_directory(server.url, test)


def test_away_at_the_start(tmp_path: Path) -> None:
    server = Redis(tmp_path / "redis")
    server.start()
    server.kill()

    async def test(directory: RedisDirectory) -> None:
        with pytest.raises(Unavailable):
            await present(directory, KEYS)
        server.start()
        await eventually(lambda: publish(directory, KEYS))
        assert await present(directory, KEYS) == KEYS

    try:
        with_directory(server.url, test)
    finally:
        server.close()


def test_stopped_it_costs_each_call_its_time_at_most_and_later_ones_nothing(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        await eventually(lambda: publish(directory, KEYS))
        server.pause()
        began = time.monotonic()
        waiting = [asyncio.ensure_future(present(directory, KEYS)) for _ in range(20)]
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in done] == [Unavailable] * 20
        for _ in range(200):  # 400 s, if each waited
            with pytest.raises(Unavailable):
                await directory.locate(NAMESPACE, 8, KEYS)
        assert time.monotonic() - began < PATIENCE_S
        server.resume()
        assert await eventually(lambda: present(directory, KEYS)) == KEYS

    with_directory(server.url, test, timeout_s=2.0)


def test_lookups_given_up_while_it_is_stopped_disturb_no_later_answer(server: Redis) -> None:
    """What it answers after all is for those who left, and nobody else gets it."""

    async def test(directory: RedisDirectory) -> None:
        masks = list(range(1, 201))
        await directory.publish(NAMESPACE, 8, node(1), DRAM, KEYS, masks)
        connects = directory.stats["connects"]
        server.pause()
        for at in range(0, 200, 10):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(directory.locate(NAMESPACE, 8, KEYS[at : at + 10]), 0.005)
        server.resume()
        for at in range(0, 200, 7):
            found = await directory.locate(NAMESPACE, 8, KEYS[at : at + 7])
            assert [entries[0].mask for entries in found] == masks[at : at + 7]
        assert directory.stats["connects"] == connects, "no connection was lost with them"

    with_directory(server.url, test)


def test_lookups_given_up_do_not_hide_that_it_has_stopped(server: Redis) -> None:
    """Callers with less patience than ours: the connection is found dead all the same."""

    async def test(directory: RedisDirectory) -> None:
        await eventually(lambda: publish(directory, KEYS))
        failures = directory.stats["failures"]
        server.pause()
        deadline = time.monotonic() + PATIENCE_S
        while directory.stats["failures"] == failures:
            assert time.monotonic() < deadline
            task = asyncio.ensure_future(present(directory, KEYS))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        server.resume()
        assert await eventually(lambda: present(directory, KEYS)) == KEYS

    with_directory(server.url, test, timeout_s=0.5)


def test_any_number_of_calls_shares_two_connections(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        calls = [present(directory, KEYS) for _ in range(200)]
        await asyncio.gather(*calls, *[publish(directory, KEYS) for _ in range(50)])
        clients = server.command("CLIENT", "LIST").decode().splitlines()
        assert len(clients) == 2 + 1  # and whoever asks
        assert directory.stats["connects"] == 2

    with_directory(server.url, test)


def test_flushed(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        before = await directory.marks()
        server.flush()
        after = await directory.marks()
        assert all(old != new for old, new in zip(before, after, strict=True))
        assert await present(directory, KEYS) == []

    with_directory(server.url, test)


def test_restored_from_an_old_file_the_marks_change(tmp_path: Path) -> None:
    """The file has the marks, but not what was published after it was written."""

    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS[:100])
        before = await directory.marks()
        ours.command("SAVE")
        await publish(directory, KEYS[100:])
        ours.restart()
        after = await eventually(directory.marks)
        assert await present(directory, KEYS) == KEYS[:100]
        assert all(old != new for old, new in zip(before, after, strict=True))

    with Redis(tmp_path / "redis") as ours:
        with_directory(ours.url, test)


def test_out_of_memory_it_takes_nothing_and_still_answers(server: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        server.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(Unavailable, match="OOM"):
            await publish(directory, KEYS, 2)
        assert await present(directory, KEYS) == KEYS
        server.command("CONFIG", "SET", "maxmemory", "0")
        await publish(directory, KEYS, 2)

    with_directory(server.url, test)


# ---- who may come in --------------------------------------------------------------------------------------


def opened(settings: RedisSettings) -> None:
    """Open a directory there, and close it."""

    async def main() -> None:
        directory = await open_directory(settings, cluster="c", timeout_s=PATIENCE_S)
        await directory.close()

    uvloop.run(main())


def test_passwords_and_users(tmp_path: Path) -> None:
    with Redis(tmp_path / "redis", password="hunter2") as server:
        rules = ("on", ">pw", "~{kvpool1:c:*", "resetchannels", "-@all")
        needed = ["+info", "+mget", "+set", "+mset", "+del", "+eval", "+scan"]
        server.command("ACL", "SETUSER", "kvpool", *rules, *needed)
        server.command("ACL", "SETUSER", "weak", *rules, "+info", "+mget", "+set")
        opened(parse_url(server.url, password="hunter2"))
        opened(parse_url(f"redis://kvpool:pw@{server.address}"))
        for url, password in (
            (server.url, ""),
            (server.url, "wrong-one"),
            (f"redis://kvpool:wrong-one@{server.address}", ""),
            (f"redis://nobody:wrong-one@{server.address}", ""),
        ):
            with pytest.raises(NotAuthenticated) as caught:
                opened(parse_url(url, password=password))
            assert "wrong-one" not in str(caught.value)
            assert server.address in str(caught.value)
        with pytest.raises(ConfigError, match="eval"):
            opened(parse_url(f"redis://weak:pw@{server.address}"))


def test_a_password_for_a_server_without_one(shared: Redis) -> None:
    with pytest.raises(NotAuthenticated, match="without any password configured"):
        opened(parse_url(shared.url, password="x"))


def test_a_password_that_changes_under_way(tmp_path: Path) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        ours.command("CONFIG", "SET", "requirepass", "other")
        ours.password = "other"
        ours.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def refused() -> None:
            with pytest.raises(Unavailable):
                await present(directory, KEYS)

        await refused()
        ours.command("CONFIG", "SET", "requirepass", "first")
        ours.password = "first"
        assert await eventually(lambda: present(directory, KEYS)) == KEYS

    with Redis(tmp_path / "redis", password="first") as ours:
        with_directory(ours.url, test, password="first")


def test_what_the_url_says_is_not_what_is_there(shared: Redis) -> None:
    for form in ("redis+cluster://{}", "redis+sentinel://{}/main"):
        with pytest.raises(ConfigError, match=shared.address):
            opened(parse_url(form.format(shared.address)))


def test_a_replica_is_no_directory(tmp_path: Path, shared: Redis) -> None:
    async def test(directory: RedisDirectory) -> None:
        with pytest.raises(Unavailable, match="replica"):
            await present(directory, KEYS)
        replica.command("REPLICAOF", "NO", "ONE")
        await eventually(directory.marks)

    with Redis(tmp_path / "replica", options=[f"replicaof 127.0.0.1 {shared.port}"]) as replica:
        with_directory(replica.url, test)


@pytest.mark.skipif(not have_openssl(), reason="certificates are made with openssl")
def test_tls(tmp_path: Path) -> None:
    ours, theirs = (make_certificates(tmp_path / name) for name in ("ours", "theirs"))

    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        assert await present(directory, KEYS) == KEYS

    with Redis(tmp_path / "redis", tls=ours, client_auth=True, password="pw") as server:
        shown = {"tls_cert": str(ours.client_cert), "tls_key": str(ours.client_key)}
        right = {"tls_ca": str(ours.ca), "password": "pw", **shown}
        with_directory(server.url, test, **right)
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            opened(parse_url(server.url, **(right | {"tls_ca": str(theirs.ca)})))
        named = server.url.replace("127.0.0.1", "127.1")  # the same, but not in the certificate
        with pytest.raises(ConfigError, match=r"127\.1"):
            opened(parse_url(named, **right))
        opened(parse_url(named, tls_check_hostname=False, **right))

        async def plain(directory: RedisDirectory) -> None:
            with pytest.raises(Unavailable):
                await directory.marks()

        with_directory(f"redis://{server.address}", plain, password="pw")


# ---- sentinels --------------------------------------------------------------------------------------------


def test_a_failover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The primary is killed: another one takes its place, and all who published hear of it."""

    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        assert "away" not in caplog.text, "the silent sentinel used up the time"
        before = await directory.marks()
        primary = servers.primary
        primary.kill()
        after = await eventually(directory.marks, "failed over")
        assert servers.primary is not primary
        assert all(old != new for old, new in zip(before, after, strict=True))
        await publish(directory, KEYS)
        assert await present(directory, KEYS) == KEYS
        # The old one comes back, and is made a replica: nothing is asked of it.
        primary.start()
        await publish(directory, KEYS, 2)
        assert (await directory.locate(NAMESPACE, 8, KEYS))[0] == [Entry(node(1), DRAM, 2)]

    with RedisSentinel(tmp_path, sentinels=3, password="pw", sentinel_password="spw") as servers:
        servers.sentinels[0].pause()  # the first one that is asked does not answer
        with_directory(servers.url, test, timeout_s=5.0, password="pw", sentinel_password="spw")
        servers.sentinels[0].resume()


def test_sentinels_that_know_nothing_of_it(tmp_path: Path) -> None:
    with RedisSentinel(tmp_path) as servers:
        with pytest.raises(ConfigError, match="'other'"):
            opened(parse_url(servers.url.replace("/kvpool", "/other")))

        async def test(directory: RedisDirectory) -> None:
            await publish(directory, KEYS)
            servers.sentinels[0].kill()
            for _ in range(20):  # the sentinels are only asked when something is wrong
                assert await present(directory, KEYS) == KEYS

        with_directory(servers.url, test)


@pytest.mark.parametrize("refuses", [False, True])
def test_who_waits_for_a_server_that_has_lost_its_place_is_answered_by_the_next(
    tmp_path: Path, refuses: bool
) -> None:
    """At a failover: what is asked after the old primary has cut all, until somebody has heard of the new one."""

    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        await eventually(lambda: in_step(KEYS), "in step")
        (sentinel,) = servers.sentinels
        old, new = servers.primary, next(s for s in servers.servers if s is not servers.primary)
        old.command("REPLICAOF", "127.0.0.1", new.announced_port)
        new.command("REPLICAOF", "NO", "ONE")
        sentinel.command("SENTINEL", "REMOVE", servers.service)
        sentinel.command("SENTINEL", "MONITOR", servers.service, "127.0.0.1", new.announced_port, 1)
        shards = directory._shards
        (server,) = await shards.servers(asyncio.get_running_loop().time() + PATIENCE_S)
        for one in (old, sentinel):
            proxies[one.port].set(Fault(hold=BOTH))
        proxies[old.port].cut()
        await until_so(lambda: server._connections[READING].error is not None)

        def renewing() -> bool:  # as the first one does whose connection was cut
            shards.doubt()
            return shards._renewal is not None

        await until_so(renewing)
        asked = [asyncio.ensure_future(present(directory, KEYS))]
        await until_so(lambda: server._connecting[READING] is not None)
        if refuses:  # as a replica, which is remembered for a moment
            proxies[old.port].set()
            await until_so(lambda: server._backoff.failures > 0)
            asked.append(asyncio.ensure_future(present(directory, KEYS)))
            await asyncio.sleep(0)
        proxies[sentinel.port].set()
        assert await asyncio.gather(*asked) == [KEYS] * len(asked)

    async def in_step(keys: list[bytes]) -> None:
        replica = next(s for s in servers.servers if s is not servers.primary)
        if replica.command("DBSIZE") < len(keys):
            raise Unavailable("it is behind")

    proxies: dict[int, Proxy] = {}
    with contextlib.ExitStack() as stack:

        def proxied(port: int) -> int:
            proxies[port] = stack.enter_context(Proxy(("127.0.0.1", port)))
            return proxies[port].address[1]

        servers = stack.enter_context(
            RedisSentinel(tmp_path, down_after_ms=120_000, announced=proxied)
        )
        with_directory(servers.url, test)


# ---- a cluster --------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path) as cluster:
        yield cluster


def test_groups_are_spread_and_each_is_whole(cluster: RedisCluster) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        seen: dict[int, set[int]] = {}
        for number, shard in enumerate(cluster.shards):
            for name in shard.command("KEYS", "*"):
                tag = int(name.partition(b"}")[0][-2:])
                seen.setdefault(tag, set()).add(number)
                if not name.endswith(b":mark"):
                    assert tag == tag_of(name[-16:])
        assert all(len(shards) == 1 for shards in seen.values()), "a group is in one shard"
        assert len(seen) == TAGS
        assert {next(iter(shards)) for shards in seen.values()} == {0, 1, 2}

    with_directory(cluster.url, test)


def test_a_dead_shard_takes_only_its_own_keys_along(cluster: RedisCluster) -> None:
    async def test(directory: RedisDirectory) -> None:
        keys = keys_of(range(1000))
        await publish(directory, keys)
        before = await directory.marks()
        dead = cluster.shards[1]
        lost = {key for key in keys if cluster.owner(redis_name("c", key)) is dead}
        assert 100 < len(lost) < 900
        dead.kill()
        for _ in range(10):
            assert set(await present(directory, keys)) == set(keys) - lost
        assert directory.stats["partial"] == 10
        with pytest.raises(Unavailable, match=dead.address):
            await publish(directory, keys, 7)
        alive = [key for key in keys if key not in lost]
        found = await directory.locate(NAMESPACE, 8, alive)
        assert found == [[Entry(node(1), DRAM, 7)]] * len(alive), "the others had their part"
        seen = await directory.marks()
        silent = {tag for tag, mark in enumerate(seen) if mark is None}
        assert {tag_of(key) for key in lost} <= silent
        assert all(seen[tag] == before[tag] for tag in range(TAGS) if tag not in silent)
        with pytest.raises(Unavailable):
            await directory.locate(NAMESPACE, 8, list(lost))
        dead.start()
        after = await eventually(lambda: all_marks(directory), "back")
        changed = {tag for tag in range(TAGS) if before[tag] != after[tag]}
        assert {tag_of(key) for key in lost} <= changed
        assert not changed & {tag_of(key) for key in alive}
        await eventually(lambda: publish(directory, keys))
        assert await present(directory, keys) == keys

    with_directory(cluster.url, test)


def test_slots_that_move_are_followed(cluster: RedisCluster) -> None:
    async def test(directory: RedisDirectory) -> None:
        await publish(directory, KEYS)
        cluster.flush()
        first, second, _ = cluster.shards
        names = [f"{{kvpool1:c:{tag:02d}}}" for tag in range(TAGS)]
        moved = [name for name in names if cluster.owner(name) is first]
        slots = [first.command("CLUSTER", "KEYSLOT", name) for name in moved]
        assert 5 < len(moved) < TAGS
        cluster.move(slots, second)
        await eventually(lambda: all_marks(directory))
        await publish(directory, KEYS)
        assert await present(directory, KEYS) == KEYS
        assert first.command("DBSIZE") == 0
        assert directory.stats["renewals"] >= 2

    with_directory(cluster.url, test)


def test_one_node_in_the_url_is_enough_and_the_others_are_asked_later(
    cluster: RedisCluster,
) -> None:
    async def test(directory: RedisDirectory) -> None:
        first, second, third = cluster.shards
        await publish(directory, KEYS)
        names = [f"{{kvpool1:c:{tag:02d}}}" for tag in range(TAGS)]
        moved = [name for name in names if cluster.owner(name) is second]
        alive = [k for k in KEYS if cluster.owner(redis_name("c", k)) is not first]
        slots = [first.command("CLUSTER", "KEYSLOT", name) for name in moved]
        first.kill()  # the only one that the URL names
        second.flush()
        cluster.move(slots, third)
        await eventually(lambda: publish(directory, alive))
        assert await present(directory, alive) == alive
        assert second.command("DBSIZE") == 0

    with_directory(f"redis+cluster://127.0.0.1:1,{cluster.shards[0].address}", test)


def test_a_cluster_needs_a_cluster_url(cluster: RedisCluster) -> None:
    with pytest.raises(ConfigError, match=r"redis\+cluster"):
        opened(parse_url(cluster.shards[0].url))
