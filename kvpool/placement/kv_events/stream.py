"""An engine's stream of KV events: the meaning of its messages, and which of them apply. No I/O, no clock.

vLLM publishes batches of events over ZeroMQ as [topic, sequence number, payload]. Numbers count from 0
after each start of the engine, without gaps, but batches get lost: while nobody listens, and when a queue is
full. It keeps the last batches and repeats them on request (a *replay*: all that it still has from one number
on). Payloads are MessagePack: [time, [event, ...], rank], an event being a map with its `type`.

`Follower` converts messages to calls of an `EngineBlocks`:

    next in order              applied
    a gap, a lost connection   a replay is requested, from the last batch applied. If that comes with the
                               same time again, the rest fills the gap. If not, the engine
                               was restarted, and everything is replayed from 0
    older than the last one    ignored: a batch from before a restart, or a duplicate
    a replay that begins late, the blocks are forgotten, because any of them may have gone in the gap, and
    or fails, or no replays    collected again: from then on the engine holds at least those

An unreadable batch may have had any contents, so the blocks are forgotten, too.

Nothing here takes long: `Follower.work` applies a bounded number of blocks at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvpool.decoding import Finite, MsgpackDecoder
from kvpool.errors import ProtocolError
from kvpool.placement.kv_events.engine_blocks import EngineBlocks, short_hash

PAYLOAD_BYTES_MAX = 16 << 20
"""Of one batch: one step of an engine, some 5 bytes a token and 70 a removed block."""

HASHES_MAX = 1 << 16
"""In one event: a prompt of a million tokens in blocks of 16."""

WAITING_MAX = 1024
WAITING_BYTES_MAX = 32 << 20
"""Batches that are held back while a replay is under way. Further ones are replayed later."""

FUTILE_MAX = 3
"""Consecutive replays that fail or bring nothing of a gap, before it is given up."""

END = b"\xff" * 8
"""Instead of a sequence number: the replay is over."""

UNREADABLE = -1.0

_DEVICE_MEDIA = (None, "GPU")
_HASH_BYTES = (8, 64)
_MASK = (1 << 64) - 1


# ---- messages ------------------------------------------------------------------------------------------


_Hashes = Annotated[list[int | bytes], msgspec.Meta(max_length=HASHES_MAX)]


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Payload(msgspec.Struct, array_like=True, gc=False):
    ts: Finite
    events: list[msgspec.Raw]


class _AnyEvent(msgspec.Struct, gc=False):
    type: str


_decode_payload = MsgpackDecoder[_Payload](_Payload, "a batch of events")
_decode_event = MsgpackDecoder[_Stored | _Removed | _Cleared](
    _Stored | _Removed | _Cleared, "an event"
)
_decode_any_event = MsgpackDecoder[_AnyEvent](_AnyEvent, "an event")
_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message. Its events are decoded at their turn.

    at: the engine's clock when it was made; `UNREADABLE` if the payload is invalid.
    """

    seq: int
    at: float
    events: Sequence[msgspec.Raw]
    nbytes: int


def read_batch(frames: Sequence[bytes]) -> Batch | None:
    """A message of [topic, number, payload]; None: the end of a replay.

    Raises `ProtocolError` without a sequence number.
    """
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ProtocolError("not a message of KV events: topic, number and payload were expected")
    if frames[1] == END:
        return None
    seq = int.from_bytes(frames[1], "big")
    nbytes = len(frames[2])
    if nbytes > PAYLOAD_BYTES_MAX:
        return Batch(seq, UNREADABLE, (), nbytes)
    try:
        payload = _decode_payload(frames[2])
    except ProtocolError:
        return Batch(seq, UNREADABLE, (), nbytes)
    return Batch(seq, payload.ts, payload.events, nbytes)


def _read_event(raw: msgspec.Raw) -> _Stored | _Removed | _Cleared | None:
    """None for ignored events: unknown types, and other media (host memory, disks).

    Raises `ProtocolError`.
    """
    try:
        event = _decode_event(raw)
    except ProtocolError:
        if _decode_any_event(raw).type in _KNOWN:
            raise
        return None
    return event if isinstance(event, _Cleared) or event.medium in _DEVICE_MEDIA else None


def _short(each: int | bytes) -> int:
    """Raises `ProtocolError`."""
    if isinstance(each, int):
        return each & _MASK
    low, high = _HASH_BYTES
    if not low <= len(each) <= high:
        raise ProtocolError(f"a block hash has {len(each)} bytes")
    return short_hash(each)


# ---- their order ---------------------------------------------------------------------------------------


class Follower:
    """Follows one engine's stream. See the module. Event loop only.

    Its owner passes received messages (`heard`, `replayed`, `disconnected`), requests a replay when `wanted`
    says so, reports its end (`replay_ended`, `replay_failed`), and calls `work` until nothing is left
    before it passes more.
    """

    def __init__(self, blocks: EngineBlocks, *, can_replay: bool) -> None:
        self.blocks = blocks
        self.unreadable = 0
        """Invalid batches and events."""
        self.gaps = 0
        """How often blocks were forgotten because batches were lost for good."""
        self._can_replay = can_replay
        self._next: int | None = None  # None: nothing is known since the engine's start
        self.at = UNREADABLE
        """The engine's clock of the last batch applied, or waiting; below 0 if there is none."""
        self.wanted: int | None = 0 if can_replay else None
        """The sequence number from which a replay is needed, or was requested, or None if none is."""
        self._doubt = can_replay  # more than a routine question: an answer is needed
        self._again = False  # the connection was lost during the replay
        self._restarted = False
        self._came = False  # the replay under way has brought a batch
        self._advanced = False
        self._futile = 0
        self._waiting: dict[int, Batch] = {}
        self._waiting_bytes = 0
        self._todo: deque[Batch | bool] = deque()  # a bool: clear, and whether that is complete
        self._event = 0  # of the first batch to apply
        self._decoded: _Stored | _Removed | _Cleared | None = None  # that event, once it is begun
        self._told = 0  # of its hashes

    def check(self) -> None:
        """Check whether the last batch is still the last one. Does nothing without replays."""
        if self._can_replay and self.wanted is None:
            self.wanted = self._last()

    def _last(self) -> int:
        """The start of a replay that shows both that the engine was not restarted, and new batches."""
        return self._next - 1 if self._next else 0

    # ---- what arrives --------------------------------------------------------------------------------

    def heard(self, batch: Batch) -> None:
        """A batch of the stream."""
        if self.wanted is not None:
            self._hold_back(batch)
        elif self._next is not None and batch.at < self.at:
            return
        elif batch.seq == self._next:
            self._accept(batch)
        elif self._next is not None and batch.seq < self._next and batch.at == self.at:
            return
        elif self._can_replay:
            self._hold_back(batch)
            self._doubt = True
            self.wanted = self._last()
        else:
            self._begin(batch)

    def disconnected(self) -> None:
        """Messages sent now are lost, and when the engine is back it may have been restarted."""
        if not self._can_replay:
            if self._next is not None:
                self._lose_track()
        elif self.wanted is None:
            self._doubt = True
            self.wanted = self._last()
        else:
            self._again = True

    def gone(self) -> None:
        """The engine has been unreachable for so long that its blocks count as lost."""
        if self._next is not None or len(self.blocks):
            self._lose_track()
        if self._can_replay:
            self._ask_from_start()

    def replayed(self, batch: Batch) -> None:
        """A batch of the requested replay; they come in order."""
        assert self.wanted is not None
        if self._restarted or batch.seq < self.wanted:
            return
        first, self._came = not self._came, True
        if first and self._next and batch.seq == self.wanted:
            self._restarted = batch.at != self.at
        elif first and (self._next is None or self._next or batch.seq):
            self._begin(batch)  # from here on it is kept: batches before are lost
        elif batch.seq == self._next:
            self._accept(batch)

    def replay_ended(self) -> None:
        """The replay is complete."""
        if self._restarted or (not self._came and self._next):
            self._ask_from_start()
            return
        if self._next is None:  # nothing was ever published
            self._clear(complete=True)
            self._next = 0
        self._catch_up(failed=False)

    def replay_failed(self) -> None:
        """The replay was not answered in time, or broke off. Part of it may have arrived."""
        if self._restarted:
            self._ask_from_start()
        else:
            self._catch_up(failed=True)

    def _catch_up(self, *, failed: bool) -> None:
        """After a replay: apply waiting batches, and check whether another one is needed."""
        waiting = self._let_go()
        # The replay was empty, but a batch was received: it was sent since, or before a restart. In the first
        # case it is in the next replay.
        unclear = bool(waiting) and self._next == 0 and not (failed or self._came)
        while waiting and not unclear and self._next is not None and waiting[0].seq <= self._next:
            batch = waiting.pop(0)
            if batch.seq == self._next:
                self._accept(batch)
        useless = not self._advanced and (failed or bool(waiting))
        self._futile = self._futile + 1 if useless else 0
        self._doubt = bool(waiting) or self._again or (failed and self._doubt)
        self._advanced = self._came = self._again = False
        if not self._doubt:
            self.wanted = None
        elif self._futile < FUTILE_MAX:
            for batch in waiting if not unclear else ():
                self._hold_back(batch)
            self.wanted = self._last()
        else:
            self._give_up(waiting)

    def _give_up(self, waiting: Sequence[Batch]) -> None:
        """Replays do not help: continue with the received batches."""
        self.wanted, self._doubt, self._futile = None, False, 0
        self._lose_track()
        for batch in waiting:
            if batch.seq == self._next:
                self._accept(batch)
            else:
                self._begin(batch)

    def _ask_from_start(self) -> None:
        """The engine was restarted: waiting batches are replayed with the rest."""
        self._let_go()
        self._next, self.at = None, UNREADABLE
        self.wanted, self._doubt = 0, True
        self._restarted = self._came = self._advanced = False
        self._futile = 0

    def _hold_back(self, batch: Batch) -> None:
        if self._again:
            return  # perhaps from before a restart; another replay follows in any case
        other = self._waiting.get(batch.seq)
        if other is not None:
            # The same number came twice, from before and after a restart: waiting batches may be of both, which
            # another replay shows.
            self._again = other.at != batch.at
            return
        room = WAITING_BYTES_MAX - self._waiting_bytes
        if len(self._waiting) < WAITING_MAX and batch.nbytes <= room:
            self._waiting[batch.seq] = batch
            self._waiting_bytes += batch.nbytes

    def _let_go(self) -> list[Batch]:
        """Waiting batches, in order; without those from before a restart."""
        waiting = sorted(self._waiting.values(), key=lambda batch: batch.seq)
        self._waiting, self._waiting_bytes = {}, 0
        return [batch for batch in waiting if batch.at >= self.at]

    # ---- what is told --------------------------------------------------------------------------------

    def _accept(self, batch: Batch) -> None:
        self._next, self.at = batch.seq + 1, batch.at
        self._advanced = True
        self._todo.append(batch)

    def _begin(self, batch: Batch) -> None:
        """Nothing is known from before this one; if it is the first, nothing was sent."""
        if self._next is not None and batch.seq:
            self.gaps += 1
        self._clear(complete=batch.seq == 0)
        self._accept(batch)

    def _lose_track(self) -> None:
        self.gaps += 1
        self._clear(complete=False)
        self._next, self.at = None, UNREADABLE

    def _clear(self, *, complete: bool) -> None:
        self._todo.clear()
        self._event = self._told = 0
        self._todo.append(complete)

    def work(self, blocks_max: int) -> bool:
        """Apply waiting events, about `blocks_max` blocks; returns whether something is left."""
        budget = blocks_max
        while self._todo and budget > 0:
            first = self._todo[0]
            if isinstance(first, bool):
                self.blocks.clear(complete=first)
                self._todo.popleft()
            elif self._event < len(first.events):
                budget -= 1 + self._tell(first.events[self._event], budget)
            else:
                if first.at == UNREADABLE:
                    self._unread()
                self._todo.popleft()
                self._event = 0
        return bool(self._todo)

    def _tell(self, raw: msgspec.Raw, limit: int) -> int:
        """Apply one event, or the part of it within the limit; returns its blocks."""
        try:
            event = self._decoded
            if self._told == 0:
                event = self._decoded = _read_event(raw)
                if isinstance(event, _Cleared):
                    self.blocks.clear(complete=True)
                elif isinstance(event, _Stored) and self._is_reuse(event):
                    event = None
            if event is None or isinstance(event, _Cleared):
                self._end_event()
                return 0
            hashes = [*map(_short, event.block_hashes[self._told : self._told + limit])]
        except ProtocolError:
            self._unread()
            self._end_event()
            return 0
        group = event.group_idx or 0
        if isinstance(event, _Removed):
            self.blocks.removed(group, hashes)
        else:
            self.blocks.stored(group, hashes)
        self._told += len(hashes)
        if self._told == len(event.block_hashes):
            self._end_event()
        return len(hashes)

    def _is_reuse(self, event: _Stored) -> bool:
        """Whether it only reports that a prompt found these blocks in the cache.

        Engines can be configured to report that, in the form of stored blocks, and always from the
        start of the prompt. Blocks held already are taken for such a report, not for a second copy.
        """
        group = event.group_idx or 0
        return event.parent_block_hash is None and self.blocks.holds(
            group, map(_short, event.block_hashes)
        )

    def _end_event(self) -> None:
        self._event += 1
        self._told = 0
        self._decoded = None

    def _unread(self) -> None:
        """Its contents are unknown."""
        self.unreadable += 1
        self.blocks.clear(complete=False)

    def stats(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "replaying": self.wanted is not None,
            "gaps": self.gaps,
            "unreadable": self.unreadable,
        }
