"""Operators' jobs of a daemon, begun and followed to their end."""

import json
import secrets
from typing import Any

import msgspec

from kvpool.client import OperatorClient
from kvpool.wire import operator as operator_wire
from tests.support.waiting import until


def finished(client: OperatorClient, **spec: Any) -> dict[str, Any]:
    """The last view of a job of this specification, begun on the client's node."""
    name = f"job-{secrets.token_hex(4)}"
    client.ask_node(operator_wire.BeginJob(name, json.dumps(spec).encode()))

    def ended() -> Any:
        (view,) = client.ask_node(operator_wire.Jobs([name]))
        return view.state != "running" and msgspec.to_builtins(view)

    found: dict[str, Any] = until(ended, "the job ends")
    return found
