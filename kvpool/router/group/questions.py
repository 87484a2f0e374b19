"""What this router answers to others, and what it tells and learns from them. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.group.messages import KindRow, Learned, Operated, Question, RequestRow
from kvpool.router.group.rows import request_of
from kvpool.router.records.explain import Accounts, dry_run
from kvpool.router.records.observations import learned
from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import Role


@dataclass(eq=False, repr=False, slots=True)
class RouterQuestions:
    """See `group.Questions`."""

    _scheduler: Scheduler
    _cluster: Cluster
    _roster: EngineRoster
    _accounts: Accounts
    _clock: Callable[[], float] = time.monotonic

    def answer(self, question: Question) -> bytes:
        """JSON; empty if it has none."""
        found: Any = None
        match question.what:
            case "engines":
                found = self._roster.engines()
            case "kinds":
                found = learned(self._cluster)
            case "explain" if question.request is not None:
                found = self._explain(question.request)
            case "account":
                account = self._accounts.get(question.name, question.tenant)
                found = None if account is None else account.plain(question.tenant)
        return b"" if found is None else msgspec.json.encode(found)

    def _explain(self, row: RequestRow) -> dict[str, Any]:
        now = self._clock()
        request = request_of(row, row.ident, self._roster.models.among, now)
        return dry_run(request, self._scheduler.explain(request, now))

    # ---- what the next leader is to know -----------------------------------------------------------

    def learned(self) -> Learned:
        kinds = {
            name: KindRow(
                kind.prefill.coefficients,
                kind.decode.coefficients,
                {tier: load.per_byte_s for tier, load in kind.loads.items()},
            )
            for name, kind in self._cluster.kinds.items()
        }
        engines = self._scheduler.engines.values()
        roles = {engine.name: engine.role.value for engine in engines if engine.flexible}
        return Learned(kinds, roles)

    def learn(self, learned: Learned) -> None:
        """It counts as assumed until this router measures more itself. Unknown kinds and engines are ignored."""
        for name, row in learned.kinds.items():
            if (kind := self._cluster.kinds.get(name)) is None:
                continue
            kind.prefill.assume(row.prefill)
            kind.decode.assume(row.decode)
            for tier, per_byte_s in row.loads.items():
                if tier in kind.loads:
                    kind.loads[tier].assume(per_byte_s)
        now = self._clock()
        for name, value in learned.roles.items():
            engine = self._scheduler.engines.get(name)
            if engine is None or not engine.flexible or not 0 < value <= Role.BOTH.value:
                continue
            if engine.role is not Role(value):
                self._scheduler.set_role(name, Role(value), now)

    def operate(self, operated: Operated) -> None:
        self._roster.operate(operated.engine, drains=operated.drains, weight=operated.weight)
