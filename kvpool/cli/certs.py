"""`kvpool certs`: a small certificate authority."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import AsJson, argument, option

certs = base.group(
    "certs",
    "Create a small certificate authority, and certificates for TLS. Needs the extra admin.",
)

AuthorityFolder = Annotated[
    Path, argument("The authority's folder; its key is stored there.", metavar="DIR")
]
Days = Annotated[int, option("Days until it expires, at most 3650.")]
Hosts = Annotated[
    list[str] | None,
    option(
        "A name or address that clients connect to; may be repeated.",
        "--host",
        metavar="NAME_OR_IP",
    ),
]


@certs.command("init")
def certs_init(
    folder: AuthorityFolder, cluster: Annotated[str, option("The cluster's name.")] = "kvpool"
) -> None:
    """Create a certificate authority for a cluster, in a new folder.

    Example: kvpool certs init ./certs --cluster prod
    """
    with base.needs("cluster", "creating certificates"):
        from kvpool.cli.render.certs import made_authority
        from kvpool.security.certs import make_authority
    print(made_authority(make_authority(folder, cluster, _now())))


@certs.command("node")
def certs_node(
    folder: AuthorityFolder,
    name: Annotated[str, argument("The node's name, the same as its setting `node`.")],
    hosts: Hosts = None,
    days: Days = 365,
) -> None:
    """Create a node's certificate: for other daemons, its HTTP gateway, and etcd and Redis.

    Example: kvpool certs node ./certs host-7 --host host-7.example.org --host 10.0.0.7
    """
    _issue(folder, "node", name, hosts, days)


@certs.command("client")
def certs_client(
    folder: AuthorityFolder, name: Annotated[str, argument("The owner's name.")], days: Days = 365
) -> None:
    """Create a client certificate. Daemons do not accept it as a node's.

    Example: kvpool certs client ./certs alice --days 30
    """
    _issue(folder, "client", name, None, days)


@certs.command("revoke")
def certs_revoke(
    folder: AuthorityFolder,
    which: Annotated[str, argument("A name, or a serial number in hex.", metavar="NAME|SERIAL")],
) -> None:
    """Revoke all certificates of a node or client, or a single one: adds them to crl.pem.

    Example: kvpool certs revoke ./certs host-7
    """
    with base.needs("cluster", "creating certificates"):
        from kvpool.cli.render.certs import revoked
        from kvpool.security.certs import open_authority, revoke
    print(revoked(folder, which, revoke(open_authority(folder), which, _now())))


@certs.command("show")
def certs_show(
    file: Annotated[Path, argument("A PEM file: a certificate, or crl.pem.")],
    as_json: AsJson = False,
) -> None:
    """Show the contents of a certificate or of a revocation list.

    Example: kvpool certs show ./certs/node-host-7.pem
    """
    with base.needs("cluster", "creating certificates"):
        from kvpool.cli.render.certs import certificate_view
        from kvpool.security.certs import look_at
    shown = look_at(file)
    base.show(shown, certificate_view(shown, _now()), as_json=as_json)


def _issue(folder: Path, role: str, name: str, hosts: list[str] | None, days: int) -> None:
    with base.needs("cluster", "creating certificates"):
        from kvpool.cli.render.certs import made_certificate
        from kvpool.security.certs import issue, open_authority
    made = issue(open_authority(folder), role, name, _now(), hosts=hosts or (), days=days)
    print(made_certificate(made))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
