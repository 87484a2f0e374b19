"""`kvpool token`: tokens for the HTTP gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.base import OPERATORS, app
from kvpool.errors import ConfigError, InvalidRequest
from kvpool.extras import install


@app.command(rich_help_panel=OPERATORS)
def token(
    name: Annotated[str, typer.Argument(help="The token's owner, as shown in the audit log.")],
    file: Annotated[
        Path, typer.Option(help="The gateway's token file (http_tokens); created if missing.")
    ],
    role: Annotated[str, typer.Option(help="viewer, operator or admin.")] = "viewer",
    tenants: Annotated[
        list[str] | None,
        typer.Option("--tenant", help="Valid for this tenant only; may be repeated."),
    ] = None,
) -> None:
    """Create a token for the HTTP gateway, print it once, and add its digest to the gateway's file.

    Example: kvpool token ci --role operator --file /etc/kvpool/tokens.toml
    """
    try:
        from kvpool.admin.tokens import ROLES, add_token
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs {error.name}: {install('admin')}") from None
    if role not in ROLES:
        raise InvalidRequest(f"--role {role!r:.40}: must be one of {', '.join(ROLES)}")
    print(add_token(file, name, role, list(tenants or [])))
