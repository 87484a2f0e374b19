"""The daemon's configuration: one TOML file, `KVPOOL_*` variables and flags, read once, then frozen.

Precedence, lowest first: defaults, file, environment, flags. Each setting has one name everywhere: `memory` in
the file is `KVPOOL_MEMORY` in the environment and `--memory` on the command line. Every value is checked
here, at the edge; inside, nothing reads the environment. A secret may be in a file instead, named by
`KVPOOL_NAME_FILE`, as containers and systemd provide them.

`settings` declares all settings; `declare` defines declarations and converts values; `parse` and `tables` parse
the written forms; `sources` reads them; `checks` rejects invalid combinations.
"""

from __future__ import annotations

from kvpool.config.declare import Setting, kind, setting, settings_of
from kvpool.config.parse import (
    HTTP_UNIX,
    LogFormat,
    LogLevel,
    host_and_port,
    otlp_endpoint,
    parse_size,
)
from kvpool.config.settings import (
    OBJECT_WRITE_MODES,
    SECRETS,
    SETTINGS,
    WRITE_MODES,
    DaemonConfig,
    parse_setting,
)
from kvpool.config.sources import (
    config_of,
    default_operator_socket,
    default_socket_path,
    from_file,
    from_flags,
    gather,
    load,
    secret_of,
)
from kvpool.config.tables import DeviceConfig, DiskConfig, StreamConfig, TenantConfig

__all__ = [
    "HTTP_UNIX",
    "OBJECT_WRITE_MODES",
    "SECRETS",
    "SETTINGS",
    "WRITE_MODES",
    "DaemonConfig",
    "DeviceConfig",
    "DiskConfig",
    "LogFormat",
    "LogLevel",
    "Setting",
    "StreamConfig",
    "TenantConfig",
    "config_of",
    "default_operator_socket",
    "default_socket_path",
    "from_file",
    "from_flags",
    "gather",
    "host_and_port",
    "kind",
    "load",
    "otlp_endpoint",
    "parse_setting",
    "parse_size",
    "secret_of",
    "setting",
    "settings_of",
]
