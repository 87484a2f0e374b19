"""Peers that the configuration names (`--peer`) and that do not answer. Rules without I/O.

Nobody else knows whether they live: they are members of nothing. So the log tells of each that has not answered for
`SILENT_S`, once, and once when it is back. One that nothing was asked of is not silent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvpool.placement.peers import Peers

log = logging.getLogger(__name__)

SILENT_S = 60.0


class Silent(NamedTuple):
    """silent_s: since the first question in vain. error: of the last one; may be empty."""

    url: str
    silent_s: float
    error: str


class StaticPeers:
    """urls: by the stand-in for their incarnations. Event loop only."""

    def __init__(self, urls: Mapping[bytes, str]) -> None:
        self._urls = dict(urls)
        self._in_vain: dict[bytes, Silent] = {}  # asked, and not heard of since; however long
        self._since: dict[bytes, float] = {}
        self._told: set[bytes] = set()

    def look(self, peers: Peers, now: float) -> None:
        """Now and then: the log is told of what has changed. now: seconds, monotonic. O(peers that are named)."""
        for incarnation, url in self._urls.items():
            peer = peers.get(incarnation)
            heard = peer is None or (
                peer.probed_at <= max(peer.heard_at, peer.loaded_at) and not peer.backoff.failures
            )
            if peer is None or heard:
                self._in_vain.pop(incarnation, None)
                since = self._since.pop(incarnation, now)
                if incarnation in self._told:
                    self._told.discard(incarnation)
                    log.warning("peer %s answers again, after %.0f s", url, now - since)
                continue
            silent_s = now - self._since.setdefault(incarnation, now)
            self._in_vain[incarnation] = Silent(url, silent_s, peer.last_error)
            if silent_s >= SILENT_S and incarnation not in self._told:
                self._told.add(incarnation)
                log.warning(
                    "peer %s, named in the configuration, has not answered for %.0f s%s. Check that its daemon "
                    "listens there and has the same cluster secret",
                    *(url, silent_s, f": {peer.last_error}" if peer.last_error else ""),
                )

    def silent(self) -> Iterator[Silent]:
        """Those that have not answered for `SILENT_S` and longer, as of the last look."""
        for incarnation in self._told:
            yield self._in_vain[incarnation]
