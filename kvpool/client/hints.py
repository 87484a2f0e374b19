"""What a client says of sessions and intents, for blocks of whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.client.namespaces import Requests
from kvpool.decoding import decode_json, finite
from kvpool.types import Intent, IntentAnswer, Keys, Namespace, check_digest, pack_keys
from kvpool.wire import client as client_wire

INTENT_S = 10.0
"""For pins on disks, and the answers of others."""


class Sessions:
    """Sessions, their turns and requests. All are hints: they drop nothing, work in the client's own tenant only, and are
    skipped while all connections are busy; an unreachable daemon is no error.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def turn(
        self,
        ns: Namespace,
        session: str,
        keys: Keys,
        *,
        agent: str = "",
        ended: bool = False,
        shared: bool = False,
    ) -> None:
        """A turn of a session has used these blocks: its prompt's and, if stored, its answer's, from the first on.

        Blocks of the session's turn before that this one does not use, and all of a session that has ended, are evicted
        before others.

        session, agent: at most 256 characters; `agent` is a strand of the session whose turns follow one another. keys:
        of one chain. ended: there will be no further turn. shared: several
        conversations may have this name, so a turn that has less than half of the blocks of the one before leaves nothing.
        """
        fields = session, pack_keys(keys), agent, ended, shared
        self._requests.hint_in(ns, client_wire.SessionTurn, *fields)

    def end(self, session: str, nodes: Sequence[str] = ()) -> None:
        """End a session on these nodes, at most 16, or on the client's own if there are none.

        Where the session is not known it changes nothing.
        """
        self._requests.hint(client_wire.EndSessionOn(session, list(nodes)))

    def end_request(self, ns: Namespace, request: str, *, session: str = "") -> None:
        """This request has ended: its receipt says so. What is still stored on its behalf is added.

        request: as in `Client.acquire` and `put`. session: that it was a turn of.
        """
        self._requests.hint_in(ns, client_wire.EndRequest, request, session)


class Intents:
    """What this client wants for blocks of a prompt, or of a session.

    The daemon bounds it: pins by the tenant's quotas, what is kept by a share of the memory, and what is prefetched by
    the room that there is without the eviction of others' blocks. Too much is clipped, at whole blocks, from the
    first one on: it never fails for that. The answer tells for how many blocks it holds.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def declare(
        self,
        ns: Namespace,
        intent: Intent,
        keys: Keys = b"",
        *,
        session: str = "",
        hard: bool = False,
        for_s: float = 0.0,
        dry_run: bool = False,
    ) -> IntentAnswer:
        """Declare an intent on this node.

        intent: to pin them softly, or with `hard` never to evict them; to unpin; to keep them in memory for
            `for_s` seconds, at most seven days; to prefetch them into memory, which goes on after the answer; to
            expend them, so that they go before others until they are read; to drop them from this node. Dropped are none
            with a hard pin.
        keys: of a prompt, from its first block on; or else session: see `Sessions.turn`, all its agents in this
            namespace. What other sessions use too is neither expended nor dropped with it.
        dry_run: only answer.
        Raises `InvalidRequest` and `Unavailable`.
        """
        seconds = finite(for_s, "for_s")
        fields = str(intent), pack_keys(keys), session, hard, seconds, dry_run
        answer = self._requests.ask_in(ns, client_wire.Intend, *fields, wait_s=INTENT_S)
        return _decoded(answer)

    def declare_on(
        self,
        digest: bytes,
        intent: Intent,
        keys: Keys,
        *,
        node: str = "",
        hard: bool = False,
        for_s: float = 0.0,
        dry_run: bool = False,
    ) -> IntentAnswer:
        """The same for blocks of a prompt, on another node, in a namespace that this client need not open.

        digest: of the namespace, which must be open on that node, unless it is to prefetch. node: its name; empty: this
        client's. Raises `InvalidRequest`, also for a node that is not there, and `Unavailable`.
        """
        fields = 0, str(intent), pack_keys(keys), "", hard, finite(for_s, "for_s"), dry_run
        message = client_wire.Intend(*fields, check_digest(digest), node)
        return _decoded(self._requests.ask(message, INTENT_S))


def _decoded(answer: Any) -> IntentAnswer:
    return decode_json(answer.data, IntentAnswer, "an answer to an intent of this version")
