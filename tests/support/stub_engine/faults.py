"""What may go wrong with an engine, on demand."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to the next requests.

    kind: `hang`: nothing more comes, and the connection stays. `error`: an answer with this status; in a
        stream a message of it. `cut`: the connection is closed. `end`: a stream ends as if that were all, without its last message.
        `die`: the process is killed, as by SIGKILL.
    after_tokens: of the answer, before it happens; 0: before anything is answered.
    times: to so many requests. path: only to those whose path begins with it.
    """

    kind: Literal["hang", "error", "cut", "end", "die"]
    after_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    times: Annotated[int, msgspec.Meta(ge=1)] = 1_000_000
    path: str = "/v1/"
    status: int = 500


class Faults:
    """Those that are set, each with how many requests it is still for."""

    def __init__(self) -> None:
        self.left: list[tuple[Fault, int]] = []

    def set(self, faults: list[Fault]) -> None:
        """In place of those that were."""
        self.left = [(each, each.times) for each in faults]

    def take(self, path: str) -> Fault | None:
        """The fault of a request that has just come."""
        for place, (fault, left) in enumerate(self.left):
            if left and path.startswith(fault.path):
                self.left[place] = fault, left - 1
                return fault
        return None
