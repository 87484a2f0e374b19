"""Failed calls of one request: what they are evidence of, and which error the client gets in the end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import xxhash

from kvpool.errors import KvpoolError
from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.http.memory import NoRoom
from kvpool.router.requests.calls import Call
from kvpool.router.requests.request_notes import RequestNotes
from kvpool.router.upstream.evidence import Evidence, for_client
from kvpool.router.upstream.upstream import EngineFailed, EngineRefused, Exhausted


class DeadlinePassed(KvpoolError):
    """The request exceeded its deadline."""

    code = "deadline"


class GivenUp(KvpoolError):
    """No engine could serve it. The message is the last engine's."""

    code = "given_up"


@dataclass(eq=False, repr=False, slots=True)
class Failures:
    """The failures of one request. The roster is told of them."""

    _roster: EngineRoster
    _notes: RequestNotes
    _raw: bytes
    """The request's body, by which the roster tells requests apart."""
    why: str = field(default="", init=False)
    """The message of the last one."""
    refused: tuple[Call, EngineRefused] | None = field(default=None, init=False)
    """An engine's refusal, while another engine is asked."""
    _evidence: Evidence = field(default_factory=Evidence, init=False)

    def add(self, error: EngineFailed | EngineRefused) -> None:
        """Note a call's failure, for which another engine is asked."""
        self._roster.failed(error)
        self._notes.note("failed", why=str(error))
        self.why = str(error)

    def blame(self, error: EngineFailed, *, begun: bool) -> None:
        """Blame engines for a failure. begun: whether the client has a part of this call's answer."""
        self._blame(self._evidence.failed(error, begun=begun))

    def answered(self, engine: str) -> None:
        """Blame engines for what this one has done and they have not."""
        self._blame(self._evidence.answered(engine))

    def computed(self, engine: str) -> None:
        """Note that an engine has computed a part of the prompt, which another one may have refused."""
        if self.refused is not None and not self.refused[0].answers:
            self.refused = None
        self._roster.succeeded(engine)
        self.answered(engine)

    def ending(self, error: KvpoolError, *, begun: bool) -> KvpoolError:
        """Return the error that ends the request: a kept refusal rather than one that says less."""
        # A raised error holds the request by its frames, so the request must not hold the error.
        kept, self.refused = self.refused, None
        if kept is None or begun or not for_client(kept[1].status):
            return error
        says_less = isinstance(error, GivenUp | DeadlinePassed | NoRoom | Exhausted)
        return kept[1] if says_less else error

    def _blame(self, engines: Collection[str]) -> None:
        if engines:
            self._roster.blame(engines, xxhash.xxh3_64_intdigest(self._raw))
