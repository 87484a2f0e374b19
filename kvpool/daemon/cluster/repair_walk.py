"""How far a walk through all blocks is that looks for lacking replicas. No I/O."""

from __future__ import annotations


class RepairWalk:
    """A walk that is wanted again while it is under way goes on to its end, and is made once more.

    It is never begun anew: where nodes come and go faster than a walk takes, the last blocks would never be
    reached. position: of the next step; None: nothing is wanted.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self._again = False

    def request(self) -> None:
        """From now on all blocks are to be examined."""
        if self.position is None:
            self.position = 0
        else:
            self._again = True

    def begin_step(self) -> int:
        """Where to examine blocks. The step is made again unless `end_step` follows."""
        assert self.position is not None
        if self.position == 0:
            self._again = False  # whatever was wanted before now is what this round does
        return self.position

    def end_step(self, following: int | None) -> None:
        """These blocks were examined. following: where the next ones are; None: these were the last."""
        self.position = following
        if following is None and self._again:
            self.position = 0
