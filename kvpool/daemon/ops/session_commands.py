"""Operators' commands about sessions, and intents for their blocks or a prompt's. Event loop only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.ops.commands import Asker, namespace_of, unpacked
from kvpool.daemon.ops.event_log import EventLog
from kvpool.daemon.ops.intents import Intents, parse_wanted
from kvpool.daemon.ops.listing import describe_chains, describe_session
from kvpool.daemon.ops.session_turns import SessionTurns
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.types import KEY_BYTES, Intent, Outcome
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import SessionDetail, Sessions

LIST_SESSIONS_MAX = 1000
CLIENT = (
    "client "  # before the name of a client, where it is told on whose behalf something is asked
)


@dataclass(frozen=True, eq=False, slots=True)
class SessionCommands:
    """Answers commands about sessions and intents."""

    cluster: ClusterMember
    tiers: Tiers
    sessions: SessionTurns
    intents: Intents
    journal: EventLog
    clock: Callable[[], float]

    async def _list_sessions(self, who: Asker, m: operator_wire.ListSessions) -> Any:
        count = min(max(1, m.count), LIST_SESSIONS_MAX)
        found = self.sessions.known.named(who.tenant, m.after, count + 1)
        now = self.clock()
        some = [describe_session(session, now) for session in found[:count]]
        return Sessions(some, len(found) > count)

    async def _show_session(self, who: Asker, m: operator_wire.ShowSession) -> Any:
        session = self.sessions.known.get(who.tenant, m.session)
        if session is None:
            return None
        about = msgspec.structs.asdict(describe_session(session, self.clock()))
        return SessionDetail(
            **about, chains=await describe_chains(session, self.tiers.node, self.tiers.ssd)
        )

    async def _end_session(self, who: Asker, m: operator_wire.EndSession) -> int:
        known = self.sessions.end(who.tenant, m.session)
        if known:
            self.journal.audit(who.by, "end session", tenant=who.tenant.name, session=m.session)
        return int(known)

    async def _intend_blocks(self, who: Asker, m: operator_wire.IntendBlocks) -> Any:
        unpacked(m.keys, frame.KEYS_MAX)
        wanted = parse_wanted(m.intent, hard=m.hard, for_s=m.for_s, dry_run=m.dry_run)
        if wanted.intent is Intent.PREFETCH and m.digest and not m.session:
            # A new node is filled before its engines start.
            self.cluster.namespaces.open_known(who.tenant, m.digest)
        namespace = namespace_of(who.tenant, m.digest) if m.digest else None
        answer = await self.intents.answer(who.tenant, namespace, m.keys, m.session, wanted)
        # A client's are no operator's changes, and as many as it likes: they would push those out of the audit.
        changed = not m.dry_run and answer.outcome not in {Outcome.REFUSED, Outcome.MISSING}
        if changed and not who.by.startswith(CLIENT):
            named = {"namespace": m.digest.hex(), "keys": len(m.keys) // KEY_BYTES}
            named |= {"session": m.session} if m.session else {}
            self.journal.audit(
                who.by,
                m.intent,
                tenant=who.tenant.name,
                **named,
                blocks=answer.blocks,
                outcome=answer.outcome,
            )
        return answer
