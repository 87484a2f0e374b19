"""Certificates for tests, of several authorities and in all states, made by `kvpool.security.certs` without any waiting."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvpool.security.certificate_names import NODE
from kvpool.security.certs import Authority, issue, make_authority, open_authority, revoke
from kvpool.security.credentials import Credentials, TlsFiles


class Pki:
    """An authority in a folder, and what it issues. cluster: the one of its certificates."""

    def __init__(self, folder: Path, cluster: str = "test") -> None:
        self.folder = folder
        self.authority = make_authority(folder, cluster, datetime.now(UTC) - timedelta(days=400))

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def crl(self) -> Path:
        return self.folder / "crl.pem"

    def files(self, name: str, *, role: str = NODE, age_days: int = 0, days: int = 365) -> TlsFiles:
        """Those of a certificate made now, or `age_days` ago. The next one for that name takes its place."""
        now = datetime.now(UTC) - timedelta(days=age_days)
        made = issue(self.authority, role, name, now, hosts=["127.0.0.1", "localhost"], days=days)
        return TlsFiles(str(made.cert), str(made.key), str(self.ca), str(self.crl))

    def expired(self, name: str) -> TlsFiles:
        return self.files(name, age_days=30, days=10)

    def not_yet(self, name: str) -> TlsFiles:
        return self.files(name, age_days=-30)

    def of_cluster(self, cluster: str, name: str) -> TlsFiles:
        """Another cluster's, from the same authority."""
        ours = self.authority
        self.authority = Authority(ours.folder, cluster, ours.certificate, ours.key)
        try:
            return self.files(name)
        finally:
            self.authority = ours

    def revoke(self, which: str) -> list[int]:
        return revoke(open_authority(self.folder), which, datetime.now(UTC))

    def credentials(self, name: str) -> Credentials:
        return Credentials(self.files(name), self.authority.cluster, name)
