"""Pulls of blocks that are not in this node's memory: the daemon brings them while the engine continues its
steps.

The scheduling thread waits for no network. It passes the keys of a prompt to one of a few threads, which
ask over a client of their own, and checks at every step whether the answer is there. That answer is only
a count: the lease is taken by the scheduling thread's own client, so that loaded blocks are of the epoch
of that client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.following import Following
from kvpool.engine_plugins.vllm.plan import QUIET_S
from kvpool.errors import KvpoolError
from kvpool.retry import Backoff
from kvpool.types import KEY_BYTES, Namespace, NamespaceRecord, Recompute

if TYPE_CHECKING:
    from kvpool.client import Client

OTHERS_S = 5.0
"""How long a lone node is assumed to stay alone: requests then skip a useless round trip."""
FOLLOW_TURN_S = 5.0
"""How long a daemon is asked to follow a prompt at a time: then it is checked whether the request still waits."""
GIVES_UP_S = 1.0
"""A daemon that ends sooner than this, and than requested, has a reason, and is not asked again."""
IDLE_S = 0.001
"""How long a step in which nothing runs waits for a pull, so that the engine does not spin."""
FOLLOW_IDLE_S = 0.005
"""The same if everything that it waits for is computed elsewhere, which takes longer. New requests wait as long."""


@dataclass(eq=False)
class Pull:
    """One request's wait for blocks of other nodes.

    start: chain index of the first key. begun: when the request was looked up. wait_s: how long it waits.
    following: where the keys' blocks are being computed.
    recompute: the price of computing the keys' blocks instead, where it is known.
    life: of the device memory that the engine reads by itself: what is there needs not be brought.
    trace: the request's W3C `traceparent`, or empty.
    future: the usable blocks of the keys, once a thread was free to ask. answered: when it had them.
    dropped: nobody waits for it any more.
    """

    start: int
    keys: bytes
    begun: float
    wait_s: float
    following: Following | None = None
    recompute: Recompute | None = None
    life: int = 0
    trace: str = ""
    future: Future[int] | None = None
    answered: float | None = None
    dropped: bool = False

    @property
    def takes_long(self) -> bool:
        """Whether it waits for an engine that computes."""
        return self.following is not None and not self.following.computed


class Pulls:
    """Asks for pulls, a bounded number at a time. For the scheduling thread only.

    client: for the threads only; it may wait longer than the scheduling thread's.
    threads: as many as pulls and followed prompts at a time. A request waits for `pull_wait_s`, for a free thread
    included, unless it says so itself (`Following`).
    """

    def __init__(
        self, client: Client, threads: Executor, config: PluginConfig, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._threads = threads
        self._wait_s = config.pull_wait_s
        self._clock = clock
        self._free = threading.Semaphore(config.pulls_max)
        self._free_to_follow = threading.Semaphore(config.follows_max)
        self._namespace: Future[Namespace] | None = None
        self._alone_until = self._known_until = 0.0
        self._quiet = Backoff(*QUIET_S)

    def enter(self, record: NamespaceRecord) -> None:
        """Open the namespace, in its present epoch, for all pulls that begin later."""
        self._namespace = self._threads.submit(self._open, record, self._namespace)

    def begin(
        self,
        start: int,
        keys: bytes,
        recompute: Recompute | None = None,
        life: int = 0,
        following: Following | None = None,
        trace: str = "",
    ) -> Pull | None:
        """Begin to bring a prefix here; None where nobody could have it, or pulls were in vain of late.

        following: it is being computed, perhaps on this very node: then it is waited for, whatever it costs.
        """
        now = self._clock()
        if following is not None:
            pull = Pull(start, keys, now, following.follow_s, following, trace=trace)
        elif now < self._alone_until or not self._quiet.due(now):
            return None
        else:
            pull = Pull(start, keys, now, self._wait_s, None, recompute, life, trace)
        self._ask(pull, now)
        return pull

    def ended(self, pull: Pull) -> bool:
        """Whether the answer is there, or its time is over. Called at every step of the request's wait."""
        now = self._clock()
        self._ask(pull, now)
        answered = pull.future is not None and pull.future.done()
        return answered or now >= pull.begun + pull.wait_s

    def blocks(self, pull: Pull) -> int | None:
        """How many blocks of an ended pull's keys are here; None when that was not heard in time."""
        if pull.future is None or not pull.future.done():
            return None
        return pull.future.result()

    def note(self, pull: Pull, gained: int) -> float:
        """Learn from an ended pull, so that requests do not repeatedly wait in vain.

        Uses the time of the pull, not of the engine's polling.
        """
        answered = pull.answered
        taken = pull.wait_s if answered is None else min(answered - pull.begun, pull.wait_s)
        if pull.following is None:
            in_vain = not gained and taken >= pull.wait_s / 2
            self._quiet.note(self._clock(), failed=in_vain)
        return taken

    def wait(self, pulls: Iterable[Pull]) -> None:
        """Wait a moment for any of these. For steps in which nothing else runs."""
        asked = [(pull, pull.future) for pull in pulls if pull.future is not None]
        if asked:
            long = all(pull.takes_long for pull, _ in asked)
            seconds = FOLLOW_IDLE_S if long else IDLE_S
            wait([future for _, future in asked], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Cancel follows, wait for running pulls (each has a deadline), drop waiting ones."""
        self._client.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _ask(self, pull: Pull, now: float) -> None:
        """Hand a pull to a thread, if one is free and there is time left."""
        left = pull.begun + pull.wait_s - now
        free = self._free_to_follow if pull.takes_long else self._free
        if pull.future is not None or left <= 0 or not free.acquire(blocking=False):
            return
        assert self._namespace is not None, "a namespace is entered before anything is looked up"
        pull.future = self._threads.submit(self._pull, self._namespace, pull, left)
        pull.future.add_done_callback(lambda _: free.release())

    # --- on a thread of the pool ----------------------------------------------------------------

    def _open(self, record: NamespaceRecord, before: Future[Namespace] | None) -> Namespace:
        namespace = self._client.open(record)
        # What still pulls into it opens it again.
        if before is not None and before.done() and before.exception() is None:
            left = before.result()
            if left.digest != namespace.digest:
                self._client.namespaces.close(left)
        self._alone()  # now, rather than while the first request waits
        return namespace

    def _pull(self, opened: Future[Namespace], pull: Pull, wait_s: float) -> int:
        """The usable blocks of the keys afterwards; 0 where the daemon does not say."""
        blocks = 0
        try:
            if pull.following is not None:
                blocks = self._follow(opened.result(), pull, pull.following.source, wait_s)
            elif not self._alone():
                blocks = self._client.pull(
                    *(opened.result(), pull.keys),
                    wait_s=wait_s,
                    recompute=pull.recompute,
                    life=pull.life,
                    trace=pull.trace,
                )
        except KvpoolError:
            pass  # the request computes, after what may have been a long wait: see `note`
        pull.answered = self._clock()
        return blocks

    def _follow(self, namespace: Namespace, pull: Pull, source: str, wait_s: float) -> int:
        now = self._clock()
        ends = now + wait_s
        blocks = 0
        while now < ends and not pull.dropped:
            asked, turn_s = now, min(FOLLOW_TURN_S, ends - now)
            try:
                blocks = self._client.follow(
                    namespace, pull.keys, wait_s=turn_s, source=source, trace=pull.trace
                )
            except KvpoolError:
                break  # what came in earlier turns is here
            now = self._clock()
            whole = len(pull.keys) == blocks * KEY_BYTES
            if whole or now - asked < min(GIVES_UP_S, turn_s):
                break
        return blocks

    def _alone(self) -> bool:
        """Whether memory is all there is, as the daemon said within the last `OTHERS_S`."""
        now = self._clock()
        if now >= self._known_until:
            try:
                alone = not self._client.stats().sources
            except KvpoolError:
                return False  # it is asked again; a pull has its deadline
            self._known_until = now + OTHERS_S
            self._alone_until = self._known_until if alone else 0.0
        return now < self._alone_until
