"""Corrections of the directory's answers: wrong hints, last known entries, dead incarnations.

No I/O, no clock, event loop only. All of it is bounded, and forgets the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from kvpool.placement.directory.base import Entry
from kvpool.placement.directory.checks import DEAD_MAX


class NegativeMemory:
    """Which sources were found to lack a block, or to have it damaged, although the directory lists it.

    For the time that a wrong hint takes to be withdrawn. Each call is O(1).
    """

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        # In order of expiry, because all last equally long.
        self._until: OrderedDict[tuple[bytes, int, bytes, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        """How many there are, perhaps including expired ones: 0: no need to check."""
        return len(self._until)

    def add(self, digest: bytes, part: int, key: bytes, incarnation: bytes, now: float) -> None:
        until = self._until
        item = (digest, part, key, incarnation)
        until[item] = now + self._ttl_s
        until.move_to_end(item)
        for _ in range(2):  # two out for one in: expired ones are removed gradually
            oldest = next(iter(until))
            if len(until) <= self._capacity and until[oldest] > now:
                break
            del until[oldest]
            if not until:
                break

    def has(self, digest: bytes, part: int, key: bytes, incarnation: bytes, now: float) -> bool:
        return self._until.get((digest, part, key, incarnation), now) > now


class Remembered:
    """The last known entries of keys, for the time when the directory is unavailable.

    capacity: in keys. Entries are kept packed, so that they cost the garbage collector nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._packed: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._packed)

    def learn(
        self, digest: bytes, keys: Sequence[bytes], entries: Sequence[Sequence[Entry]]
    ) -> None:
        """The directory's answer; keys without entries are forgotten."""
        packed = self._packed
        last: Sequence[Entry] = ()
        form = b""
        for key, known in zip(keys, entries, strict=True):
            name = digest + key
            if not known:
                packed.pop(name, None)
                continue
            # Blocks of one prompt are mostly on the same nodes: one copy serves them all.
            if known != last:
                last, form = known, _pack(known)
            packed[name] = form
            packed.move_to_end(name)
        while len(packed) > self._capacity:
            packed.popitem(last=False)

    def recall(self, digest: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        """The last known entries of each key; none for keys that are not remembered."""
        packed = self._packed
        found: list[list[Entry]] = []
        last = b""
        entries: list[Entry] = []
        for key in keys:
            name = digest + key
            form = packed.get(name)
            if form is None:
                found.append([])
                continue
            packed.move_to_end(name)
            if form != last:
                last, entries = form, _unpack(form)
            found.append(entries.copy())
        return found

    def forget(self, digest: bytes, keys: Iterable[bytes], incarnation: bytes) -> None:
        """This incarnation turned out not to have these."""
        for key in keys:
            form = self._packed.get(digest + key)
            if form is None:
                continue
            rest = [entry for entry in _unpack(form) if entry.incarnation != incarnation]
            if rest:
                self._packed[digest + key] = _pack(rest)
            else:
                del self._packed[digest + key]


def _pack(entries: Iterable[Entry]) -> bytes:
    """One after the other: incarnation 8, tier 1, length of the mask 2, mask."""
    out: list[bytes] = []
    for incarnation, tier, mask in entries:
        size = (mask.bit_length() + 7) // 8
        out += (incarnation, bytes((tier,)), size.to_bytes(2), mask.to_bytes(size))
    return b"".join(out)


def _unpack(form: bytes) -> list[Entry]:
    entries = []
    at = 0
    while at < len(form):
        end = at + 11 + int.from_bytes(form[at + 9 : at + 11])
        entries.append(Entry(form[at : at + 8], form[at + 8], int.from_bytes(form[at + 11 : end])))
        at = end
    return entries


class DeadIncarnations:
    """Which incarnations are certainly dead, so that their entries may be swept.

    Incarnations that were in the view and left it; and those found in entries that have not come
    into the view for `patience_s` seconds during which the membership answered: a node whose joining was
    not seen is not considered dead. Incarnations in the view never are. Call `came` and `left` with every change of
    the view, and `passed` about every second.

    Of each kind `capacity` are known: further ones are found again when there is room, and none that waits
    loses its place to them. The dead are forgotten after `forget_s` such seconds: entries that are left of
    them are found again, too. All calls are O(what is given), but for `passed`, which is O(what ends).
    """

    def __init__(
        self, *, patience_s: float = 30.0, forget_s: float = 600.0, capacity: int = DEAD_MAX
    ) -> None:
        self._patience_s = patience_s
        self._forget_s = forget_s
        self._capacity = capacity
        self._living: set[bytes] = set()
        # Each with the connected time when it was found, or declared dead: in that order.
        self._strange: OrderedDict[bytes, float] = OrderedDict()
        self._dead: OrderedDict[bytes, float] = OrderedDict()
        self._connected_s = 0.0
        self._connected_at: float | None = None

    def __len__(self) -> int:
        """How many are known to be dead."""
        return len(self._dead)

    def __contains__(self, incarnation: bytes) -> bool:
        """Whether it is known to be dead."""
        return incarnation in self._dead

    def oldest(self, count: int) -> list[bytes]:
        """So many of the dead, those first that were declared first."""
        return list(islice(self._dead, count))

    def lives(self, incarnation: bytes) -> bool:
        """Whether it is in the view."""
        return incarnation in self._living

    def came(self, incarnations: Iterable[bytes]) -> None:
        """These are in the view now; this node's own counts as in it."""
        for incarnation in incarnations:
            self._living.add(incarnation)
            self._strange.pop(incarnation, None)
            self._dead.pop(incarnation, None)

    def left(self, incarnations: Iterable[bytes]) -> None:
        """These were in the view, and no longer are."""
        for incarnation in incarnations:
            if incarnation in self._living:
                self._living.remove(incarnation)
                self._declare(incarnation)

    def met(self, incarnations: Iterable[bytes]) -> None:
        """These occur in entries of the directory. Call it with incarnations not known to live; cheap."""
        for incarnation in incarnations:
            if len(self._strange) >= self._capacity:
                return
            known = incarnation in self._living or incarnation in self._dead
            if not known and incarnation not in self._strange:
                self._strange[incarnation] = self._connected_s

    def passed(self, now: float, *, connected: bool) -> None:
        """Time has come to `now`; connected: whether the membership answers at present.

        Only the time between two such calls with connected counts.
        """
        if connected and self._connected_at is not None:
            self._connected_s += now - self._connected_at
        self._connected_at = now if connected else None
        for _ in range(self._ended(self._dead, self._forget_s)):
            self._dead.popitem(last=False)
        for _ in range(self._ended(self._strange, self._patience_s)):
            if len(self._dead) >= self._capacity:
                break
            self._declare(self._strange.popitem(last=False)[0])

    def _ended(self, since: OrderedDict[bytes, float], wait_s: float) -> int:
        """How many of the first have waited for so long."""
        waited = takewhile(lambda at: self._connected_s - at >= wait_s, since.values())
        return sum(1 for _ in waited)

    def swept(self, incarnations: Iterable[bytes]) -> None:
        """The whole directory was swept of these: forget them. If they occur again, they are recorded again."""
        for incarnation in incarnations:
            self._dead.pop(incarnation, None)

    def _declare(self, incarnation: bytes) -> None:
        if len(self._dead) < self._capacity:
            self._dead[incarnation] = self._connected_s
