"""Tell systemd, or another supervisor that speaks as it does, that a service is ready: `Type=notify`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

log = logging.getLogger("kvpool.cli")

SEND_S = 5.0


def tell_ready(environ: Mapping[str, str]) -> None:
    """Send READY=1 to the socket that `NOTIFY_SOCKET` names; without it nothing. Has to be the service's own process.

    What cannot be told is logged: the service itself is none the worse, and may have been started by somebody who
    left the name of another's socket.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # of the abstract kind, which is in no file system
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.settimeout(SEND_S)
            one.sendto(b"READY=1", address)
    except OSError as error:
        log.warning("cannot tell %s that the service is ready: %s", environ["NOTIFY_SOCKET"], error)
