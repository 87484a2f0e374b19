"""Files with secrets: only their owner may reach them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from kvpool.errors import ConfigError

SECRET_FILE_BYTES_MAX = 4096
SECRET_CHARACTERS_MIN = 16


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


def is_own(path: str) -> bool:
    """Whether this user owns the file. False: it is missing."""
    try:
        return os.stat(path).st_uid == os.getuid()
    except OSError:
        return False


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
    if not is_printable(text):
        raise ConfigError(f"{where}: {path}: must be one line of printable characters")
    return text


def is_printable(text: str) -> bool:
    """Whether this is a word of printable ASCII characters, without spaces."""
    return text != "" and all(33 <= ord(character) <= 126 for character in text)


def write_whole(
    path: Path, data: bytes, mode: int = 0o600, *, replace: bool = True, keep: bool = False
) -> bool:
    """Write a file that is there with all of its contents or not at all, and never open to more than `mode` says.

    replace: False leaves a file alone that is there; returns whether this one is. keep: with the owner, the group and
    the mode of the file that it replaces. Raises `ConfigError`.
    """
    try:
        fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                if keep and path.exists():
                    before = path.stat()
                    os.fchown(fd, before.st_uid, before.st_gid)
                    mode = stat.S_IMODE(before.st_mode)
                os.fchmod(fd, mode)
                file.write(data)
                file.flush()
                os.fsync(fd)
            if replace:
                os.replace(partial, path)
            else:
                os.link(partial, path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return True
