"""Limits for clients and peers of a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one holder or tenant. Shares are of the tenant's segment."""

    lease_s_max: float = 60.0
    leases_per_holder: int = 4096
    reserved_share_per_holder: float = 1.0
    hard_pin_share: float = 0.25
    soft_pin_share: float = 0.5
    keep_share: float = 0.25  # of what is pinned for a time
    kept_blocks_max: int = 65_536  # of a tenant
    namespaces_per_tenant: int = 1024
    grant_bytes_per_holder: int = 64 << 20
    grant_share: float = 1 / 16  # of the segment, all holders together
    steal_tries: int = 8  # cold blocks examined to find a slab that can be emptied
    sessions_per_tenant: int = 16_384
    agents_per_session: int = 64
    # Of the books of sessions: their names, 16 bytes a block.
    session_bytes_per_tenant: int = 64 << 20
    waiters_max: int = 128  # peers' requests that wait for blocks to be committed here
    waiters_per_peer_max: int = 32
