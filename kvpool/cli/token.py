"""`kvpool token`: tokens for the HTTP gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvpool.cli.base import OPERATORS, app, argument, option
from kvpool.errors import InvalidRequest


@app.command(rich_help_panel=OPERATORS)
def token(
    name: Annotated[str, argument("The token's owner, as shown in the audit log.")],
    file: Annotated[Path, option("The gateway's token file (http_tokens); created if missing.")],
    role: Annotated[str, option("viewer, operator or admin.")] = "viewer",
    tenants: Annotated[
        list[str] | None, option("Valid for this tenant only; may be repeated.", "--tenant")
    ] = None,
) -> None:
    """Create a token for the HTTP gateway, print it once, and add its digest to the gateway's file.

    Example: kvpool token ci --role operator --file /etc/kvpool/tokens.toml
    """
    from kvpool.admin.tokens import ROLES, add_token

    if role not in ROLES:
        raise InvalidRequest(f"--role {role!r:.40}: must be one of {', '.join(ROLES)}")
    print(add_token(file, name, role, list(tenants or [])))
