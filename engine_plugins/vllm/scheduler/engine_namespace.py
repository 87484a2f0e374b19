"""The namespace that an engine reads and writes: for its present weights, in an epoch that nobody has ended.

The namespace names the engine's weights. At a reset they may be about to change, and the pool is left alone
until the ranks have looked at them in the first step after it: with the weights of its start the engine is in the
namespace of its start, with others in one that is named by them. Whoever ends the namespace's epoch for all
(`Client.namespaces.reset`) fences the engine out until its own reset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from kvpool.engine_plugins.vllm.config import CHANGED_TTL_S
from kvpool.engine_plugins.vllm.events import Publisher
from kvpool.engine_plugins.vllm.plan import Opening
from kvpool.engine_plugins.vllm.scheduler.ahead import Ahead
from kvpool.engine_plugins.vllm.scheduler.presence import Presence
from kvpool.engine_plugins.vllm.scheduler.pulls import Pulls
from kvpool.engine_plugins.vllm.scheduler.request_state import Shared
from kvpool.errors import KvpoolError
from kvpool.types import Namespace, NamespaceRecord, PartKind

log = logging.getLogger("kvpool.vllm")


@dataclass(eq=False, repr=False, slots=True)
class EngineNamespace:
    """Opens the namespace of an engine's weights, here and on all ranks, and announces the engine. Scheduling thread only.

    new_weights: names weights that cannot be seen, as nobody else does.
    """

    _shared: Shared
    _new_weights: Callable[[], str]
    _pulls: Pulls | None
    _ahead: Ahead | None
    _make_record: Callable[[str], NamespaceRecord] | None = field(default=None, init=False)
    _first_weights: str = field(default="", init=False)
    _part_groups: list[int] = field(default_factory=list, init=False)
    _block_bytes: int = field(default=0, init=False)
    _weights: int = field(default=-1, init=False)
    _opening: Opening | None = field(default=None, init=False)
    _unsure: bool = field(default=False, init=False)
    """Which weights there are since the last reset."""
    _asks: bool = field(default=False, init=False)
    _shut: bool = field(default=False, init=False)
    _presence: Presence | None = field(default=None, init=False)
    namespace: Namespace | None = field(default=None, init=False)
    """The open namespace, or None before `begin`."""
    whole_parts: list[int] = field(default_factory=list, init=False)
    """Parts that have each block of a prefix."""
    generation: int = field(default=0, init=False)
    """Number of openings on the ranks."""
    last_reset: int = field(default=0, init=False)
    """Number of the last reset, failed ones counted too; 0 before the first."""
    pinned: bool = field(default=True, init=False)
    """Whether all ranks may copy from and to the pool's memory."""

    @property
    def open(self) -> Namespace:
        """The open namespace. Only for what happens after `begin`."""
        assert self.namespace is not None, "nothing is asked of the pool before it is known"
        return self.namespace

    @property
    def usable(self) -> bool:
        """Whether blocks may be looked up and saved: the namespace is known, with the engine's weights and epoch, and
        the ranks may copy.
        """
        return self.namespace is not None and self.pinned and not self._shut and not self._unsure

    @property
    def has_work(self) -> bool:
        return self._opening is not None

    def begin(
        self, make_record: Callable[[str], NamespaceRecord], weights: str, groups: Sequence[int]
    ) -> None:
        """Open the namespace of the weights that the engine began with. Raises what `Client.open` raises.

        make_record: the namespace with weights of that name; with an empty one, with the first weights.
        weights: the digest of the first weights. groups: vLLM's, of each part.
        """
        self._make_record, self._first_weights = make_record, weights
        self._part_groups = list(groups)
        self._enter(self._shared.client.open(make_record("")))

    def ask_weights(self) -> bool:
        """Whether the weights are not known since a reset. The next step asks the ranks then."""
        if self._unsure and self._make_record is not None and not self._shut:
            # The engine is about to compute, so the weights are in place again.
            self._asks = True
            return True
        return False

    def use_weights(self, weights: str | None) -> None:
        """Learn the weights since the last reset, if they were asked for: a digest, or empty if they cannot be seen."""
        if not self._unsure or weights is None or self._make_record is None:
            return
        name = "" if weights == self._first_weights else weights
        if not weights:
            name = self._new_weights()
            log.warning(
                "this engine's weights cannot be compared with those before its reset: it shares no more blocks with other "
                "engines until it is restarted"
            )
        self._unsure = False
        self._shared.counters.add(new_weights=bool(name))
        try:
            ttl_s = CHANGED_TTL_S if name else 0.0
            self._enter(self._shared.client.open(self._make_record(name), ttl_s=ttl_s))
        except KvpoolError as error:
            # Refused, for example since the tenant has too many namespaces open.
            self._shut = True
            self._shared.counters.add(failed_resets=1)
            log.warning("this engine does not use the pool until it is reset again: %s", error)

    def take(self) -> tuple[Opening | None, int]:
        """Return what the next step asks of the ranks: the namespace to open, and the reset whose weights are asked for, or 0."""
        if (
            self.namespace is not None
            and self._weights < 0
            and self._shared.client.namespaces.generation(self.namespace) >= 0
        ):
            self._open_on_ranks(self.namespace)  # the daemon has answered since
        opening, self._opening = self._opening, None
        asks, self._asks = self._asks, False
        return opening, self.last_reset if asks else 0

    def note_outdated(self, generations: Collection[int]) -> None:
        """Learn of which openings the epoch was ended from outside."""
        # While the ranks are asked for the weights, the namespace from before the reset is given up anyhow.
        if self.generation in generations and not self._shut and not self._unsure:
            self._shut = True
            self._shared.counters.add(shut_out=1)
            log.warning(
                "the epoch of this engine's namespace was ended from outside: it can neither load nor store blocks until "
                "it is reset (reset_prefix_cache with reset_connector) or restarted"
            )

    def reset(self, *, clean: bool) -> None:
        """Ask for the weights again. clean: whether the engine holds nothing of before; otherwise the pool is left alone."""
        self.last_reset += 1  # of a failed one too, so that what ranks say since the one before is none of its answer
        if clean:
            self._unsure, self._shut = True, False
            self._shared.counters.add(resets=1)
            return
        self._shut = True
        self._shared.counters.add(failed_resets=1)
        log.warning(
            "the engine was reset while it held blocks: it does not use the pool until it is reset again with "
            "no requests running"
        )

    def close(self) -> None:
        """Withdraw the engine from routers and daemon."""
        if self._presence is not None:
            self._presence.end()
            try:
                self._shared.client.engine.announce(self.open, None)
            except KvpoolError as error:
                log.warning(
                    "this engine stays announced to routers until its process ends: %s", error
                )
        if self._shared.engine.events is not None and self.namespace is not None:
            self._follow_events(self.namespace, Publisher(""))

    def _enter(self, namespace: Namespace) -> None:
        """Use a namespace in the epoch that it was just opened in, on all ranks."""
        left, self.namespace = self.namespace, namespace
        if left is not None and left.digest != namespace.digest:
            self._shared.client.namespaces.close(left)
            if self._ahead is not None:
                self._ahead.close_namespace(left)
        self._open_on_ranks(namespace)
        if self._pulls is not None:
            self._pulls.enter(namespace.record)
        self.whole_parts = [
            at for at, part in enumerate(namespace.parts) if part.kind is PartKind.FULL
        ]
        # A prefix needs few blocks of windows and states, however long it is.
        longer = [namespace.parts[at] for at in self.whole_parts] or namespace.parts
        self._block_bytes = sum(part.nbytes // part.stride for part in longer)
        if self._shared.engine.events is not None:
            self._follow_events(namespace, self._shared.engine.events)
        if self._shared.engine.record is not None and self._presence is None:
            self._presence = Presence(self._announce)
            self._presence.begin()

    def _open_on_ranks(self, namespace: Namespace) -> None:
        """Have the ranks open the namespace, with the weights that this half has it with."""
        self.generation += 1
        self._weights = self._shared.client.namespaces.generation(namespace)
        self._opening = Opening(self.generation, namespace.record, self._weights)
        if self._ahead is not None:
            self._ahead.enter(namespace.record, self._weights)

    def _announce(self) -> None:
        """Announce this engine to routers, in its current namespace. In the thread of `Presence`."""
        record = self._shared.engine.record
        assert record is not None, "the thread begins with a record"
        self._shared.client.engine.announce(
            self.open, replace(record, block_bytes=self._block_bytes)
        )

    def _follow_events(self, namespace: Namespace, events: Publisher) -> None:
        """Have the daemon follow this engine's KV events. The client repeats that itself."""
        groups = self._part_groups
        try:
            self._shared.client.engine.follow_events(
                namespace, events.endpoint, replay=events.replay, topic=events.topic, groups=groups
            )
        except KvpoolError as error:
            log.warning("the daemon does not subscribe to this engine's KV events: %s", error)
