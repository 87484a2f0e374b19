"""How many connections one large pull is spread over: found out for each peer, pull by pull. No I/O.

One is enough where a core, or the network card, is what limits it. Over a long way a connection is held
back by its window, and on a fast network by the one core that copies for it. Which it is cannot be told
beforehand, so now and then a pull uses more or fewer than usual, and what is clearly better stays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

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


class StreamTuner:
    """The number for one peer. Not thread-safe.

    Every `PROBE_EVERY`th pull tries the next step of `LADDER`, up and down by turns. With speeds that do
    not change it settles on the smallest number whose next step gains less than a tenth.
    """

    def __init__(self) -> None:
        self.usual = START
        self._pulls = 0
        self._speed = 0.0  # of the last pulls over the usual number, bytes a second; 0: of none yet
        self._gains: dict[int, tuple[int, float]] = {}  # by number: samples, and how often as fast

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
        """All of a pull came. What is too small to be spread says nothing.

        Another number is compared with the pulls just before, so that a network that changes between two
        tries looks neither better nor worse.
        """
        if nbytes < SPLIT_BYTES or seconds <= 0:
            return
        speed = nbytes / seconds
        if streams == self.usual:
            self._speed = self._speed + RECENT * (speed - self._speed) if self._speed else speed
            return
        if not self._speed:
            return
        samples, gain = self._gains.get(streams, (0, 0.0))
        gain += max(WEIGHT, 1 / (samples + 1)) * (speed / self._speed - gain)
        self._gains[streams] = samples + 1, gain
        if samples + 1 >= SAMPLES_MIN and gain > (BETTER if streams > self.usual else AS_GOOD):
            self.usual, self._speed = streams, 0.0
            self._gains.clear()


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
