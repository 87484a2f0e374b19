"""The features that observe a daemon's blocks and clients."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpool.daemon.core.events import Events
from kvpool.daemon.features.accounts import Accounts
from kvpool.daemon.features.hot_prefixes import HotPrefixes
from kvpool.daemon.features.miss_reasons import MissReasons
from kvpool.daemon.features.sampling import Sampler
from kvpool.daemon.features.traffic import TrafficCounts


@dataclass(frozen=True, eq=False, slots=True)
class Features:
    """Features whose numbers operators see. None is needed to serve a request."""

    traffic: TrafficCounts
    accounts: Accounts
    miss_reasons: MissReasons
    hot_prefixes: HotPrefixes
    sampler: Sampler

    def subscribe(self, events: Events) -> None:
        """Observe these events from now on."""
        for field in fields(self):
            events.subscribe(field.name, getattr(self, field.name).handlers)
