"""The daemon's configuration: one TOML file, `KVPOOL_*` variables and flags, read once, then frozen.

Later ones win: defaults, file, environment, flags. Each setting has one name everywhere: `memory` in
the file is `KVPOOL_MEMORY` in the environment and `--memory` on the command line. Every value is checked
here, at the edge; inside, nothing reads the environment. A secret may stand in a file instead, which
`KVPOOL_NAME_FILE` names, as containers and systemd hand them over.

`settings` declares all settings; `declare` says how, and converts values; `parse` and `tables` know how people write
them; `sources` reads them; `checks` refuses what does not fit together.
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
    default_socket_path,
    from_file,
    from_flags,
    gather,
    load,
    secret_of,
)
from kvpool.config.tables import DeviceConfig, DiskConfig, TenantConfig

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
    "TenantConfig",
    "config_of",
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
