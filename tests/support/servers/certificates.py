"""Small certificates for tests of TLS, made with the `openssl` program. Never for anything real."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import ConfigError

OPENSSL_S = 60.0
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: an authority, and what it has signed for servers on loopback and for one client."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    def client_context(self) -> ssl.SSLContext:
        """For a client that trusts the authority and shows its certificate."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.client_cert, self.client_key)
        return context


def have_openssl() -> bool:
    return shutil.which("openssl") is not None


def make_certificates(folder: Path, client: str = "kvpool") -> Certificates:
    """Make them in `folder`; `client` is the client's common name. Valid for a day.

    Raises `ConfigError` when openssl is not there or fails.
    """
    made = Certificates(
        ca=folder / "ca.pem",
        server_cert=folder / "server.pem",
        server_key=folder / "server.key",
        client_cert=folder / "client.pem",
        client_key=folder / "client.key",
    )
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = folder / "ca.key"
    authority = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"]
    _request("kvpool test authority", made.ca, ca_key, authority, [])
    signed = ["-CA", str(made.ca), "-CAkey", str(ca_key)]
    leaf = "basicConstraints=critical,CA:FALSE"
    # etcd's own gateway connects to itself with the server's certificate, so that is a client's too.
    both = [leaf, NAMES, "extendedKeyUsage=serverAuth,clientAuth"]
    _request("localhost", made.server_cert, made.server_key, both, signed)
    _request(
        client, made.client_cert, made.client_key, [leaf, "extendedKeyUsage=clientAuth"], signed
    )
    return made


def _request(name: str, cert: Path, key: Path, extensions: list[str], signed: list[str]) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", f"/CN={name}", "-config", "/dev/null"]
    for extension in extensions:
        command += ["-addext", extension]
    command += ["-out", str(cert), "-keyout", str(key), *signed]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=OPENSSL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"openssl, which makes the certificates, failed: {error}") from None
    if done.returncode:
        raise ConfigError(f"openssl made no certificate for {name}: {done.stderr.strip()}")
