"""The gateway's routes, without a cluster behind them."""

from typing import Any

from kvpool.admin.handlers.blocks import Blocks
from kvpool.admin.handlers.changes import Changing
from kvpool.admin.handlers.inventory import Looking
from kvpool.admin.handlers.monitoring import Watching
from kvpool.admin.handlers.operator import Forwarding
from kvpool.admin.handlers.receipts import Accounting
from kvpool.admin.handlers.routers import Routers
from kvpool.admin.routing import routes_of

NOBODY: Any = None
TYPED = tuple(
    routes_of(
        Looking(NOBODY, 0),
        Blocks(NOBODY),
        Accounting(NOBODY),
        Changing(NOBODY, NOBODY),
        Routers(NOBODY, [], "", ""),
        Watching(NOBODY, NOBODY, NOBODY, NOBODY),
    )
)
FORWARDED = tuple(Forwarding(NOBODY).routes())
