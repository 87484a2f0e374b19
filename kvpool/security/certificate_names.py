"""What a certificate of ours says about who shows it: kvpool://CLUSTER/ROLE/NAME, a URI among its names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

SCHEME = "kvpool"
NODE = "node"  # a daemon: may be a peer of the others
CLIENT = "client"  # anybody else that shows a certificate: to etcd, to Redis, to the HTTP gateway
ROLES = (NODE, CLIENT)
_URI = re.compile(
    rf"{SCHEME}://([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})/({'|'.join(ROLES)})/([A-Za-z0-9][A-Za-z0-9._-]{{0,62}})"
)


@dataclass(frozen=True, slots=True)
class CertificateName:
    """Who somebody is in a cluster. role: one of `ROLES`."""

    cluster: str
    role: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}://{self.cluster}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> Self | None:
        """None for what is no such name."""
        match = _URI.fullmatch(uri)
        return None if match is None else cls(match[1], match[2], match[3])
