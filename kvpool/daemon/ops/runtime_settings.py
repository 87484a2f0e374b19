"""Settings as shown to operators, and those that they may change while the daemon runs.

A change holds until the daemon ends; permanent changes belong into the daemon's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvpool.config import SETTINGS, DaemonConfig, parse_setting, settings_of
from kvpool.errors import ConfigError, InvalidRequest
from kvpool.wire.answers import Setting

CHANGEABLE = (
    "clients_max",
    "replicas_max",
    "replication_bandwidth",
    "forward",
    "log_level",
    "ssd_bytes_per_day",
    "ssd_drain_s",
    "ssd_flush_s",
)
SHOWN_CHARACTERS_MAX = 1000


def describe(config: DaemonConfig) -> list[Setting]:
    """Describe each setting in plain values."""
    shown = []
    for name, each in settings_of(DaemonConfig).items():
        value = given = getattr(config, name)
        if each.secret:
            value = bool(value)
        elif name == "tenants":
            value = [{"name": t.name, "memory": t.memory, "ssd": t.ssd} for t in config.tenants]
        shown.append(
            Setting(
                name=name,
                value=msgspec.to_builtins(value),
                secret=each.secret,
                default=given == each.default,
                changeable=name in CHANGEABLE,
                help=each.help,
                form=each.metavar,
            )
        )
    return shown


def changed(config: DaemonConfig, changes: Mapping[str, Any]) -> DaemonConfig:
    """The same with these settings changed. Raises `InvalidRequest`, and changes nothing."""
    if not changes:
        raise InvalidRequest("name at least one setting to change")
    parsed = {}
    for name, value in changes.items():
        if name not in CHANGEABLE:
            what = (
                "cannot be changed while the daemon runs" if name in SETTINGS else "is no setting"
            )
            raise InvalidRequest(
                f"{name:.40} {what}; the settings that can be changed are {', '.join(CHANGEABLE)}"
            )
        try:
            parsed[name] = parse_setting(name, value)
        except ConfigError as error:
            raise InvalidRequest(str(error)[:SHOWN_CHARACTERS_MAX]) from None
    return msgspec.structs.replace(config, **parsed)
