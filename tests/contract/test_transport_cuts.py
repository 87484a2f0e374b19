"""TCP, with and without TLS, and NIXL, cut at each kind of place, held up, restarted: never a wrong byte, never a loan that stays."""

import functools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from xxhash import xxh3_128_digest

from kvpool.security.credentials import Credentials
from kvpool.transfer import nixl_agent
from kvpool.transfer.base import Stop, TransferLimits
from kvpool.transfer.sealing import TAG_BYTES
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from kvpool.wire.peer import GROUP_BYTES
from tests.contract.suites.transport import DIGEST, Side, key_of, order
from tests.support.fetches import fetch_of
from tests.support.pki import Pki
from tests.support.proxy import Ending, Fault, Proxy, Way
from tests.support.transfer_worker import MoverSide
from tests.support.waiting import PATIENCE_S, until

SECRET = b"a secret for this file"
LIMITS = TransferLimits(connections_max=8)  # so that one left behind by each cut would be noticed
SHAPES = {"small": (4096, 16), "in groups": (100_001, 16)}  # bytes of a block, blocks


class Frames:
    """How long the frames of a pull are, from what `wire` says of them."""

    def __init__(self, nbytes: int, count: int) -> None:
        version, nonce, proof = frame.PROTOCOL_VERSION, bytes(32), bytes(32)
        keys = bytes(16 * count)
        self.hello = self.size(peer_wire.PeerHello(version, "test", "node", nonce))
        self.challenge = self.size(
            peer_wire.PeerChallenge(version, "node", "incarnation", nonce, proof)
        )
        self.proof = self.size(peer_wire.PeerProof(proof))
        self.done = self.size(frame.Done())
        fetch = fetch_of(DIGEST, nbytes, keys, 60.0)
        self.fetch = self.size(fetch) + TAG_BYTES
        self.fetched = self.size(peer_wire.Fetched(b"\1" * count, bytes(16 * count))) + TAG_BYTES
        self.nbytes, self.count = nbytes, count

    @staticmethod
    def size(message: frame.Message) -> int:
        return len(frame.encode(message, 1))

    @property
    def met(self) -> int:
        """What the owner says before it is asked for blocks."""
        return self.challenge + self.done

    @property
    def body(self) -> int:
        """Where the blocks' bytes begin."""
        return self.met + self.fetched

    @property
    def down(self) -> int:
        groups = -(-self.count // max(1, GROUP_BYTES // self.nbytes))
        return self.body + self.nbytes * self.count + TAG_BYTES * groups

    @property
    def up(self) -> int:
        return self.hello + self.proof + self.fetch

    def places(self) -> dict[str, tuple[Way, int]]:
        """Each kind of place in which a connection can end before all has come."""
        asked, body, nbytes = self.hello + self.proof, self.body, self.nbytes
        group = max(1, GROUP_BYTES // nbytes) * nbytes
        down = {
            "before the first byte": 0,
            "in a length": 2,
            "in the challenge": self.challenge // 2,
            "after the challenge": self.challenge,
            "in the admission": self.met - 1,
            "after the handshake": self.met,
            "in the answer's length": self.met + 3,
            "in the answer's number": self.met + 6,
            "in what is present": self.met + 12,
            "in a checksum": body - 16 * 3 - 7,
            "in a tag": body - 7,
            "before the header's last byte": body - 1,
            "after the header": body,
            "in the first block": body + nbytes // 2,
            "between two blocks": body + nbytes,
            "in the middle of a vector": body + 7 * nbytes + 1,
            "near a group's end": body + min(group, nbytes * (self.count - 1)) - 1,
            "after a group": body + min(group, nbytes * (self.count - 1)),
            "before the last byte": self.down - 1,
        }
        up = {
            "before the hello": 0,
            "in the hello's length": 3,
            "in the hello": self.hello - 5,
            "after the hello": self.hello,
            "in the proof": self.hello + self.proof // 2,
            "after the proof": asked,
            "in the request's length": asked + 1,
            "in the wanted keys": asked + 60,
            "before the request's last byte": self.up - 1,
            "after the request": self.up,
        }
        return {
            **{name: ("down", at) for name, at in down.items()},
            **{name: ("up", at) for name, at in up.items()},
        }


FRAMES = Frames(*SHAPES["in groups"])
PLACES: list[Any] = [
    pytest.param(shape, way, offset, id=f"{shape}-{name}")
    for shape, (nbytes, count) in SHAPES.items()
    for name, (way, offset) in Frames(nbytes, count).places().items()
]
HALF_WAY = [  # after the handshake, which a known connection has behind it
    place
    for place in PLACES
    if place.values[2] > (FRAMES.met if place.values[1] == "down" else FRAMES.hello + FRAMES.proof)
]


@functools.cache
def block(life: int, number: int, nbytes: int) -> bytes:
    return random.Random(f"{life} {number}").randbytes(nbytes)


class Link:
    """An owner, a proxy before it, a reader: and what the reader has to have after a pull."""

    scheme = "tcp"
    tls: Credentials | None = None

    def __init__(self, proxy: Proxy, nbytes: int, count: int) -> None:
        self.proxy = proxy
        self.frames = Frames(nbytes, count)
        self.nbytes, self.count = nbytes, count
        self.keys = [key_of(number) for number in range(count)]
        self.rows = [3 * number + 2 for number in reversed(range(count))]  # scattered, backwards
        self.life = 0
        self.size = 3 * (count + 1) * nbytes
        self.owner = self.begin()
        self.reader = Side(self.url, size=self.size, tls=self.tls)
        self.untouched = b"\xee" * self.size

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.proxy.address[0]}:{self.proxy.address[1]}"

    def make_owner(self) -> Side:
        return Side(self.url, limits=LIMITS, size=self.size, tls=self.tls)

    def begin(self) -> Side:
        """A life of the owner, with bytes that no other one had."""
        self.life += 1
        owner = self.make_owner()
        owner.source.stride = self.nbytes
        for number, key in enumerate(self.keys):
            owner.source.put(key, 2 * number, self.data(number))
        listening = owner.transport.listen(f"{self.scheme}://127.0.0.1:0")
        self.port = int(listening.rpartition(":")[2])
        return owner

    def restart(self) -> None:
        """The owner ends, with all that is under way; another one begins."""
        self.owner.transport.close()
        assert not self.owner.source.loans
        self.owner = self.begin()

    def data(self, number: int, life: int | None = None) -> bytes:
        return block(life or self.life, number, self.nbytes)

    def pull(self, deadline_s: float = 30.0, **changes: object) -> worker_wire.Pulled:
        """A pull into memory that is known, of which nothing but the order's rows is touched."""
        self.reader.bytes[:] = self.untouched
        wanted = order(
            self.url, self.nbytes, self.keys, self.rows, deadline_s=deadline_s, **changes
        )
        return self.reader.transport.pull(wanted, Stop())

    def block(self, index: int) -> bytes:
        return self.reader.block(self.rows[index], self.nbytes, self.nbytes)

    def check(self, pulled: worker_wire.Pulled, life: int | None = None) -> int:
        """How many blocks came; what is said to be here is right, and nothing else was written to."""
        for index, status in enumerate(pulled.status):
            checksum = pulled.checksums[16 * index : 16 * index + 16]
            if status == BlockStatus.PRESENT:
                assert self.block(index) == self.data(index, life)
                assert checksum == xxh3_128_digest(self.data(index, life))
            else:
                assert (status, checksum) == (BlockStatus.LATE, bytes(16))
        for row in set(range(max(self.rows) + 2)) - set(self.rows):
            assert self.reader.block(row, self.nbytes, self.nbytes) == b"\xee" * self.nbytes
        return pulled.status.count(BlockStatus.PRESENT)

    def check_all_is_well(self) -> None:
        """Nothing is lent any more, nothing writes to the rows any more, and the next pull brings all."""
        before = self.reader.bytes[:]
        self.proxy.set()
        assert self.owner.source.wait_until_returned()
        assert self.reader.bytes[:] == before
        pulled = self.pull()
        assert (self.check(pulled), pulled.error) == (self.count, "")
        assert self.owner.source.wait_until_returned()

    def close(self) -> None:
        self.reader.transport.close()
        self.owner.transport.close()


class NixlLink(Link):
    """The owner is a transfer worker; only what is said goes through the proxy, bytes go by themselves."""

    scheme = "nixl"

    def make_owner(self) -> Side:
        return MoverSide(self.url, limits=LIMITS, size=1 << 20)


@contextmanager
def linked(kind: type[Link], nbytes: int, count: int) -> Iterator[Link]:
    port = [0]
    with Proxy(lambda: ("127.0.0.1", port[0])) as proxy:

        class Here(kind):  # type: ignore[valid-type]
            def begin(self) -> Side:
                owner: Side = super().begin()
                port[0] = self.port
                return owner

        link = Here(proxy, nbytes, count)
        try:
            yield link
        finally:
            link.close()


@pytest.fixture(scope="module")
def links() -> Iterator[dict[str, Link]]:
    """One for each shape, for tests that leave them well."""
    small, large = SHAPES.values()
    with linked(Link, *small) as one, linked(Link, *large) as other:
        yield dict(zip(SHAPES, (one, other), strict=True))


def drop_idle(link: Link) -> None:
    """The next pull begins with a handshake."""
    link.proxy.cut()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_places_are_where_they_are_said_to_be(links: dict[str, Link], shape: str) -> None:
    link = links[shape]
    drop_idle(link)
    before = link.proxy.carried
    assert link.check(link.pull()) == link.count
    drop_idle(link)  # what arrived has been counted then
    assert link.proxy.carried - before == link.frames.up + link.frames.down


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize(("shape", "way", "offset"), PLACES)
def test_a_new_connection_that_is_cut(
    links: dict[str, Link], shape: str, way: Way, offset: int, ending: Ending
) -> None:
    link = links[shape]
    drop_idle(link)
    link.proxy.set(Fault(stop=(way, offset), ending=ending))
    pulled = link.pull()
    assert pulled.error
    came = link.check(pulled)
    whole = (offset - link.frames.body) // link.nbytes if way == "down" else 0
    assert came <= max(0, whole)
    link.check_all_is_well()


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize(("shape", "way", "offset"), HALF_WAY)
def test_a_known_connection_that_is_cut(
    links: dict[str, Link], shape: str, way: Way, offset: int, ending: Ending
) -> None:
    """The second pull over it; then all comes over another connection."""
    link = links[shape]
    drop_idle(link)
    assert link.check(link.pull()) == link.count
    said = link.frames.down - link.frames.met if way == "down" else link.frames.fetch
    link.proxy.set(Fault(stop=(way, offset + said), ending=ending))
    pulled = link.pull()
    assert link.proxy.stopped.is_set()
    assert (link.check(pulled), pulled.error) == (link.count, "")
    link.check_all_is_well()


@pytest.mark.parametrize(
    ("way", "offset"),
    [
        ("down", 60),
        ("down", FRAMES.body - 20),
        ("down", FRAMES.body + 7 * FRAMES.nbytes + 1),
        ("up", FRAMES.hello + 9),
        ("up", FRAMES.up - 3),
    ],
)
def test_a_peer_that_falls_silent_costs_its_deadline(
    links: dict[str, Link], way: Way, offset: int
) -> None:
    """What it says stops arriving, or what it is told: nobody hears of it, and the connection stays."""
    link = links["in groups"]
    drop_idle(link)
    link.proxy.set(Fault(stop=(way, offset), ending="hold"))
    pulled = link.pull(deadline_s=0.2)
    assert pulled.error
    assert link.check(pulled) < link.count
    link.check_all_is_well()


@pytest.mark.parametrize("background", [False, True])
def test_a_reader_that_takes_little_at_a_time_costs_its_deadline(
    links: dict[str, Link], background: bool
) -> None:
    """Both sides give up: the reader has what came until then, and the owner its loan."""
    link = links["in groups"]
    drop_idle(link)
    link.proxy.set(Fault(bytes_s=1 << 20))  # for 1.6 MB
    pulled = link.pull(deadline_s=0.3, background=background)
    assert pulled.error
    assert link.check(pulled) < link.count
    assert link.owner.source.wait_until_returned(), "before anything is well again"
    link.check_all_is_well()


def test_a_pull_over_several_connections_that_are_all_cut() -> None:
    with linked(Link, 1 << 20, 16) as link:
        link.proxy.set(Fault(hold=frozenset({"down"})))
        pulls: list[worker_wire.Pulled] = []
        thread = threading.Thread(target=lambda: pulls.append(link.pull()))
        thread.start()
        until(lambda: link.proxy.connections > 1, "all have begun before the first one ends")
        link.proxy.set(Fault(stop=("down", link.frames.met + (3 << 20)), bytes_s=8 << 20))
        thread.join()
        assert pulls[0].error
        assert 0 < link.check(pulls[0]) < link.count
        link.check_all_is_well()


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_peer_that_is_restarted_in_the_middle(known: bool) -> None:
    """Its next life has other bytes: nothing is put together from both."""
    with linked(Link, *SHAPES["in groups"]) as link:
        met = link.frames.met
        if known:
            assert link.check(link.pull()) == link.count
            met = link.frames.down
        half = met + link.frames.fetched + 12 * link.nbytes + 1000
        link.proxy.set(Fault(stop=("down", half), ending="hold"))
        pulls: list[worker_wire.Pulled] = []
        thread = threading.Thread(target=lambda: pulls.append(link.pull()))
        thread.start()
        assert link.proxy.stopped.wait(PATIENCE_S)
        link.restart()
        link.proxy.cut()
        if known:
            link.proxy.set()
        thread.join()
        if known:
            assert (link.check(pulls[0]), pulls[0].error) == (link.count, "")
        else:
            assert pulls[0].error
            assert 0 < link.check(pulls[0], life=1) <= 12
        link.check_all_is_well()


def test_a_peer_that_is_restarted_and_whose_next_life_is_cut_as_well() -> None:
    """What had arrived of the first life is overwritten by then, so it has not arrived any more."""
    with linked(Link, *SHAPES["in groups"]) as link:
        assert link.check(link.pull()) == link.count
        second = link.frames.down + link.frames.fetched  # where the second answer's blocks begin
        link.proxy.set(Fault(stop=("down", second + 12 * link.nbytes), ending="hold"))
        pulls: list[worker_wire.Pulled] = []
        thread = threading.Thread(target=lambda: pulls.append(link.pull()))
        thread.start()
        assert link.proxy.stopped.wait(PATIENCE_S)
        link.restart()
        link.proxy.set(Fault(stop=("down", link.frames.body + 3 * link.nbytes + 50)))
        thread.join()
        assert pulls[0].error
        assert link.check(pulls[0]) == 0
        link.check_all_is_well()


# ---- TLS: what is cut are records -------------------------------------------------------------------------

TLS_SHAPE = 100_001, 16
# Of what goes down, in the order of the conversation; sizes of a handshake vary by a few bytes, a signature's.
TLS_DOWN = [
    *(0, 1, 4, 5, 60, 127, 128, 200, 700, 1000, 1300, 1500, 2000, 2300),  # the handshakes
    *(50_000, 16_406 * 10, 16_406 * 10 + 3, 16_406 * 30 + 7000, 1_048_576, 1_600_000),  # blocks
]
TLS_UP = [0, 1, 5, 100, 250, 516, 520, 900, 1200, 1500]


@pytest.fixture(scope="module")
def tls_link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    class TlsLink(Link):
        tls = Pki(tmp_path_factory.mktemp("pki") / "ca").credentials("node")

    with linked(TlsLink, *TLS_SHAPE) as link:
        yield link


def test_over_tls_no_byte_of_a_block_is_seen_on_the_way(tls_link: Link) -> None:
    """More goes over the wire than the blocks have, and each of the places below is in the middle of it."""
    link = tls_link
    drop_idle(link)
    before = dict(link.proxy.delivered)
    assert link.check(link.pull()) == link.count
    drop_idle(link)
    down = link.proxy.delivered["down"] - before["down"]
    assert down > link.nbytes * link.count + 22 * (link.nbytes * link.count // 16384)
    assert max(TLS_DOWN) < down
    assert max(TLS_UP) < link.proxy.delivered["up"] - before["up"]


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize(
    ("way", "offset"), [*(("down", at) for at in TLS_DOWN), *(("up", at) for at in TLS_UP)]
)
def test_a_connection_with_tls_that_is_cut(
    tls_link: Link, way: Way, offset: int, ending: Ending
) -> None:
    link = tls_link
    drop_idle(link)
    link.proxy.set(Fault(stop=(way, offset), ending=ending))
    pulled = link.pull()
    assert pulled.error
    assert link.check(pulled) <= (offset // link.nbytes if way == "down" else 0)
    link.check_all_is_well()


@pytest.mark.parametrize(
    ("way", "offset"), [("down", 3), ("down", 900), ("down", 200_000), ("up", 700)]
)
def test_a_peer_with_tls_that_falls_silent_costs_its_deadline(
    tls_link: Link, way: Way, offset: int
) -> None:
    link = tls_link
    drop_idle(link)
    link.proxy.set(Fault(stop=(way, offset), ending="hold"))
    pulled = link.pull(deadline_s=0.2)
    assert pulled.error
    assert link.check(pulled) < link.count
    link.check_all_is_well()


@pytest.mark.parametrize(
    ("way", "offset"),
    [
        *(("down", at) for at in (0, 1, 3, 9, 130, 600, 1400, 2500, 60_000, 800_000, 1_600_000)),
        *(("up", at) for at in (0, 7, 300, 700, 1300)),  # byte 2 is a version that nobody reads
    ],
)
def test_a_bit_that_is_turned_over_inside_of_tls(tls_link: Link, way: Way, offset: int) -> None:
    """Ends the connection there: not one block of it that came later, and none that is wrong."""
    link = tls_link
    drop_idle(link)
    link.proxy.set(Fault(flip=(way, offset)))
    pulled = link.pull(deadline_s=5.0)
    assert pulled.error
    assert link.check(pulled) <= (offset // link.nbytes if way == "down" else 0)
    link.check_all_is_well()


# ---- NIXL: what is said goes through the proxy -----------------------------------------------------------


@pytest.fixture(scope="module")
def nixl_link() -> Iterator[Link]:
    pytest.importorskip(
        "nixl_cu12", reason="NIXL is not installed: pip install --no-deps nixl-cu12"
    )
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("UCX_TLS", "tcp")
        environ.setenv("UCX_NET_DEVICES", "lo")
        environ.setattr(nixl_agent, "TRIAL_S", PATIENCE_S)
        with linked(NixlLink, *SHAPES["small"]) as link:
            assert link.check(link.pull()) == link.count  # they meet
            yield link


READABLE = Frames.size(
    peer_wire.Readable(b"\1" * 16, bytes(256), bytes(64), 1 << 62, 4096, "node/incarnation", 1)
)


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize(
    ("way", "after_handshake"),
    [
        *[("down", at) for at in (-1, 0, 3, 20, 200, READABLE - 20)],
        *[("up", at) for at in (-1, 0, 3, 60)],
    ],
)
def test_nixl_whose_conversation_is_cut(
    nixl_link: Link, way: Way, after_handshake: int, ending: Ending
) -> None:
    link, frames = nixl_link, nixl_link.frames
    drop_idle(link)
    at = after_handshake + (frames.met if way == "down" else frames.hello + frames.proof)
    link.proxy.set(Fault(stop=(way, at), ending=ending))
    pulled = link.pull()
    assert pulled.error
    assert link.check(pulled) == 0
    link.check_all_is_well()


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_nixl_whose_last_word_is_cut(nixl_link: Link, ending: Ending) -> None:
    """The owner never hears that its blocks were taken, but that the connection has ended."""
    link, frames = nixl_link, nixl_link.frames
    drop_idle(link)
    link.proxy.set(Fault(stop=("up", frames.up + 4), ending=ending))
    pulled = link.pull()
    assert link.check(pulled) == link.count
    link.check_all_is_well()
