"""Which methods answer messages: those whose parameters are who asks, and the message."""

from __future__ import annotations

from kvpool.daemon.core.blocks import Holder
from kvpool.daemon.ops.commands import Asker, handlers_of
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire


class Part:
    """A part of a daemon."""

    def jobs(self, who: Asker, m: operator_wire.Jobs) -> str:
        return f"the jobs of {who.by}: {m.jobs}"

    def present(self, holder: Holder, m: client_wire.Present) -> frame.Done:
        raise AssertionError

    def some(self, who: Asker, count: int) -> int:
        raise AssertionError

    def pass_on(self, who: Asker, message: frame.Message) -> frame.Done:
        raise AssertionError

    def evict_some(self, who: Asker, m: operator_wire.Evict, count: int) -> int:
        raise AssertionError


def test_a_signature_says_which_message_a_method_answers() -> None:
    part, other = Part(), Part()
    assert handlers_of(Asker, part) == {operator_wire.Jobs: part.jobs}
    assert handlers_of(Holder, part) == {client_wire.Present: part.present}
    assert handlers_of(Asker, part, other) == {operator_wire.Jobs: other.jobs}
