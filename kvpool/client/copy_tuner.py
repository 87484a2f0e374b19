"""How a large put is copied and hashed: by one thread or two, found out for each size, put by put. No I/O.

Two are faster where one core cannot use all that the memory has to give. Where it can, or where no other core is free,
they are in one another's way. Which it is cannot be told beforehand, and changes with what else runs. So now and then
a put tries another way, and what is clearly better stays.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque

PROBE_MIN, PROBE_MAX = (
    2,
    64,
)  # puts from one probe of a way to its next: twice as many after each that was no better
RECENT = 3  # puts that a probe is compared with
WINS = 6  # how many more probes must be better than not: luck seldom gives such a lead
LOST_SHARE = 0.02  # of the time of all puts, that probes may cost
LOST_TIMES = 10  # a probe counts as no more than so many puts: what takes longer has other reasons


class Way(enum.Enum):
    """How the bytes of a put are copied and hashed."""

    ALONE = "one thread hashes and copies, piece by piece"
    BESIDE = "one thread copies, the other one hashes"
    SHARED = "two threads hash and copy, each its pieces"


START = Way.BESIDE  # most machines have a core to spare; it need not be there at once


def gain_wanted(usual: Way, other: Way) -> float:
    """How many times as fast the other way must be: a second core must pay, and to do without it may cost a little."""
    if other is Way.ALONE:
        return 0.95
    return 1.1 if usual is Way.ALONE else 1.05


class _Other:
    """What is known of a way that is not the usual one."""

    def __init__(self) -> None:
        self.wins = 0
        self.every = PROBE_MIN
        self.puts = 0  # since its last probe
        self.lost_s = 0.0  # by its probes, not paid for yet


class CopyTuner:
    """The way for puts of one size. Threads, and exceptions in between, may cost a probe, never more.

    Probes take at most `LOST_SHARE` longer than the same puts would have, all puts together, and once the time of one
    probe of each way: after a slow one there is none of its way until other puts have paid for it.
    """

    def __init__(self) -> None:
        self._use(START)

    def _use(self, way: Way) -> None:
        self.usual = way
        # Of the last puts as usual, bytes a second.
        self._speeds: deque[float] = deque(maxlen=RECENT)
        self._others = {other: _Other() for other in Way if other is not way}

    def choose(self) -> Way:
        """For the next put."""
        usual, others = self.usual, self._others
        chosen, most = usual, 0
        for way, other in others.items():
            other.puts += 1
            if other.puts >= max(other.every, most) and not other.lost_s:
                chosen, most = way, other.puts
        if most and len(self._speeds) == RECENT:
            others[chosen].puts = 0
            return chosen
        return usual

    def learn(self, way: Way, nbytes: int, seconds: float) -> None:
        """All of a put's bytes are copied.

        A probe is compared with the puts just before, so that a machine that becomes slower between two probes
        makes no way look better.
        """
        if seconds <= 0:
            return
        others, speeds = self._others, list(self._speeds)
        other = others.get(way)
        if other is None:
            self._speeds.append(nbytes / seconds)
            for each in others.values():
                each.lost_s = max(0.0, each.lost_s - LOST_SHARE / len(others) * seconds)
            return
        if not speeds:  # chosen before the usual way changed
            return
        usual_s = nbytes / statistics.median(speeds)
        other.lost_s += min(max(0.0, seconds - usual_s), LOST_TIMES * usual_s)
        if usual_s / seconds > gain_wanted(self.usual, way):
            other.wins, other.every = other.wins + 1, PROBE_MIN
        else:
            other.wins, other.every = max(0, other.wins - 1), min(2 * other.every, PROBE_MAX)
        if other.wins == WINS:
            self._use(way)


class CopyWays:
    """Those of puts of all sizes: puts whose blocks, and whose bytes, are about as many share one.

    Thread-safe without a lock: what two threads learn at the same time may count once.
    """

    def __init__(self) -> None:
        self._tuners: dict[tuple[int, int], CopyTuner] = {}  # a few hundred at most: powers of two

    def choose(self, block_bytes: int, nbytes: int) -> Way:
        """See `CopyTuner.choose`. nbytes: of the whole put."""
        return self._tuner(block_bytes, nbytes).choose()

    def learn(self, block_bytes: int, nbytes: int, way: Way, seconds: float) -> None:
        """See `CopyTuner.learn`."""
        self._tuner(block_bytes, nbytes).learn(way, nbytes, seconds)

    def _tuner(self, block_bytes: int, nbytes: int) -> CopyTuner:
        size = block_bytes.bit_length(), nbytes.bit_length()
        tuner = self._tuners.get(size)
        return self._tuners.setdefault(size, CopyTuner()) if tuner is None else tuner
