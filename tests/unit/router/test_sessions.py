"""What daemons hear of sessions from a router: who is told, what, and what is lost."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvpool.errors import Unavailable
from kvpool.router.http.session_hints import SessionHint
from kvpool.router.records.metrics import Metrics
from kvpool.router.requests.sessions import AGENTS_MAX, NEWS_MAX, SessionBook, Sessions
from tests.support.stats import value_of

A, B, C = (frozenset({name}) for name in "abc")
Told = tuple[str, tuple[str, ...], dict[str, Any]]


class Link:
    """Stands for the daemon's link and its client."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.broken = False
        self.sessions = self

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        if self.broken:
            raise Unavailable("the daemon is away")
        return question(self)

    def end(self, session: str, nodes: tuple[str, ...]) -> None:
        self.told.append((session, tuple(sorted(nodes))))


def run(work: Callable[[Sessions], None], *, broken: bool = False) -> tuple[list[Told], Metrics]:
    link, metrics = Link(), Metrics()
    link.broken = broken

    async def main() -> None:
        sessions = Sessions(link, metrics)  # type: ignore[arg-type]
        work(sessions)
        if (telling := sessions._telling) is not None:
            await telling
        await sessions.close()

    asyncio.run(main())
    return link.told, metrics


def news(metrics: Metrics, outcome: str) -> float:
    return value_of(metrics.session_news.labels(outcome))


def test_a_session_leaves_the_nodes_that_no_strand_of_it_uses() -> None:
    book = SessionBook()
    assert book.turn("t", "s", "", A | B) == frozenset()
    assert book.turn("t", "s", "", B | C) == A
    assert book.turn("t", "s", "sub", A) == frozenset()
    assert book.turn("t", "s", "sub", C) == A
    assert book.turn("t", "s", "sub", A) == frozenset(), "the main strand is still there"
    assert book.turn("other", "s", "", B) == frozenset()
    assert book.end("t", "s") == A | B | C
    assert book.end("t", "s") == frozenset()
    assert book.end("other", "s") == B
    assert book.end("nobody", "s") == frozenset()


def test_a_tenant_with_many_sessions_forgets_its_own() -> None:
    book = SessionBook(sessions_max=2)
    book.turn("quiet", "s", "", A)
    for number in range(10):
        book.turn("loud", str(number), "", B)
    assert [bool(book.end("loud", str(number))) for number in range(10)] == [False] * 8 + [True] * 2
    assert book.end("quiet", "s") == A


def test_a_session_with_many_agents_forgets_the_oldest() -> None:
    book = SessionBook()
    for number in range(AGENTS_MAX + 1):
        book.turn("", "s", str(number), A if number == 0 else B)
    assert book.end("", "s") == B


def test_a_session_that_goes_on_elsewhere_has_ended_where_it_was() -> None:
    def work(sessions: Sessions) -> None:
        sessions.answered("", SessionHint("s"), A)
        sessions.answered("", SessionHint("s"), B)

    told, _ = run(work)
    assert told == [("s", ("a",))]


def test_the_end_is_told_to_all_its_nodes_once() -> None:
    def work(sessions: Sessions) -> None:
        sessions.answered("t", SessionHint("t/s", "one"), A)
        sessions.answered("t", SessionHint("t/s", "two"), B)
        assert not sessions.end("other", "s")
        assert sessions.end("t", "s")
        assert not sessions.end("t", "s")
        sessions.answered("t", SessionHint("t/s"), A)
        sessions.answered("t", SessionHint("t/s", ended=True), C)

    told, metrics = run(work)
    assert told == [("t/s", ("a", "b")), ("t/s", ("a", "c"))]
    assert news(metrics, "told") == 2


def test_engines_without_the_plugin_are_no_places_of_a_session() -> None:
    told, _ = run(lambda sessions: sessions.answered("", SessionHint("s"), frozenset()))
    assert told == []


def test_a_daemon_that_is_away_costs_a_count() -> None:
    told, metrics = run(
        lambda sessions: sessions.answered("", SessionHint("s", ended=True), A), broken=True
    )
    assert (told, news(metrics, "lost")) == ([], 1)


def test_very_many_at_once_are_lost_and_counted() -> None:
    def work(sessions: Sessions) -> None:
        for number in range(NEWS_MAX + 10):
            sessions.answered("", SessionHint(str(number), ended=True), A)

    told, metrics = run(work)
    assert (len(told), news(metrics, "told"), news(metrics, "lost")) == (NEWS_MAX, NEWS_MAX, 10)


def test_a_name_that_conversations_share_has_left_no_node() -> None:
    def work(sessions: Sessions) -> None:
        for nodes in (A, B):
            sessions.answered("t", SessionHint("t/key", shared=True), nodes)

    told, _ = run(work)
    assert told == []
