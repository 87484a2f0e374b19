"""The etcd client on real servers: TLS, passwords, failover, and a watch that misses nothing."""

import asyncio
import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import uvloop

from kvpool.errors import ConfigError, InvalidRequest, KvpoolError, NotAuthenticated, Unavailable
from kvpool.placement.etcd import rpc_pb2 as rpc
from kvpool.placement.etcd.client import EtcdClient, LeaseGone, found, put, read
from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.etcd.watch import Follower
from tests.contract.suites.membership import until
from tests.support.servers.certificates import Certificates, have_openssl, make_certificates
from tests.support.servers.etcd import Etcd
from tests.support.waiting import PATIENCE_S

PREFIX = b"/kvpool/c/"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if not have_openssl():
        pytest.skip("openssl, which makes the certificates, is not installed")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def write(client: EtcdClient, key: bytes, value: bytes = b"v") -> Any:
    return await client.txn([], [put(key, value)], [], f"writing {key.decode()}")


async def value_of(client: EtcdClient, key: bytes) -> bytes | None:
    kv = found(await client.txn([], [read(key)], [], "reading"), 0)
    return None if kv is None else bytes(kv.value)


class Recorder:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.resets: list[dict[bytes, bytes]] = []
        self.events: list[tuple[int, bytes]] = []

    def heard(self) -> None:
        pass

    def reset(self, kvs: list[Any], revision: int) -> None:
        self.resets.append({kv.key: kv.value for kv in kvs})

    def changed(self, events: list[Any], revision: int) -> None:
        self.events += [(event.kv.mod_revision, event.kv.key) for event in events]
        assert self.events[-1][0] == revision


class Watching:
    """A follower in a task, for the length of a `with` block."""

    def __init__(self, client: EtcdClient) -> None:
        self.seen = Recorder()
        self.follower = Follower(client, PREFIX, self.seen)

    async def __aenter__(self) -> Self:
        await self.follower.read()
        self.task = asyncio.ensure_future(self.follower.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def expect(settings: EtcdSettings, error: type[KvpoolError], match: str) -> None:
    client = EtcdClient(settings)
    try:
        with pytest.raises(error, match=match):
            await client.range(PREFIX)
    finally:
        await client.close()


# ---- calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_reads_writes_and_leases(etcd: Etcd, run: Any) -> None:
    async def main() -> None:
        client = EtcdClient(EtcdSettings.from_url(etcd.url))
        try:
            keys = [PREFIX + f"page/{n:04}".encode() for n in range(300)]  # more than two pages
            await asyncio.gather(*[write(client, key, key[::-1]) for key in keys])
            kvs, revision, cluster = await client.range(PREFIX + b"page/")
            assert [(kv.key, kv.value) for kv in kvs] == [(key, key[::-1]) for key in keys]
            assert revision == etcd.revision()
            assert cluster

            lease = await client.grant(60)
            key = PREFIX + b"leased"
            await client.txn([], [put(key, b"x", lease)], [], "putting")
            assert etcd.lease_of(key.decode()) == lease
            assert await client.keep_alive(lease)
            await client.revoke(lease)
            await client.revoke(lease)
            assert etcd.get(key.decode()) is None
            assert not await client.keep_alive(lease)
            with pytest.raises(LeaseGone):
                await client.txn([], [put(key, b"x", lease)], [], "putting")
            with pytest.raises(InvalidRequest, match=r"too large|larger than max"):
                await write(client, key, bytes(3 << 20))
        finally:
            await client.close()
            await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await client.range(PREFIX)

    run(main())


def test_nobody_answers() -> None:
    """A closed port, and one that accepts and stays silent: an error within the deadline."""

    async def main() -> None:
        for endpoint in ("127.0.0.1:1", silent_endpoint, "no-such-host.invalid:2379"):
            settings = EtcdSettings((endpoint,), call_s=1.5)
            began = time.monotonic()
            await expect(settings, Unavailable, rf"reading: etcd \({endpoint}\) did not")
            assert time.monotonic() - began < PATIENCE_S

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts for it
        silent_endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        asyncio.run(main())


# ---- TLS and passwords ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(tmp_path: Path, certificates: Certificates, mutual: bool) -> None:
    made = certificates

    async def main(etcd: Etcd) -> None:
        given: dict[str, Any] = {"ca": made.ca, "call_s": PATIENCE_S}
        short = {**given, "call_s": 1.5}
        own = {"cert": made.client_cert, "key": made.client_key} if mutual else {}
        client = EtcdClient(EtcdSettings.from_url(etcd.url, **given, **own))
        try:
            async with Watching(client) as watching:
                await write(client, PREFIX + b"x", b"secret")
                await until(lambda: watching.seen.events)
            assert etcd.get("/kvpool/c/x") == b"secret"
        finally:
            await client.close()
        if mutual:
            await expect(EtcdSettings.from_url(etcd.url, **short), Unavailable, "did not")
        plain = etcd.url.replace("etcds:", "etcd:")
        await expect(EtcdSettings.from_url(plain, call_s=1.5), Unavailable, "did not")
        # Another authority than the one that signed the server's certificate: itself.
        wrong = {**short, "ca": made.client_cert}
        settings = EtcdSettings.from_url(etcd.url, **wrong, **own)
        client = EtcdClient(settings)
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = ""
                while "CERTIFICATE_VERIFY_FAILED" not in said:  # the time may end before it is seen
                    with pytest.raises(Unavailable) as caught:
                        await client.range(PREFIX)
                    said = str(caught.value)
        finally:
            await client.close()

    with Etcd(tmp_path, tls=made, client_auth=mutual) as etcd:
        asyncio.run(main(etcd))


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    settings = EtcdSettings.from_url("etcds://127.0.0.1", ca=tmp_path / "absent.pem")
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        EtcdClient(settings)


def test_passwords_and_tokens_that_expire(tmp_path: Path) -> None:
    password = "pass word"

    def login(etcd: Etcd) -> str:
        body = {"name": "user", "password": password}
        return str(etcd.post("auth/authenticate", body)["token"])

    async def main(etcd: Etcd) -> None:
        url = f"etcd://user@{etcd.endpoints[0]}"
        client = EtcdClient(EtcdSettings.from_url(url, password=password))
        try:
            await write(client, PREFIX + b"before", b"1")  # while authentication is still off
            etcd.enable_auth("user", password, "/kvpool/c/")
            async with Watching(client) as watching:
                await write(client, PREFIX + b"1")
                spare = itertools.cycle([login(etcd) for _ in range(50)])
                before = client.token

                # As old as the client's token; each is used only once, since use prolongs it.
                def expired() -> bool:
                    try:
                        etcd.post("kv/range", {"key": "AA=="}, token=next(spare))
                    except Unavailable as error:
                        return "invalid auth token" in str(error)
                    return False

                for n in (2, 3):
                    deadline = time.monotonic() + PATIENCE_S
                    while not await asyncio.to_thread(expired):
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.3)
                    await write(client, PREFIX + str(n).encode())
                assert client.token not in {"", before}
                await until(lambda: len(watching.seen.events) == 3)
                etcd.members[0].kill()
                etcd.restart(0)  # which forgets all tokens
                await write(client, PREFIX + b"4")
                await until(lambda: len(watching.seen.events) == 4)
            with pytest.raises(NotAuthenticated, match="/kvpool/"):
                await write(client, b"/elsewhere", b"x")
        finally:
            await client.close()
        wrong = EtcdSettings.from_url(url, password="wrong")
        await expect(wrong, NotAuthenticated, "user or the password")
        await expect(EtcdSettings.from_url(etcd.url), NotAuthenticated, "give a user")

    with Etcd(tmp_path, arguments=["--auth-token-ttl=1"]) as etcd:
        asyncio.run(main(etcd))


# ---- servers that die -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_every_leader_dies_in_turn_and_nothing_is_missed(tmp_path: Path, how: str) -> None:
    """Writes go on through each death, and the watch has each of them once, in order."""
    slowest = 0.0

    async def main(etcd: Etcd) -> None:
        nonlocal slowest
        client = EtcdClient(EtcdSettings.from_url(etcd.url))
        number = itertools.count()
        written: list[bytes] = []

        async def some() -> None:
            nonlocal slowest
            for _ in range(10):
                key = PREFIX + f"{next(number):04}".encode()
                began = time.monotonic()
                await write(client, key)
                slowest = max(slowest, time.monotonic() - began)
                written.append(key)

        try:
            async with Watching(client) as watching:
                await some()
                for _ in range(3):
                    index = await asyncio.to_thread(etcd.leader)
                    getattr(etcd.members[index], how)()
                    await some()
                    await until(
                        lambda: [key for _, key in watching.seen.events][-1:] == written[-1:]
                    )
                    if how == "kill":
                        await asyncio.to_thread(etcd.restart, index)
                    else:
                        etcd.members[index].resume()
                        await asyncio.to_thread(etcd.wait_ready)
                    await some()
                await until(lambda: [key for _, key in watching.seen.events][-1:] == written[-1:])
                # A write that was tried twice may be there twice; each time is a revision.
                revisions = [revision for revision, _ in watching.seen.events]
                assert revisions == sorted(set(revisions))
                keys = [key for _, key in watching.seen.events]
                assert list(dict.fromkeys(keys)) == written
                assert watching.follower.resets == 1, "the watch went on, nothing was read again"
                _, revision, _ = await client.range(PREFIX)
                await until(lambda: watching.seen.events[-1][0] >= revision)
        finally:
            await client.close()

    with Etcd(tmp_path, members=3) as etcd:
        uvloop.run(main(etcd))
    print(f"\nleaders that died by {how}: slowest write {slowest:.2f} s")  # noqa: T201 - a measurement
    assert slowest < PATIENCE_S


def test_the_watch_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def main(etcd: Etcd) -> None:
        client = EtcdClient(EtcdSettings.from_url(etcd.url))
        try:
            async with Watching(client) as watching:
                await write(client, PREFIX + b"1")
                await until(lambda: len(watching.seen.events) == 1)
                etcd.members[0].kill()
                await asyncio.to_thread(etcd.restart, 0)
                etcd.put("/kvpool/c/2", b"")
                await until(lambda: len(watching.seen.events) == 2)
                assert [key for _, key in watching.seen.events] == [PREFIX + b"1", PREFIX + b"2"]
                assert watching.follower.resets == 1 and watching.follower.streams >= 2
        finally:
            await client.close()

    with Etcd(tmp_path) as etcd:
        asyncio.run(main(etcd))


def test_a_server_that_falls_silent_is_noticed(tmp_path: Path) -> None:
    """SIGSTOP keeps the connection open; only the missing signs of life tell."""

    async def main(etcd: Etcd) -> None:
        client = EtcdClient(EtcdSettings.from_url(etcd.url))
        try:
            async with Watching(client) as watching:
                await until(lambda: watching.follower.streams == 1)
                etcd.members[0].pause()
                await until(lambda: not watching.follower.open)
                etcd.members[0].resume()
                etcd.put("/kvpool/c/1", b"")
                await until(lambda: len(watching.seen.events) == 1)
                assert watching.follower.streams == 2
        finally:
            await client.close()

    with Etcd(tmp_path) as etcd:
        asyncio.run(main(etcd))


# ---- history that is gone -------------------------------------------------------------------------------


def test_compaction_while_away_means_reading_everything(etcd: Etcd) -> None:
    async def main() -> None:
        client = EtcdClient(EtcdSettings.from_url(etcd.url))
        seen = Recorder()
        follower = Follower(client, PREFIX, seen)
        try:
            await write(client, PREFIX + b"old", b"1")
            await follower.read()
            for n in range(10):
                etcd.put("/kvpool/c/old", str(n).encode())
            etcd.compact()
            task = asyncio.ensure_future(follower.run())
            await until(lambda: len(seen.resets) == 2)
            assert seen.resets[1][PREFIX + b"old"] == b"9"
            etcd.put("/kvpool/c/new", b"")
            await until(lambda: [key for _, key in seen.events] == [PREFIX + b"new"])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            await client.close()

    asyncio.run(main())


def test_another_etcd_under_the_same_address_means_reading_everything(etcd: Etcd) -> None:
    """Its revisions are lower than ours: a plain watch would wait for ours in silence."""

    async def main() -> None:
        client = EtcdClient(EtcdSettings.from_url(etcd.url))
        seen = Recorder()
        follower = Follower(client, PREFIX, seen)
        try:
            await follower.read()
            follower.revision += 1000
            task = asyncio.ensure_future(follower.run())
            await until(lambda: len(seen.resets) == 2)
            etcd.put("/kvpool/c/next", b"")
            await until(lambda: [key for _, key in seen.events] == [PREFIX + b"next"])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            await client.close()

    asyncio.run(main())


def test_a_try_whose_answer_was_lost_is_repeated(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Getting a lease was done, and the answer did not arrive: the second try finds it done."""

    async def main() -> None:
        requests = []

        class Lossy(EtcdClient):
            async def _try(self, endpoint: str, method: Any, request: Any, *rest: Any) -> Any:
                answer = await super()._try(endpoint, method, request, *rest)
                requests.append(request)
                if len(requests) == 1:
                    raise _lost()
                return answer

        client = Lossy(EtcdSettings.from_url(etcd.url))
        try:
            lease = await client.grant(60)
            assert [type(request) for request in requests] == [rpc.LeaseGrantRequest]
            assert await client.keep_alive(lease)
        finally:
            await client.close()

    asyncio.run(main())


def _lost() -> Exception:
    import grpc

    from kvpool.placement.etcd.client import Refused

    return Refused(grpc.StatusCode.DEADLINE_EXCEEDED, "")
