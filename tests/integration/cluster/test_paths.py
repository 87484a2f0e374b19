"""Several network cards: each a loopback address, what is said to it goes through a proxy of its own."""

from urllib.parse import urlsplit

import pytest

from kvpool.placement.peer_estimates import Link
from kvpool.telemetry.cluster_stats import WayStats
from tests.support.proxy import BOTH, Fault, Proxy
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

SILENT = Fault(silent=True, hold=BOTH)
LISTENS_ON = "127.0.0.2"


@pytest.fixture
def cards(start_cluster):
    """Proxies before both cards of a, a seat there, and one at b, which has cards on the same rails."""
    targets = []
    with Proxy(lambda: targets[0]) as first, Proxy(lambda: targets[1]) as second:
        world = start_cluster(nodes=0, environ={"KVPOOL_PROBE_S": "0"})
        rails = ("--rail", "r0", "--rail", "r1")
        other = f"tcp://{LISTENS_ON}:{free_port()}"
        shown = {"KVPOOL_ADVERTISE": f"{first.url},{second.url}"}
        a = world.make("a", "--listen", other, *rails, environ=shown)
        targets += [(urlsplit(url).hostname, urlsplit(url).port) for url in (a.url, other)]
        b = world.make("b", "--listen", "tcp://127.0.0.3:0", *rails, "--bind-source")
        for node in (a, b):
            node.start()
        yield first, second, *world.seats()


def ways(seat, first) -> dict[str, WayStats]:
    """From b to a: by URL."""
    return {way.url: way for way in seat.stats.paths.peers[first.url].ways}


def link(seat) -> dict:
    """To the only other node."""
    (found,) = seat.client.cluster()["links"]
    return found


def test_what_one_card_cannot_bring_the_other_one_does(cards, numbers, until):
    first, second, a, b = cards
    record = b.members["a"]
    assert [(t["url"], t["rail"]) for t in record["transports"]] == [
        (first.url, "r0"),
        (second.url, "r1"),
    ]
    # What is advertised in another one's place is in a network that nobody knows.
    assert [t["net"] for t in record["transports"]] == ["127.0.0.0/8", ""]
    assert link(b)["distance"] == "host"

    def move(count: int, wait_s: float = PATIENCE_S) -> int:
        some = numbers(count)
        a.put(some)
        until(lambda: a.announced)
        return b.read(some, wait_s=wait_s)

    # Each rail has its pair; the two are as good as each other, and across them is worse.
    assert move(40) == 40
    by_rail = [f"{first.url}?source=127.0.0.1", f"{second.url}?source=127.0.0.3"]
    across = [f"{first.url}?source=127.0.0.3", f"{second.url}?source=127.0.0.1"]
    assert list(ways(b, first)) == by_rail + across
    # Which one is next depends on what each of them has carried, and so on how the pulls were cut.
    chosen = by_rail.index(link(b)["path"])
    silent, card, other = (first, second)[chosen], by_rail[chosen], by_rail[1 - chosen]

    # That card answers no more: the other one brings the rest, within the time of the same read.
    silent.set(SILENT)
    assert move(30) == 30

    def rests() -> bool:
        """For a second at first: if that is over, it is tried again, and rests longer."""
        if ways(b, first)[card].rests_s > 0:
            return True
        assert move(5) == 5
        return False

    until(rests)
    assert ways(b, first)[other].pulls >= 1
    assert b.stats.paths.changed_card >= 1
    peer = next(p for p in b.stats.fetch.peers if p.node == "a")
    assert peer.suspended_s == 0, "the node is well"
    silent.set()

    # Questions and pulls from then on go by the other one at once, until the first one is tried again.
    def by_that_card() -> bool:
        before = ways(b, first)[card].pulls
        assert move(5) == 5
        return ways(b, first)[card].pulls > before

    until(by_that_card, seconds=2 * PATIENCE_S)


def test_what_was_learnt_of_a_node_outlives_its_restart(start_cluster, numbers, until):
    world = start_cluster(nodes=2, environ={"KVPOOL_PROBE_S": "0"}, labels={"b": "zone=z,rack=1"})
    a, b = world.seats()
    assert link(b)["bytes_age_s"] is link(b)["latency_age_s"] is None
    some = numbers(40)
    a.put(some)
    until(lambda: a.announced)
    assert b.read(some) == 40
    before = link(b)
    assert before["bytes_age_s"] is not None
    assert Link(**before).load_s(64 << 20) > 0
    labels = b.members["b"]["labels"]
    a.close()
    world.node("a").restart()
    until(
        lambda: (
            {one["incarnation"] for one in b.client.cluster()["links"]} - {before["incarnation"]}
        )
    )
    after = link(b)
    assert after["incarnation"] != before["incarnation"]
    assert after["bytes_age_s"] > before["bytes_age_s"], "older than it is: half believed"
    world.node("b").restart()
    assert world.seat("b").members["b"]["labels"] == labels == {"zone": "z", "rack": "1"}


def test_nodes_that_nothing_is_pulled_from_are_asked_how_long_an_answer_takes(start_cluster, until):
    world = start_cluster(nodes=2, environ={"KVPOOL_PROBE_S": "0.1"})
    a, b = world.seats()
    for seat in (a, b):
        until(lambda seat=seat: link(seat)["latency_age_s"] is not None)
        (peer,) = (p for p in seat.stats.fetch.peers if p.node)
        assert peer.probes >= 1
        assert (peer.asked, peer.failed) == (0, 0)
        assert link(seat)["bytes_age_s"] is None
    # One that stops answering is counted, and nothing else.
    world.node("b").kill()
    until(
        lambda: (
            not a.client.cluster()["links"] or any(p.probe_failures for p in a.stats.fetch.peers)
        )
    )
    assert all(p.suspended_s == 0 for p in a.stats.fetch.peers)
