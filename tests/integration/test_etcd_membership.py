"""Membership on real etcd servers that die, fill up, forget and lie; and nodes that stop and clash.

What all memberships have in common is in tests/contract/test_membership_etcd.py.
"""

import asyncio
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from kvpool.errors import ConfigError, Unavailable
from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.membership.admission import GENERATIONS_APART
from kvpool.placement.membership.base import Standing
from kvpool.placement.membership.etcd import EtcdMembership
from kvpool.placement.records import ClusterConfig, NamespaceClock, TierRecord, encode_record
from tests.contract.suites.membership import entry, record, standing, until
from tests.support import waiting
from tests.support.servers.etcd import Etcd
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S

TTL_S = 4.0  # the shortest that a busy machine keeps up
LONG_TTL_S = 60.0  # where no lease is to end
MEMBER = Path(__file__).with_name("etcd_member.py")
_names = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def cluster() -> str:
    return f"m{next(_names)}"


class Members:
    """Started members of one cluster, closed at the end of an `async with`."""

    def __init__(self, url: str, cluster: str, **settings: Any) -> None:
        self._url = url
        self._cluster = cluster
        self._settings = settings
        self._made: list[EtcdMembership] = []

    async def __aenter__(self) -> "Members":  # noqa: PYI034 - a test's helper
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*[member.close() for member in self._made])

    async def start(self, url: str = "", **changes: Any) -> EtcdMembership:
        settings = EtcdSettings.from_url(
            url or self._url,
            password=changes.pop("password", ""),
            call_s=changes.pop("call_s", 10.0),
        )
        given = {"protocol": 1, "ttl_s": TTL_S, **self._settings, **changes}
        member = EtcdMembership(settings, self._cluster, **given)
        self._made.append(member)
        await member.start()
        return member


class Process:
    """`etcd_member.py`, running."""

    def __init__(self, etcd: Etcd, cluster: str, node: str, port: int) -> None:
        arguments = [etcd.url, cluster, node, str(port), str(TTL_S)]
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._text = b""

    def said(self) -> list[str]:
        """All it has said so far, without the times."""
        assert self.process.stdout is not None
        self._text += self.process.stdout.read() or b""
        whole = self._text.rpartition(b"\n")[0].decode()
        return [line.split(" ", 1)[1] for line in whole.splitlines()]

    def close(self) -> bytes:
        """Kill it; what it has written to stderr."""
        self.process.kill()
        errors = self.process.communicate()[1]
        return bytes(errors)


@pytest.fixture
def process(etcd: Etcd, cluster: str) -> Iterator[Process]:
    started = Process(etcd, cluster, "p", 1111)
    yield started
    started.close()


class Proxy:
    """A TCP forwarder in front of one etcd, that can be cut while others still reach it."""

    def __init__(self, etcd: Etcd) -> None:
        self._target = etcd.members[0].client_port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False

    async def __aenter__(self) -> "Proxy":  # noqa: PYI034 - a test's helper
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"etcd://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def mend(self) -> None:
        self._is_cut = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, other_writer]
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.ensure_future(_pump(source, sink))
            self._tasks.add(task)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    sink.close()


def rejoin(
    member: EtcdMembership,
    node: str,
    tasks: list[asyncio.Task[None]],
    ready: Callable[[], bool],
) -> None:
    """As the daemon does: join as a new incarnation whenever the lease is lost; here, when `ready`."""

    async def again() -> None:
        await until(ready)
        while standing(member) is Standing.LOST:
            try:
                await member.join(record(node))
            except Unavailable:
                await asyncio.sleep(0.1)

    member.on_lost(lambda: tasks.append(asyncio.ensure_future(again())))


# ---- who may come in ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"protocol_min": 2}, "protocol 2 or newer, this node supports 1: upgrade"),
        ({"format": 99}, "format 99.*supports 1: install"),
        ({"cluster": "other"}, "'other'.*--cluster"),
        ({"secret_proof": "0" * 64}, "secret"),
        (b"\xff no json", "cannot be read"),
        (b'{"cluster": 7}', "cannot be read"),
    ],
    ids=["protocol", "format", "cluster", "secret", "garbage", "types"],
)
def test_nodes_that_do_not_fit_are_refused_at_the_start(
    etcd: Etcd, cluster: str, config: Any, match: str
) -> None:
    async def main() -> None:
        async with Members(etcd.url, cluster) as members:
            first = await members.start()
            right = first.view.config
            assert right is not None
            wrong = config
            if isinstance(config, dict):
                wrong = encode_record(msgspec.structs.replace(right, **config))
            etcd.put(f"/kvpool/{cluster}/config", wrong)
            with pytest.raises(ConfigError, match=match):
                await members.start()
            etcd.put(f"/kvpool/{cluster}/config", encode_record(right))
            await members.start()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "a/b", "a\n"])
def test_names_that_would_leave_their_place_in_etcd(etcd: Etcd, cluster: str, name: str) -> None:
    settings = EtcdSettings.from_url(etcd.url)
    with pytest.raises(ConfigError, match="not a valid name of a cluster"):
        EtcdMembership(settings, name)

    async def main() -> None:
        async with Members(etcd.url, cluster) as members:
            member = await members.start()
            with pytest.raises(ConfigError, match="not a valid name of a node"):
                await member.join(record(name, 1111))
            with pytest.raises(ConfigError, match="not a valid name of a node"):
                await member.set_drain(name, wanted=True)

    asyncio.run(main())


def test_the_stored_proof_is_an_hmac(etcd: Etcd, cluster: str) -> None:
    import hashlib
    import hmac

    async def main() -> None:
        async with Members(etcd.url, cluster, secrets=lambda: (b"s3cret",)) as members:
            await members.start()
        stored = msgspec.json.decode(etcd.get(f"/kvpool/{cluster}/config") or b"")
        text = f"kvpool cluster {cluster}".encode()
        assert stored["secret_proof"] == hmac.new(b"s3cret", text, hashlib.sha256).hexdigest()
        assert stored["cluster"] == cluster

    asyncio.run(main())


def test_a_dead_owners_lease_is_waited_for(etcd: Etcd, cluster: str, process: Process) -> None:
    """The owner of the name was killed, its address is another: join comes back when the lease ends."""

    async def main() -> None:
        async with Members(etcd.url, cluster, ttl_s=LONG_TTL_S) as members:
            member = await members.start()
            await until(lambda: "p" in member.view.nodes, "the process joins")
            old = member.view.nodes["p"]
            process.process.send_signal(signal.SIGKILL)
            await member.join(new := record("p", 2222))
            assert member.view.nodes == {"p": new}
            assert etcd.keys(f"/kvpool/{cluster}/incarnations/") == [
                f"/kvpool/{cluster}/incarnations/{new.incarnation}"
            ]
            assert old.incarnation != new.incarnation

    asyncio.run(main())


def test_a_name_that_is_taken_over_while_its_owner_is_still_joining(
    etcd: Etcd, cluster: str
) -> None:
    """The owner's answer comes later than what the watch tells of the other one."""

    async def main() -> None:
        async with Members(etcd.url, cluster, ttl_s=60.0) as members:
            late, other = await members.start(), await members.start()
            written, go, lost = asyncio.Event(), asyncio.Event(), asyncio.Event()
            late.on_lost(lost.set)
            client = late._client
            txn = client.txn

            async def slow(*arguments: Any) -> Any:
                answer = await txn(*arguments)
                written.set()
                await go.wait()
                return answer

            client.txn = slow  # type: ignore[assignment]
            joining = asyncio.create_task(late.join(record("p", 1111)))
            await written.wait()
            await other.join(new := record("p", 1111))
            await until(lambda: late.view.nodes == {"p": new}, "it hears of the other one")
            go.set()
            await joining
            assert lost.is_set()
            assert standing(late) is Standing.LOST
            assert standing(other) is Standing.MEMBER
            client.txn = txn

    asyncio.run(main())


def test_a_killed_nodes_address_is_taken_over_at_once(
    etcd: Etcd, cluster: str, process: Process
) -> None:
    async def main() -> None:
        async with Members(etcd.url, cluster, ttl_s=60.0) as members:
            member = await members.start()
            await until(lambda: "p" in member.view.nodes, "the process joins")
            send(process.process.pid, signal.SIGSTOP)  # holds the lease; and is not the holder
            await member.join(new := record("p", 1111))
            assert member.view.nodes == {"p": new}
            assert len(etcd.keys(f"/kvpool/{cluster}/incarnations/")) == 1
            process.process.send_signal(signal.SIGCONT)
            await until(lambda: "lost" in process.said(), "the old one learns of it")
            process.process.kill()

    asyncio.run(main())


# ---- what is in etcd ------------------------------------------------------------------------------------


def test_garbage_is_ignored_counted_and_said_once(
    etcd: Etcd, cluster: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = f"/kvpool/{cluster}/"
    stray = encode_record(record("elsewhere"))
    garbage = {
        "nodes/bin": b"\x00\xff\xfe",
        "nodes/empty": b"",
        "nodes/list": b"[1, 2]",
        "nodes/types": b'{"node": "types", "incarnation": 5}',
        "nodes/incarnation": b'{"node": "incarnation", "incarnation": "../../x"}',
        "nodes/stray": stray,
        "nodes/large": encode_record(record("large", labels={"x": "y" * (300 << 10)})),
        "namespaces/t/00": b"{}",
        "namespaces/t/11": encode_record(entry("22" * 16)),
        "namespaces/odd": encode_record(entry()),
        "namespaces/t/no hex": encode_record(entry("no hex")),
        "namespaces/t/" + "33" * 16: encode_record(entry("33" * 16, epoch=-1)),
        "nodes/deep": b'{"node":"deep","x":' + b"[" * 99_999 + b"]" * 99_999 + b"}",
    }
    ignored = {"something/else": b"\xff", "x": b"", "incarnations/": b"\xff"}

    async def main() -> None:
        async with Members(etcd.url, cluster) as members:
            for key, value in {**garbage, **ignored}.items():
                etcd.put(root + key, value)
            late = await members.start(ttl_s=LONG_TTL_S)
            assert dict(late.view.nodes) == {}
            assert dict(late.view.namespaces) == {}
            assert late.stats()["undecodable"] == len(garbage)

            await late.join(good := record("good"))
            for key, value in garbage.items():
                etcd.put(root + key, value)
            etcd.put(f"{root}nodes/good2", encode_record(second := record("good2")))
            await until(lambda: late.view.nodes == {"good": good, "good2": second})
            assert late.stats()["undecodable"] == 2 * len(garbage)
            with pytest.raises(Unavailable, match="delete it"):
                await late.register(entry("00"))
            with pytest.raises(ConfigError, match=r"'bin'.*cannot be read"):
                await (await members.start()).join(record("bin"))

    with caplog.at_level(logging.WARNING, "kvpool.placement"):
        asyncio.run(main())
    said = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
    assert len(said) == 2 * len(garbage), "once for each key, by each of the two members"


def test_fields_of_later_versions_are_ignored(etcd: Etcd, cluster: str) -> None:
    async def main() -> None:
        async with Members(etcd.url, cluster) as members:
            member = await members.start()
            made = record("new")
            later = {**msgspec.to_builtins(made), "colour": "blue", "tiers": [{"name": "hbm"}]}
            etcd.put(f"/kvpool/{cluster}/nodes/new", msgspec.json.encode(later))
            await until(lambda: "new" in member.view.nodes)
            expected = msgspec.structs.replace(made, tiers=(TierRecord("hbm"),))
            assert member.view.nodes["new"] == expected

    asyncio.run(main())


def test_a_record_that_somebody_deletes_is_a_lease_lost(etcd: Etcd, cluster: str) -> None:
    async def main() -> None:
        async with Members(etcd.url, cluster, ttl_s=60.0) as members:
            member = await members.start()
            lost: list[bool] = []
            member.on_lost(lambda: lost.append(True))
            await member.join(record("a"))
            assert etcd.delete(f"/kvpool/{cluster}/nodes/a") == 1
            await until(lambda: lost)
            assert standing(member) is Standing.LOST
            await member.join(second := record("a"))
            assert member.view.nodes == {"a": second}
            assert lost == [True]

    asyncio.run(main())


def test_use_of_tiers_costs_few_writes(etcd: Etcd, cluster: str) -> None:
    """Every write stays in etcd's history, so use that goes up and down by little is not written."""

    async def main() -> None:
        async with Members(etcd.url, cluster, ttl_s=LONG_TTL_S) as members:
            member = await members.start()
            made = record("a")
            await member.join(made)
            before = etcd.revision()
            for used in range(100):
                tiers = (TierRecord("dram", 1 << 30, used << 10),)
                made = msgspec.structs.replace(made, tiers=tiers)
                await member.update(made)
            assert etcd.revision() <= before + 1
            await member.update(msgspec.structs.replace(made, version="2"))
            stored = msgspec.json.decode(etcd.get(f"/kvpool/{cluster}/nodes/a") or b"")
            assert stored["version"] == "2"
            assert stored["tiers"][0]["used_bytes"] == 99 << 10, "other changes take it along"

    asyncio.run(main())


def test_changes_that_come_fast_are_told_together(etcd: Etcd, cluster: str) -> None:
    """However many there are, a node looks at them ten times a second; the last one is not lost."""

    async def main() -> None:
        async with Members(etcd.url, cluster, ttl_s=LONG_TTL_S) as members:
            member = await members.start()
            looks: list[int] = []
            member.watch(lambda: looks.append(len(member.view.nodes)))
            for number in range(300):
                made = encode_record(record(f"n{number}"))
                await asyncio.to_thread(etcd.put, f"/kvpool/{cluster}/nodes/n{number}", made)
                # Its own changes are in the view at once, whatever waits to be told.
                if number == 150:
                    await member.join(own := record("own"))
                    assert member.view.nodes["own"] == own
                    assert looks[-1] == len(member.view.nodes)
            await until(lambda: len(member.view.nodes) == 301)
            assert looks[-1] == 301
            assert looks == sorted(set(looks)), "nobody is told of a view twice"

    asyncio.run(main())


def fill(etcd: Etcd) -> None:
    for _ in range(100):
        etcd.put("/filler", bytes(1 << 20))


def test_a_full_database(tmp_path: Path) -> None:
    async def main(etcd: Etcd) -> None:
        async with Members(etcd.url, "c") as members:
            a, b, c = await members.start(), await members.start(), await members.start()
            await a.join(first := record("a"))
            await a.register(entry())
            with pytest.raises(Unavailable, match="database space exceeded"):
                fill(etcd)
            with pytest.raises(Unavailable, match=r"full.*etcdctl compact.*alarm disarm"):
                await b.join(second := record("b"))
            with pytest.raises(Unavailable, match="database is full"):
                await a.update(msgspec.structs.replace(first, version="2"))
            # Leases are renewed all the same: a member lives on for many times its lease.
            until_s = time.monotonic() + 3 * TTL_S
            while time.monotonic() < until_s:
                assert standing(a) is Standing.MEMBER
                assert set(c.view.nodes) == {"a"}
                await asyncio.sleep(0.05)

            etcd.compact()
            etcd.disarm()
            await b.join(second := record("b"))
            await until(lambda: c.view.nodes.get("b") == second)
            await until(lambda: c.view.nodes["a"].version == "2")  # what was held back

    with Etcd(tmp_path, quota_bytes=8 << 20) as etcd:
        asyncio.run(main(etcd))


# ---- etcd is away, and comes back otherwise --------------------------------------------------------------


def test_authentication_that_is_switched_on_while_a_node_is_a_member(tmp_path: Path) -> None:
    """What etcd refuses is as if it did not answer, until it does; nothing else is refused with it."""

    async def main() -> None:
        with Etcd(tmp_path) as etcd:
            async with Members(etcd.url, "m", ttl_s=LONG_TTL_S) as members:
                member = await members.start()
                made = record("a")
                await member.join(made)
                await asyncio.to_thread(etcd.enable_auth, "kv", "secret", "/kvpool/")
                changed = msgspec.structs.replace(made, version="2")
                with pytest.raises(Unavailable, match="authentication on; give a user"):
                    await member.update(changed)
                with pytest.raises(Unavailable, match="give a user"):
                    await member.register(entry())
                with pytest.raises(Unavailable, match="give a user"):
                    await member.set_drain("a", wanted=True)
                assert standing(member) in {Standing.MEMBER, Standing.AWAY}
                assert member.view.nodes == {"a": made}
                assert "give a user" in member.outage.error
                assert member.outage.failures >= 3
                await member.leave()
                with pytest.raises(Unavailable, match="give a user"):
                    await member.join(made)

                token = etcd.post("auth/authenticate", {"name": "root", "password": "secret"})
                etcd.post("auth/disable", {}, token=token["token"])
                await member.join(changed)
                await member.register(entry())
                await until(lambda: member.outage.error == "")
                assert member.view.nodes == {"a": changed}

    asyncio.run(main())


def test_a_role_that_is_revoked_while_a_node_is_a_member(tmp_path: Path) -> None:
    async def main() -> None:
        with Etcd(tmp_path) as etcd:
            etcd.enable_auth("kv", "secret", "/kvpool/")
            token = etcd.post("auth/authenticate", {"name": "root", "password": "secret"})["token"]
            async with Members(etcd.url.replace("://", "://kv@"), "m", ttl_s=LONG_TTL_S) as members:
                member = await members.start(password="secret")
                made = record("a")
                await member.join(made)
                etcd.post("auth/user/revoke", {"name": "kv", "role": "kv"}, token=token)
                changed = msgspec.structs.replace(made, version="2")
                with pytest.raises(Unavailable, match="grant its role readwrite"):
                    await member.update(changed)
                with pytest.raises(Unavailable, match="grant its role readwrite"):
                    await member.register(entry())
                assert "grant its role" in member.outage.error
                assert standing(member) in {Standing.MEMBER, Standing.AWAY}

                token = etcd.post("auth/authenticate", {"name": "root", "password": "secret"})[
                    "token"
                ]
                etcd.post("auth/user/grant", {"user": "kv", "role": "kv"}, token=token)
                await member.update(changed)
                assert member.view.nodes == {"a": changed}
                await until(lambda: member.outage.error == "")

    asyncio.run(main())


def test_a_node_cut_off_from_etcd_alone(etcd: Etcd, cluster: str) -> None:
    """Its lease ends, the others drop it at once; it goes on with its view, and comes back as new."""

    async def main() -> None:
        async with Proxy(etcd) as proxy, Members(etcd.url, cluster) as members:
            a = await members.start(proxy.url)
            b = await members.start(ttl_s=LONG_TTL_S)
            lost: list[Standing] = []
            a.on_lost(lambda: lost.append(standing(a)))
            await a.join(record("a"))
            await b.join(record("b"))
            await until(lambda: set(a.view.nodes) == set(b.view.nodes) == {"a", "b"})
            proxy.cut()
            await until(lambda: set(b.view.nodes) == {"b"})
            await until(lambda: standing(a) is Standing.AWAY)
            assert set(a.view.nodes) == {"a", "b"}
            assert lost == []
            await b.set_drain("b", wanted=True)
            proxy.mend()
            await until(lambda: lost)
            await a.join(second := record("a"))
            await until(lambda: b.view.nodes.get("a") == second)
            await until(lambda: a.view.drains == {"b"})

    asyncio.run(main())


def test_no_standing_but_away_between_member_and_return(etcd: Etcd, cluster: str) -> None:
    """While etcd is away, a process that runs is never unsure: serving peers does not pause."""

    async def main() -> None:
        async with Proxy(etcd) as proxy, Members(etcd.url, cluster, ttl_s=6.0) as members:
            member = await members.start(proxy.url)
            await member.join(record("a"))
            proxy.cut()
            seen = [standing(member)]
            until_s = time.monotonic() + 14.0
            last = time.monotonic()
            while time.monotonic() < until_s:
                await asyncio.sleep(0.005)
                if time.monotonic() - last > 2.0:
                    pytest.skip("this process was stopped for two seconds: the machine is too busy")
                last = time.monotonic()
                if (now := standing(member)) is not seen[-1]:
                    seen.append(now)
            assert seen == [Standing.MEMBER, Standing.AWAY]
            proxy.mend()

    asyncio.run(main())


@pytest.mark.slow
def test_an_etcd_that_lost_all_its_data(tmp_path: Path) -> None:
    """Its leases are gone with it: all nodes come back as new incarnations, and no view goes empty.

    Epochs come back from what the nodes remember: old blocks stay misses.
    """

    async def main(etcd: Etcd) -> None:
        async with Members(etcd.url, "c") as members:
            nodes = {name: await members.start() for name in "abc"}
            views: list[set[str]] = []
            tasks: list[asyncio.Task[None]] = []
            for name, member in nodes.items():
                # The worst case: all have seen that nobody is there, before anybody comes back.
                rejoin(
                    member,
                    name,
                    tasks,
                    lambda: all(m.stats()["resets"] > 1 for m in nodes.values()),
                )
                await member.join(record(name))
            a, b = nodes["a"], nodes["b"]
            await a.register(entry())
            bumped = await a.bump_epoch("t", entry().digest, 0, fence=True)
            deleted = entry("22" * 16, epoch=2)
            await a.register(deleted)
            assert await a.delete_unused("t", deleted.digest, 0)
            clock = NamespaceClock(0, 3, GENERATIONS_APART)
            await until(lambda: all(m.view.clock == clock for m in nodes.values()))
            await until(lambda: all(set(m.view.nodes) == set("abc") for m in nodes.values()))
            await until(lambda: b.view.namespaces.get(("t", entry().digest)) == bumped)
            before = {m.view.nodes[name].incarnation for name, m in nodes.items()}
            for member in nodes.values():
                member.watch(lambda m=member: views.append(set(m.view.nodes)))

            server = etcd.members[0]
            server.kill()
            await until(lambda: all(standing(m) is Standing.AWAY for m in nodes.values()))
            shutil.rmtree(server.folder / server.name)
            await asyncio.to_thread(etcd.restart, 0)

            def seen(member: EtcdMembership) -> dict[str, str]:
                return {record.node: record.incarnation for record in member.view.nodes.values()}

            def all_have_come_back() -> bool:
                # A record is seen a moment before its node hears that it was written.
                found = [seen(member) for member in nodes.values()]
                return (
                    all(one == found[0] for one in found)
                    and before.isdisjoint(found[0].values())
                    and all(standing(member) is Standing.MEMBER for member in nodes.values())
                )

            await until(all_have_come_back)
            assert all(view == set("abc") for view in views), "no view ever lacked a node"
            await until(
                lambda: etcd.get(f"/kvpool/c/namespaces/t/{bumped.digest}") == encode_record(bumped)
            )
            config = msgspec.json.decode(etcd.get("/kvpool/c/config") or b"{}", type=ClusterConfig)
            assert config == a.view.config
            await until(lambda: etcd.get("/kvpool/c/clock") == encode_record(clock))
            fresh = await members.start()
            assert fresh.view.namespaces == {("t", bumped.digest): bumped}
            assert fresh.view.clock == clock
            await asyncio.gather(*tasks)

    with Etcd(tmp_path) as etcd:
        uvloop.run(main(etcd))


def test_what_was_deleted_stays_so_whatever_etcd_says_later(etcd: Etcd, cluster: str) -> None:
    """A copy of etcd was brought back, or a node of an older version remembers what it should not."""

    async def main() -> None:
        async with Members(etcd.url, cluster) as members:
            a, b = [await members.start() for _ in range(2)]
            there = await a.register(entry("11" * 16))
            await a.register(entry(epoch=2, generation=1))
            assert await a.delete_unused("t", entry().digest, 0)
            clock = NamespaceClock(0, 3, 1 + GENERATIONS_APART)
            await until(lambda: a.view.clock == b.view.clock == clock)
            at = f"/kvpool/{cluster}/clock"

            await asyncio.to_thread(etcd.put, at, encode_record(NamespaceClock(0, 1, 0)))
            await until(lambda: etcd.get(at) == encode_record(clock))
            await asyncio.to_thread(etcd.delete, at)
            await until(lambda: etcd.get(at) == encode_record(clock))
            assert a.view.clock == b.view.clock == clock

            again = f"/kvpool/{cluster}/namespaces/t/{entry().digest}"
            await asyncio.to_thread(etcd.put, again, encode_record(entry(epoch=1)))
            anew = entry(epoch=3, fence=3, generation=clock.first_generation)
            await until(lambda: etcd.get(again) == encode_record(anew))
            both = {("t", there.digest): there, ("t", anew.digest): anew}
            await until(lambda: a.view.namespaces == b.view.namespaces == both)

            await a.count_hour(0)
            await a.use("t", there.digest)
            used = msgspec.structs.replace(there, used=1)
            await until(lambda: b.view.namespaces["t", there.digest] == used)
            other = f"/kvpool/{cluster}/namespaces/t/{there.digest}"
            await asyncio.to_thread(etcd.put, other, encode_record(there))
            await until(lambda: etcd.get(other) == encode_record(used))
            assert not await b.delete_unused("t", there.digest, 0)

    uvloop.run(main())


@pytest.mark.slow
def test_a_node_that_died_with_etcd_away_is_dropped_in_the_end(tmp_path: Path) -> None:
    async def main(etcd: Etcd) -> None:
        process = Process(etcd, "c", "p", 1111)
        try:
            async with Members(etcd.url, "c") as members:
                a = await members.start()
                await a.join(record("a"))
                await until(lambda: set(a.view.nodes) == {"a", "p"})
                etcd.members[0].kill()
                process.process.kill()
                await until(lambda: standing(a) is Standing.AWAY)
                assert set(a.view.nodes) == {"a", "p"}
                await asyncio.to_thread(etcd.restart, 0)
                await until(lambda: set(a.view.nodes) == {"a"})
                assert standing(a) is Standing.MEMBER
        finally:
            process.close()

    with Etcd(tmp_path) as etcd:
        asyncio.run(main(etcd))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_joins_and_drains_go_on_when_the_leader_dies(tmp_path: Path, how: str) -> None:
    took: dict[str, float] = {}

    async def main(etcd: Etcd) -> None:
        async with Members(etcd.url, "c", ttl_s=10.0) as members:
            started = [await members.start() for _ in range(4)]
            lost: list[str] = []
            for number, member in enumerate(started[:3]):
                member.on_lost(lambda n=number: lost.append(str(n)))
                await member.join(record(str(number)))
            index = await asyncio.to_thread(etcd.leader)
            getattr(etcd.members[index], how)()
            began = time.monotonic()
            await asyncio.gather(
                timed("join", started[3].join(record("3"))),
                timed("drain", started[0].set_drain("1", wanted=True)),
            )
            for member in started:
                await until(lambda m=member: set(m.view.nodes) == {"0", "1", "2", "3"})
                await until(lambda m=member: m.view.drains == {"1"})
            took["seen by all"] = time.monotonic() - began
            # Who has tried to renew its lease just then tries again.
            await until(lambda: all(standing(each) is Standing.MEMBER for each in started))
            assert lost == []

    async def timed(name: str, work: Any) -> None:
        began = time.monotonic()
        await work
        took[name] = time.monotonic() - began

    with Etcd(tmp_path, members=3) as etcd:
        uvloop.run(main(etcd))
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items())
    print(f"\nafter the leader's {how}: {shown}")  # noqa: T201 - a measurement
    assert max(took.values()) < PATIENCE_S


# ---- processes that stop --------------------------------------------------------------------------------


def test_a_process_stopped_past_its_lease_is_unsure_at_its_first_look(
    etcd: Etcd, cluster: str, process: Process
) -> None:
    async def main() -> None:
        async with Members(etcd.url, cluster) as members:
            watcher = await members.start()
            await until(lambda: process.said()[-1:] == ["member"], "the process joins")
            await until(lambda: "p" in watcher.view.nodes, "the watcher hears of it")
            first = watcher.view.nodes["p"].incarnation
            send(process.process.pid, signal.SIGSTOP)
            await until(lambda: not watcher.view.nodes, "its lease ends")
            process.process.send_signal(signal.SIGCONT)
            await until(lambda: "p" in watcher.view.nodes, "it joins again")
            second = watcher.view.nodes["p"].incarnation
            assert second != first
            await until(lambda: process.said()[-1:] == ["member"])
            said = process.said()
            assert said == [
                f"joined {first}",
                "member",
                "unsure",
                "lost",
                f"joined {second}",
                "member",
            ]

    asyncio.run(main())
    assert process.close() == b"", "and nothing on stderr"


def test_a_lost_etcd_makes_no_noise_on_stderr(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        process = Process(etcd, "c", "p", 1111)
        try:
            waiting.until(lambda: process.said()[-1:] == ["member"])
            etcd.members[0].kill()
            waiting.until(lambda: process.said()[-1:] == ["away"])
        finally:
            errors = process.close()
        assert errors == b""


# ---- many -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_64_members_in_one_process(etcd: Etcd, cluster: str) -> None:
    took: dict[str, float] = {}

    async def main() -> None:
        async with Members(etcd.url, cluster, ttl_s=10.0) as members:
            began = time.monotonic()
            all_members = await asyncio.gather(*[members.start() for _ in range(64)])
            took["start"] = time.monotonic() - began
            began = time.monotonic()
            await asyncio.gather(
                *[member.join(record(f"n{number:02}")) for number, member in enumerate(all_members)]
            )
            names = {f"n{number:02}" for number in range(64)}
            for member in all_members:
                await until(lambda m=member: set(m.view.nodes) == names)
            took["64 joins seen by all"] = time.monotonic() - began
            slowest = 0.0
            for number in range(20):
                began = time.monotonic()
                await all_members[number].set_drain(f"n{number:02}", wanted=True)
                for member in all_members:
                    await until(lambda m=member, n=number: f"n{n:02}" in m.view.drains)
                slowest = max(slowest, time.monotonic() - began)
            took["slowest of 20 changes, to be seen by all"] = slowest

    uvloop.run(main())
    shown = ", ".join(f"{name}: {seconds * 1000:.0f} ms" for name, seconds in took.items())
    print(f"\n64 members: {shown}")  # noqa: T201 - a measurement
    assert max(took.values()) < PATIENCE_S
