"""Two nodes: what is brought ahead from another one, and what is not worth another one's memory."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.types import Intent, NamespaceRecord, Outcome
from kvpool.wire.operator import ShowSession
from tests.integration.cluster.conftest import HYBRID, NBYTES, PLAIN, keys_of

MEMORY = 16 << 20
BLOCKS = MEMORY // NBYTES
OTHER = NamespaceRecord.simple("another model", block_bytes=NBYTES, block_tokens=16)
TENANTS = """
[tenants.red]
memory = "8MiB"
token = "red's very own token"
[tenants.blue]
memory = "8MiB"
token = "blue's very own token"
"""
FLOOD = 64


@pytest.fixture
def tenants(start_cluster, tmp_path):
    """start(**settings): a cluster with these tenants. seat(node, tenant): of one of them."""
    (tmp_path / "kvpool.toml").write_text(TENANTS)
    (tmp_path / "kvpool.toml").chmod(0o600)

    def start(**settings):
        return start_cluster(flags=["--config", str(tmp_path / "kvpool.toml")], **settings)

    return start


def seat_of(world, node, tenant, record=PLAIN, **settings):
    return world.seat(node, record, tenant=tenant, token=f"{tenant}'s very own token", **settings)


@pytest.mark.parametrize("record", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_a_sessions_blocks_come_from_another_node_when_it_is_asked_for(
    start_cluster, numbers, until, record
):
    a, b = start_cluster(nodes=2).seats(record)
    some = numbers(32)
    a.put(some)
    until(lambda: a.announced)
    turns = []  # when

    def brought() -> bool:
        """Whether they have come. Where a busy machine has not looked them up in time, it is asked again."""
        if b.match(some) == 32:
            return True
        if not turns or time.monotonic() > turns[-1] + 10:
            turns.append(time.monotonic())
            b.client.sessions.turn(b.ns, "moved", keys_of(some))
            b.client.intents.declare(b.ns, Intent.PREFETCH, session="moved")
        return False

    until(brought)
    assert b.read(some, wait_s=0.0) == 32, "and they are right"
    until(lambda: b.stats.counters.prefetched >= 32, "they are counted when all have come")


def test_an_intent_tells_what_another_node_has(start_cluster, numbers, until):
    a, b = start_cluster(nodes=2).seats()
    some = numbers(8)
    a.put(some[:5])
    until(lambda: a.announced)
    until(lambda: b.holders(some[4]) == {"a"})
    # It looks for them for half a second, in which a busy machine may do nothing.
    answer = until(
        lambda: (
            (now := b.client.intents.declare(b.ns, Intent.PREFETCH, keys_of(some))).blocks and now
        )
    )
    assert (answer.outcome, answer.blocks, answer.missing) == (Outcome.ACCEPTED, 5, 3)
    until(lambda: b.here(some) == 5)
    assert b.client.intents.declare(b.ns, Intent.PIN, keys_of(some[5:])).outcome is Outcome.MISSING
    a.node.kill()
    answer = b.client.intents.declare(b.ns, Intent.PREFETCH, keys_of(some))
    assert (answer.outcome, answer.blocks) == (Outcome.ACCEPTED, 5), "they are here by now"


def test_what_a_session_has_left_is_not_forwarded(start_cluster, numbers, until):
    """A full node has others keep its coldest blocks, but not those that nobody is to continue."""
    world = start_cluster(nodes=2, memory="16MiB")
    a, b = world.seats()
    left = numbers(BLOCKS // 2)
    for at in range(0, len(left), 8):
        a.put(left[at : at + 8])
    a.client.sessions.turn(a.ns, "over", keys_of(left))
    until(lambda: a.client.ask_node(ShowSession("over")))
    a.client.sessions.turn(a.ns, "over", [], ended=True)
    until(lambda: a.stats.counters.expended == len(left))
    others = numbers(BLOCKS - 32)
    for at in range(0, len(others), 8):
        a.put(others[at : at + 8])
    gone = a.stats.counters.evicted_expendable
    assert gone >= BLOCKS // 2 - 48, "they were the first to go"
    until(lambda: a.announced)
    assert b.here(left) == 0
    assert a.here(others) + b.here(others) >= len(others), "and cost no other a place"


def test_a_clients_intents_for_other_nodes_are_for_its_own_tenant_only(tenants, numbers, until):
    world = tenants(nodes=2)
    red_a, red_b = (seat_of(world, node, "red") for node in "ab")
    world.until_all_see([red_a, red_b])
    blue_b, blue_other = (seat_of(world, "b", "blue", record) for record in (PLAIN, OTHER))
    some, others = numbers(8), numbers(8)
    keys = keys_of(some)
    blue_b.put(some)
    blue_other.put(others)
    until(lambda: blue_b.announced)
    digest, client = red_b.ns.digest, red_a.client
    assert digest == blue_b.ns.digest, "the namespaces of two tenants have one name"
    for intent in Intent:
        for_s = 60.0 if intent is Intent.KEEP else 0.0
        answer = client.intents.declare_on(digest, intent, keys, node="b", for_s=for_s)
        assert answer.outcome is Outcome.MISSING and answer.blocks == 0, intent
        for node in ("b", "a", ""):
            try:
                found = client.intents.declare_on(
                    blue_other.ns.digest, intent, keys_of(others), node=node, for_s=for_s
                )
            except InvalidRequest:
                continue
            assert intent is Intent.PREFETCH, "it opens what the cluster knows"
            assert found.outcome is Outcome.MISSING
    assert (blue_b.match(some), blue_other.match(others)) == (8, 8)
    # Its own, through the same node, and on it: and nothing of the other tenant's goes with it.
    red_b.put(some)
    assert red_a.client.intents.declare_on(digest, Intent.DROP, keys, node="b").blocks == 8
    assert (red_b.match(some), blue_b.match(some)) == (0, 8)
    red_a.put(some)
    for node in ("", "a"):
        answer = client.intents.declare_on(digest, Intent.PIN, keys, node=node, dry_run=True)
        assert (answer.outcome, answer.blocks) == (Outcome.ACCEPTED, 8)


def test_what_a_client_wants_of_another_node_is_bounded_as_on_its_own(start_cluster, numbers):
    a, b = start_cluster(nodes=2).seats()
    some = numbers(BLOCKS // 2)
    for at in range(0, len(some), 8):
        a.put(some[at : at + 8])
    keys = keys_of(some)
    for intent, more in (
        (Intent.PIN, {"hard": True}),
        (Intent.PIN, {}),
        (Intent.KEEP, {"for_s": 60.0}),
        (Intent.DROP, {}),
    ):
        own = a.client.intents.declare(a.ns, intent, keys, dry_run=True, **more)
        far = b.client.intents.declare_on(a.ns.digest, intent, keys, node="a", dry_run=True, **more)
        assert own == far and own.blocks, intent
    quota = a.client.intents.declare(a.ns, Intent.PIN, keys, hard=True, dry_run=True)
    assert quota.outcome is Outcome.CLIPPED and 0 < quota.blocks < len(keys)
    done = b.client.intents.declare_on(a.ns.digest, Intent.PIN, keys, node="a", hard=True)
    assert (done.outcome, done.blocks) == (Outcome.CLIPPED, quota.blocks)
    for client, node in ((a.client, ""), (b.client, "a")):
        again = client.intents.declare_on(
            a.ns.digest, Intent.PIN, keys[quota.blocks :], node=node, hard=True
        )
        assert (again.outcome, again.blocks) == (Outcome.REFUSED, 0)
    for wrong in (
        {"intent": Intent.KEEP},
        {"intent": Intent.DROP, "hard": True},
        {"intent": Intent.KEEP, "for_s": 1e9},
        {"intent": Intent.PIN, "for_s": 1.0},
        {"intent": Intent.PIN, "node": "z"},
        {"intent": Intent.PIN, "node": "a/../b"},
        {"intent": Intent.PIN, "keys": []},
    ):
        given = {"keys": keys, "node": "a", **wrong}
        with pytest.raises(InvalidRequest):
            b.client.intents.declare_on(
                a.ns.digest, given.pop("intent"), given.pop("keys"), **given
            )


def test_a_node_that_is_silent_delays_nobody_but_those_who_ask_it(tenants, numbers, until):
    """A flood of intents for it, by one tenant, and what others ask of the same daemon meanwhile."""
    world = tenants(nodes=3, environ={"KVPOOL_MEMBER_TTL_S": "60"})
    red = [seat_of(world, node, "red") for node in "abc"]
    world.until_all_see(red)
    blue, blue_c = (seat_of(world, node, "blue") for node in "ac")
    flooding = seat_of(world, "a", "red", connections_max=FLOOD)
    some = numbers(8)
    keys = keys_of(some)
    blue_c.put(some)
    until(lambda: blue_c.announced)
    digest = blue.ns.digest
    silent = world.node("b")

    def served_before_the_flood() -> bool:
        """Each of it waits for five seconds; a busy machine may need longer for the others, too."""
        silent.signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(FLOOD) as threads:
                flood = [
                    threads.submit(
                        flooding.client.intents.declare_on, digest, Intent.DROP, keys, node="b"
                    )
                    for _ in range(FLOOD)
                ]
                asked = blue.client.intents.declare_on(digest, Intent.PIN, keys, node="c")
                assert (asked.outcome, asked.blocks) == (Outcome.ACCEPTED, 8)
                assert blue.read(some) == 8, "and they are pulled from there"
                assert blue.client.intents.declare(blue.ns, Intent.PIN, keys).blocks == 8
                before = not all(each.done() for each in flood)
                silent.signal(signal.SIGCONT)
                errors = [error for each in flood if (error := each.exception()) is not None]
            assert all(isinstance(error, KvpoolError) for error in errors), errors
        finally:
            silent.signal(signal.SIGCONT)
        return before

    until(served_before_the_flood)
    until(lambda: flooding.client.intents.declare_on(digest, Intent.DROP, keys, node="b"))
    assert blue.client.available, "and the daemon is not taken for dead"
    assert flooding.client.available
