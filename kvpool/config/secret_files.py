"""Files with secrets: only their owner may reach them."""

from __future__ import annotations

import os
import stat

from kvpool.errors import ConfigError

SECRET_FILE_BYTES_MAX = 4096


def check_private(path: str, where: str) -> None:
    """Raises `ConfigError` if others than the file's owner can read or change it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror}") from None
    _check_mode(mode, path, where)


def _check_mode(mode: int, path: str, where: str) -> None:
    # A folder of devices or a pipe has no other readers by its mode.
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{where}: other users can access {path}: chmod 600 {path}")


def read_small(path: str, where: str, *, private: bool) -> str:
    """The text of a small file. private: only its owner may reach it. Raises `ConfigError`, which does not show it."""
    try:
        with open(path, "rb") as file:
            if private:
                _check_mode(os.fstat(file.fileno()).st_mode, path, where)
            content = file.read(SECRET_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror}") from None
    if len(content) > SECRET_FILE_BYTES_MAX:
        raise ConfigError(f"{where}: {path} has more than {SECRET_FILE_BYTES_MAX} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {path} is not UTF-8 text") from None


def read_secret_file(path: str, where: str) -> str:
    """The line in a file that only its owner may reach. Raises `ConfigError`, which does not show it."""
    text = read_small(path, where, private=True).strip()
    if not text or any(ord(character) < 33 or ord(character) > 126 for character in text):
        raise ConfigError(f"{where}: {path}: must be one line of printable characters")
    return text
