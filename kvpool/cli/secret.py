"""`kvpool secret`: the secret by which the daemons of a cluster know each other."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from kvpool.cli import base
from kvpool.cli.base import argument, option
from kvpool.errors import ConfigError

secret = base.group("secret", "Create the cluster's secret, and change it while the daemons run.")

SecretFile = Annotated[
    Path, argument("The file, as in the setting cluster_secret_file.", metavar="FILE")
]


@secret.command("create")
def secret_create(file: SecretFile) -> None:
    """Create a file with a random secret, of mode 0600. Give the same file to all daemons of a cluster.

    Example: kvpool secret create ./cluster.secret
    """
    from kvpool.security.cluster_secrets import create_secrets

    if not create_secrets(file):
        raise ConfigError(f"{file} exists already: kvpool secret rotate replaces its secret")
    print(f"A new secret is in {file}.\nNext: copy it to every node, and set cluster_secret_file.")


@secret.command("rotate")
def secret_rotate(
    file: SecretFile,
    keep: Annotated[
        str, option("How long the old secrets are still accepted: 2h, 3d.", metavar="TIME")
    ] = "1d",
) -> None:
    """Put a new secret first in the file. Old ones are accepted for a while; then daemons close what used them.

    Example: kvpool secret rotate ./cluster.secret --keep 2h
    """
    from kvpool.cli.naming import period
    from kvpool.security.cluster_secrets import rotate_secrets

    until = rotate_secrets(file, period(keep), time.time())
    end = datetime.fromtimestamp(until, UTC)
    print(
        f"A new secret is in {file}; the old one ends at {end:%Y-%m-%d %H:%M:%S} UTC.\n"
        "Next: copy the file to every node before that. Daemons read it within a second; none needs a restart."
    )
