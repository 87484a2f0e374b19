"""How many connections one large pull is spread over: found out for each peer, pull by pull. No I/O.

One is enough where a core, or the network card, is what limits it. Over a long way a connection is held
back by its window, and on a fast network by the one core that copies for it. Which it is cannot be told
beforehand, so now and then a pull uses more or fewer than usual, and what is clearly better stays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

LADDER = (1, 2, 4, 8)
START = 2  # while one waits for its peer, the other one moves bytes
SPLIT_BYTES = 8 << 20  # a smaller pull is over before a second connection pays
STREAM_BYTES = 4 << 20  # the least for each
PROBE_EVERY = 8  # pulls
SAMPLES_MIN = 3
BETTER, AS_GOOD = 1.1, 0.95  # more connections must gain so much; fewer must lose no more than that
WEIGHT = 0.25  # of a new comparison
RECENT = 0.5  # of a new pull over the usual number
PEERS_MAX = 256


A = TypeVar("A")


@dataclass(slots=True)
class Comparison:
    """How often as fast as the usual way another one was. speed: the last one seen, bytes a second."""

    samples: int = 0
    gain: float = 0.0
    speed: float = 0.0


class Speeds(Generic[A]):
    """How fast the usual way is, and others beside it. Not thread-safe.

    Another way is compared with the pulls just before, so that a network that changes between two tries looks neither
    better nor worse.
    """

    def __init__(self) -> None:
        self.usual = 0.0  # of the last pulls, bytes a second; 0: of none yet
        self.others: dict[A, Comparison] = {}

    def used(self, speed: float) -> None:
        """A pull went by the usual way."""
        self.usual = self.usual + RECENT * (speed - self.usual) if self.usual else speed

    def tried(self, other: A, speed: float) -> Comparison:
        """A pull went by another way, and the speed of the usual one is known."""
        seen = self.others.setdefault(other, Comparison())
        seen.samples += 1
        seen.gain += max(WEIGHT, 1 / seen.samples) * (speed / self.usual - seen.gain)
        seen.speed = speed
        return seen


class StreamTuner:
    """The number for one peer. Not thread-safe.

    Every `PROBE_EVERY`th pull tries the next step of `LADDER`, up and down by turns. With speeds that do
    not change it settles on the smallest number whose next step gains less than a tenth.
    """

    def __init__(self) -> None:
        self.usual = START
        self._pulls = 0
        self._speeds: Speeds[int] = Speeds()

    def choose(self, nbytes: int, blocks: int) -> int:
        """For a pull of so many bytes and blocks."""
        if nbytes < SPLIT_BYTES:
            return 1
        most = min(nbytes // STREAM_BYTES, blocks)
        self._pulls += 1
        wanted = self.usual
        if self._pulls % PROBE_EVERY == 0:
            at = LADDER.index(self.usual) + (1 if self._pulls // PROBE_EVERY % 2 else -1)
            wanted = LADDER[min(max(at, 0), len(LADDER) - 1)]
        return max(step for step in LADDER if step <= min(wanted, most))

    def learn(self, streams: int, nbytes: int, seconds: float) -> None:
        """All of a pull came. What is too small to be spread says nothing."""
        if nbytes < SPLIT_BYTES or seconds <= 0:
            return
        speed = nbytes / seconds
        if streams == self.usual:
            self._speeds.used(speed)
            return
        if not self._speeds.usual:
            return
        seen = self._speeds.tried(streams, speed)
        wanted = BETTER if streams > self.usual else AS_GOOD
        if seen.samples >= SAMPLES_MIN and seen.gain > wanted:
            self.usual, self._speeds = streams, Speeds()


class StreamCounts:
    """Those of all peers, by URL; the one that was not pulled from for longest goes first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, StreamTuner] = OrderedDict()

    def choose(self, url: str, nbytes: int, blocks: int) -> int:
        """See `StreamTuner.choose`."""
        with self._lock:
            count = self._counts.setdefault(url, StreamTuner())
            self._counts.move_to_end(url)
            if len(self._counts) > PEERS_MAX:
                self._counts.popitem(last=False)
            return count.choose(nbytes, blocks)

    def learn(self, url: str, streams: int, nbytes: int, seconds: float) -> None:
        """See `StreamTuner.learn`."""
        with self._lock:
            count = self._counts.get(url)
            if count is not None:
                count.learn(streams, nbytes, seconds)
