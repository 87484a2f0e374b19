"""Lookups of engines whose ranks are on several nodes: each rank leases at its own node's daemon.

The scheduler reaches no daemon but its own, so it asks through the ranks: a question goes out with a step's plan, and
each rank's answer comes back with its report. Usable is what all of them have. For the scheduling thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.engine_plugins.vllm.following import Following
from kvpool.engine_plugins.vllm.plan import LookupJob
from kvpool.engine_plugins.vllm.scheduler.request_state import Question, RankLease, Shared
from kvpool.types import KEY_BYTES, PartKind, Recompute

ROUNDS_MAX = 4
"""How often ranks are asked again for the prefix that all of them have, until they agree on one."""


@dataclass(eq=False, repr=False, slots=True)
class RankLookups:
    """Asks all ranks.

    Ranks wait for blocks of other nodes as long as requests do, and their answers may take a request's time-out longer.
    """

    _shared: Shared
    _windows: bool = field(init=False)
    """Whether a prefix may be usable though a shorter one is not."""
    _open: dict[int, Question] = field(default_factory=dict, init=False)
    _lookups: list[LookupJob] = field(default_factory=list, init=False)
    _released: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        rules = self._shared.engine.rules
        self._windows = any(rule.kind is not PartKind.FULL for rule in rules)

    def ask(
        self,
        start: int,
        keys: bytes,
        recompute: Recompute | None,
        following: Following | None,
        trace: str,
    ) -> Question:
        wait_s = self._shared.config.pull_wait_s if following is None else following.follow_s
        until = self._shared.clock() + wait_s + self._shared.config.request_timeout_s
        question = Question(start, keys, until, recompute, following, trace)
        self._ask(question)
        return question

    def _ask(self, question: Question) -> None:
        question.job = next(self._shared.jobs)
        question.rounds += 1
        question.since, question.answers = self._shared.clock(), []
        self._open[question.job] = question
        wait_s = self._shared.config.pull_wait_s if question.rounds == 1 else 0.0
        following = question.following if question.rounds == 1 else None
        self._lookups.append(
            LookupJob(
                question.job,
                question.keys,
                self._shared.config.lease_s,
                wait_s,
                question.recompute,
                following,
                question.trace,
            )
        )

    def note(self, answers: Mapping[int, Sequence[int]]) -> None:
        """What ranks reported: for each lookup, how many blocks some of them have."""
        for job, blocks in answers.items():
            if job in self._open:
                self._open[job].answers += blocks

    def ended(self, question: Question) -> bool:
        """Whether the answer is there, or its time is over. Asks again where the ranks have different prefixes."""
        if self._shared.clock() >= question.until:
            return True
        if len(question.answers) < self._shared.engine.ranks:
            return False
        blocks = min(question.answers)
        agreed = not self._windows or blocks == max(question.answers)
        # Ranks that waited for blocks may have leased them long after they were asked, or long before now.
        fresh = self._shared.clock() - question.since < self._shared.config.lease_s / 4
        if (agreed and fresh) or not blocks or question.rounds == ROUNDS_MAX:
            return True
        self.drop(question)
        question.keys = question.keys[: blocks * KEY_BYTES]
        self._ask(question)
        return False

    def lease(self, question: Question) -> RankLease | None:
        """Of an ended question; None: a miss, of which the ranks hold nothing any more."""
        answers = question.answers
        blocks = min(answers) if len(answers) == self._shared.engine.ranks else 0
        if not blocks or (self._windows and blocks != max(answers)):
            self.drop(question)
            return None
        del self._open[question.job]
        return RankLease(question.job, blocks, question.since + self._shared.config.lease_s)

    def drop(self, question: Question) -> None:
        """Nobody waits for it any more."""
        if self._open.pop(question.job, None) is not None:
            self._released.append(question.job)

    def release(self, lease: RankLease) -> None:
        self._released.append(lease.job)

    @property
    def has_work(self) -> bool:
        return bool(self._lookups or self._released)

    def take(self) -> tuple[list[LookupJob], list[int]]:
        """What the ranks are to do in this step: look up, and give back."""
        lookups, self._lookups = self._lookups, []
        released, self._released = self._released, []
        return lookups, released
