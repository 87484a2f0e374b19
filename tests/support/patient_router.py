"""`kvpool router` with the patience of the tests: an engine, a peer or a client is late for no other reason than the machine.

These limits are constants of the router, for machines whose processes run. Under load a process may stand still for
seconds, and what is tested is something else. Limits that are settings are the tests' own affair, and so are the
constants of `RouterConfig`, which tests give as JSON in the variable `CONSTANTS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from kvpool.router import config
from tests.support.waiting import PATIENCE_S

CONSTANTS = "ROUTER_CONSTANTS"
LIMITS = {
    "kvpool.router.requests.active_request": (
        "ActiveRequest.LOST_SAVE_S",
        "FOLLOW_MORE_S",
    ),
    "kvpool.router.requests.request_notes": ("USAGE_S",),
    "kvpool.router.command": ("CLIENT_TIMEOUT_S",),
    "kvpool.router.engines.engine_catalog": ("START_S",),
    "kvpool.router.engines.engine_server": ("ASK_S",),
    "kvpool.router.group.addresses": ("CONNECT_S",),
    "kvpool.router.group.group": ("ASK_S", "CONNECT_S", "HEARTBEAT_S"),
    "kvpool.router.group.links": ("HEARTBEAT_S", "HELLO_S"),
    # Not EVENTS_S: an event that is lost at the beginning is made up for by a second try.
    "kvpool.router.engines.hash_check": ("ANSWER_S", "CONNECT_S"),
    "kvpool.router.requests.intake": ("TOKENIZE_S",),
    "kvpool.router.requests.intents": ("TOKENIZE_S",),
    "kvpool.router.records.recorder": ("Recorder.CLOSE_S",),
    "kvpool.telemetry.otlp": ("EXPORT_S",),
}


def be_patient(change: Callable[[Any, str, float], None] = setattr) -> None:
    """In this process, which runs no router yet."""
    for module, names in LIMITS.items():
        found = import_module(module)
        for path in names:
            owner, _, name = path.rpartition(".")
            of = getattr(found, owner) if owner else found
            assert getattr(of, name) <= PATIENCE_S, (module, path)
            change(of, name, PATIENCE_S)


def use_constants(values: dict[str, Any]) -> None:
    """Give configurations that are loaded in this process these values of their constants."""
    load = config.load

    def with_constants(**given: Any) -> tuple[config.RouterConfig, config.Secrets]:
        found, secrets = load(**given)
        return msgspec.structs.replace(found, **values), secrets

    config.load = with_constants


if __name__ == "__main__":
    from kvpool.cli import main

    be_patient()
    use_constants(json.loads(os.environ.get(CONSTANTS, "{}")))
    main()
