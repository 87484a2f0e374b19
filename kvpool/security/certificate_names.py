"""The identity in a kvpool certificate: kvpool://CLUSTER/ROLE/NAME, a URI among its names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

SCHEME = "kvpool"
NODE = "node"  # a daemon: accepted as a peer
CLIENT = "client"  # any other holder of a certificate: for etcd, Redis, the HTTP gateway
ROLES = (NODE, CLIENT)
_URI = re.compile(
    rf"{SCHEME}://([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})/({'|'.join(ROLES)})/([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})"
)


@dataclass(frozen=True, slots=True)
class CertificateName:
    """An identity in a cluster. role: one of `ROLES`."""

    cluster: str
    role: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}://{self.cluster}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> Self | None:
        """None for other names."""
        match = _URI.fullmatch(uri)
        return None if match is None else cls(match[1], match[2], match[3])
