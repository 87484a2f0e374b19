"""Requests from their first order to their last token: their decode engines and the memory reserved there.

Memory is reserved for the whole context before a prompt is started. When a decode engine is nearly full, a
little more than it has is promised: those prompts are computed into the pool meanwhile, and are *parked* if
they are done before there is room. The first parked request without room keeps one engine, so that
smaller ones do not take freed memory forever. No I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.scheduler.decode import DecodeRule, context_tokens
from kvpool.scheduler.values import Engine, Request, Saves


@dataclass(slots=True)
class Answer:
    """decode: where memory is reserved for it. sent: whether the request was sent there, for its answer. follows:
    whether that engine follows the prompt now. computed_by: the engine that computed the end of the prompt; saves: what
    it said of the blocks, None: nothing.
    failures: failed orders. avoid: engines where one failed. numbered: the number of its last order.
    """

    request: Request
    decode: Engine | None = None
    sent: bool = False
    follows: bool = False
    computed_by: Engine | None = None
    saves: Saves | None = None
    failures: int = 0
    avoid: set[str] = field(default_factory=set)
    numbered: int = 0

    @property
    def needed(self) -> int:
        """Tokens of memory."""
        return context_tokens(self.request)


class Answers:
    """Keeps `decodes`, `context_tokens`, `held_tokens` and `follows` of engines."""

    def __init__(self, rule: DecodeRule) -> None:
        self._rule = rule
        self._answers: dict[Hashable, Answer] = {}
        self._parked: dict[Hashable, Answer] = {}
        self.kept: frozenset[str] = frozenset()
        """Engines whose memory is kept for a parked request."""

    def __iter__(self) -> Iterator[Answer]:
        return iter(list(self._answers.values()))

    @property
    def parked(self) -> list[Answer]:
        """Parked requests, whose prompt is computed: by priority, then in order of completion."""
        return sorted(self._parked.values(), key=lambda answer: -answer.request.priority)

    def get(self, ident: Hashable) -> Answer | None:
        return self._answers.get(ident)

    def waits(self, ident: Hashable) -> bool:
        """Whether it is parked."""
        return ident in self._parked

    def begin(self, request: Request) -> Answer:
        """The answer of this request, which gets an order."""
        return self._answers.setdefault(request.ident, Answer(request))

    def end(self, ident: Hashable) -> Answer | None:
        """Remove the request; None if it is unknown."""
        answer = self._answers.pop(ident, None)
        if answer is not None:
            self._parked.pop(ident, None)
            self.release(answer)
        return answer

    def reserve(self, answer: Answer, engine: Engine) -> None:
        """Reserve memory there; a reservation elsewhere ends."""
        self.release(answer)
        answer.decode = engine
        engine.decodes += 1
        engine.context_tokens += answer.needed

    def release(self, answer: Answer) -> None:
        """End its reservation."""
        engine, answer.decode = answer.decode, None
        if engine is None:
            return
        self.followed(answer, engine)
        if answer.sent:
            answer.sent = False
            engine.held_tokens -= answer.needed
        engine.decodes -= 1
        engine.context_tokens -= answer.needed

    def unreserve(self, engine: Engine) -> list[Hashable]:
        """Release requests that were to decode there and were not sent yet; return those that were sent."""
        sent = []
        for answer in self:
            if answer.decode is engine:
                if answer.sent:
                    sent.append(answer.request.ident)
                else:
                    self.release(answer)
        return sent

    def send(self, answer: Answer, engine: Engine, *, follows: bool) -> None:
        """It is sent to the engine with its reservation."""
        assert answer.decode is engine, "its memory is elsewhere"
        self._parked.pop(answer.request.ident, None)
        answer.sent = True
        engine.held_tokens += answer.needed
        if follows:
            answer.follows = True
            engine.follows += 1

    def followed(self, answer: Answer, engine: Engine) -> None:
        """Its prompt is no longer followed."""
        if answer.follows:
            answer.follows = False
            engine.follows -= 1

    def park(self, answer: Answer) -> None:
        self._parked[answer.request.ident] = answer

    def has_room(self, answer: Answer, engine: Engine, *, share: float = 1.0) -> bool:
        """Whether its context fits into this share of the memory, together with all requests sent there."""
        most = share * engine.capacity_tokens
        return engine.has_room(answer.needed, engine.held_tokens, most, waits=True)

    def may_follow(self, answer: Answer, engine: Engine) -> bool:
        """Whether its prompt may be followed there while it is computed."""
        return (
            not answer.sent
            and engine.follows < engine.follows_max
            and engine.name not in self.kept
            and self.has_room(answer, engine, share=self._rule.follow_below)
        )

    def reservable(self, request: Request, engines: Sequence[Engine]) -> bool:
        """Whether memory on one of these may be promised to it, or it has a reservation."""
        answer = self._answers.get(request.ident)
        if answer is not None and answer.decode is not None:
            return True
        needed = context_tokens(request)
        return any(self._rule.promises(engine, needed) for engine in engines)


def emptiest(engines: Sequence[Engine], request: Request) -> Engine | None:
    """Of those that are large enough for it, the one with the most free memory."""
    needed = context_tokens(request)
    large = [engine for engine in engines if engine.capacity_tokens >= needed]
    return max(
        large, key=lambda e: e.capacity_tokens - e.context_tokens - e.others_tokens, default=None
    )
