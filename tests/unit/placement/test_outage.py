"""What a server does not do: one line of the log for each kind of error in a spell, and a count of all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvpool.errors import NotAuthenticated, Unavailable
from kvpool.placement.outage import QUIET_S, Outage

if TYPE_CHECKING:
    import pytest

log = logging.getLogger("kvpool.placement")


def test_a_spell_is_told_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    outage = Outage("etcd", log, lambda: now[0])
    with caplog.at_level(logging.WARNING, "kvpool.placement"):
        for _ in range(10):
            outage.failed("Txn", Unavailable("away"))
            outage.failed("Watch", Unavailable("away too"))
        assert outage.error == "away too"
        outage.succeeded("Watch")
        assert outage.error == "away", "the other task still fails"
        outage.failed("Txn", NotAuthenticated("no role"))
        assert outage.error == "no role"
        outage.succeeded("Txn")
        outage.succeeded("Txn")
        assert (outage.error, outage.failures) == ("", 21)
        told = [record.getMessage() for record in caplog.records]
        assert [text.rpartition(": ")[2] for text in told] == ["away", "no role"]
        # Whatever comes and goes fills no log.
        for second in range(int(QUIET_S)):
            now[0] = float(second)
            outage.failed("Txn", Unavailable("away"))
            outage.succeeded("Txn")
        assert len(caplog.records) == 2
        now[0] = QUIET_S
        outage.failed("Txn", Unavailable("away"))
        assert len(caplog.records) == 3
