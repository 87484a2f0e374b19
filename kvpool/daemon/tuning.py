"""Settings as operators see them, and those that they may change while the daemon runs.

A change holds until the daemon ends: what is to outlive it belongs into the file that it is started with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from kvpool.config import SETTINGS, DaemonConfig, parse_setting
from kvpool.errors import ConfigError, InvalidRequest

CHANGEABLE = (
    "clients_max",
    "copies_max",
    "copy_bandwidth",
    "forward",
    "ssd_bytes_per_day",
    "ssd_drain_s",
    "ssd_flush_s",
)
LOG_LEVEL = "log_level"
"""No setting of the configuration: how much is logged, by the names of `logging`."""
LOG_LEVELS = ("debug", "info", "warning", "error")
SHOWN_CHARACTERS_MAX = 1000
_root = logging.getLogger("kvpool")


def describe(config: DaemonConfig) -> list[dict[str, Any]]:
    """Plain values: each setting, its value, whether it may be changed. Of secrets only whether there is one."""
    shown = []
    for item in fields(config):
        value, secret = getattr(config, item.name), not item.repr
        if secret:
            value = bool(value)
        elif item.name == "tenants":
            value = [{"name": t.name, "memory": t.memory, "ssd": t.ssd} for t in config.tenants]
        plain = msgspec.to_builtins(value)
        changeable = item.name in CHANGEABLE
        shown.append(
            {"name": item.name, "value": plain, "secret": secret, "changeable": changeable}
        )
    level = logging.getLevelName(_root.getEffectiveLevel()).lower()
    shown.append({"name": LOG_LEVEL, "value": level, "secret": False, "changeable": True})
    return shown


def changed(config: DaemonConfig, changes: Mapping[str, Any]) -> DaemonConfig:
    """The same with these settings changed. Raises `InvalidRequest`, and changes nothing."""
    if not changes:
        raise InvalidRequest("no setting is named that is to be changed")
    parsed = {}
    for name, value in changes.items():
        if name == LOG_LEVEL:
            if value not in LOG_LEVELS:
                raise InvalidRequest(f"{LOG_LEVEL}: one of {', '.join(LOG_LEVELS)}")
            continue
        if name not in CHANGEABLE:
            what = (
                "cannot be changed while the daemon runs" if name in SETTINGS else "is no setting"
            )
            raise InvalidRequest(
                f"{name:.40} {what}; these can be changed: {', '.join((*CHANGEABLE, LOG_LEVEL))}"
            )
        try:
            parsed[name] = parse_setting(name, value)
        except ConfigError as error:
            raise InvalidRequest(str(error)[:SHOWN_CHARACTERS_MAX]) from None
    return replace(config, **parsed)


def set_log_level(changes: Mapping[str, Any]) -> None:
    """If it is among the changes, which have been checked."""
    if LOG_LEVEL in changes:
        _root.setLevel(changes[LOG_LEVEL].upper())
