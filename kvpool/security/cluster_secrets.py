"""The secrets by which the daemons of a cluster know each other, and their change while the daemons run.

A file has one a line, the newest first, of printable characters; behind one that is being replaced stands until when
it is accepted:

    5f3c...
    91ab... until 2026-12-01T12:00:00Z

Two daemons talk if they have any secret in common, so the same new file can be given to one node after the other
within that time.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from kvpool.errors import ConfigError
from kvpool.secret_files import SECRET_CHARACTERS_MIN, is_own, is_printable, read_small, write_whole
from kvpool.security.file_watch import Reloaded

SECRETS_MAX = 4  # of a file: each is tried at each handshake
SECRET_BYTES = 32  # of those that are made here
KEEP_S_MAX = 366 * 86400
UNTIL = " until "
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
WHERE = "cluster_secret_file"

log = logging.getLogger("kvpool.transfer")


@dataclass(frozen=True, slots=True)
class SecretSource:
    """Where a daemon's secrets are: `text`, one secret, or `path`, a file; both empty: it has none.

    local: it was made on this machine, so that no other machine can know it.
    """

    text: str = ""
    path: str = ""
    local: bool = False


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """One secret. until: when it ends, by the machine's clock; infinite: it does not."""

    secret: bytes
    until: float = math.inf


class ClusterSecrets:
    """The accepted secrets, the preferred one first. Thread-safe.

    A changed file is read again without a restart; an invalid one is logged once, and the last valid one stays in
    use. Raises `ConfigError` if the first one is invalid. clock: monotonic. now: the machine's.
    before: `lines` of another process of this daemon: used if the file cannot be read now.
    """

    def __init__(
        self,
        source: SecretSource,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        before: str = "",
    ) -> None:
        self.source = source
        self._now = now
        static = (ClusterSecret(source.text.encode()),) if source.text else ()
        self._read = Reloaded(
            [source.path] if source.path else [],
            lambda: read_secrets(source.path) if source.path else static,
            "cluster secrets",
            log,
            clock,
            parse_secrets(before, source.path) if before else None,
        )

    @classmethod
    def of(cls, *texts: str) -> Self:
        """These, which do not change."""
        found = cls(SecretSource())
        made = tuple(ClusterSecret(text.encode()) for text in texts)
        found._read = Reloaded([], lambda: made, "cluster secrets", log)
        return found

    def current(self) -> tuple[bytes, ...]:
        """Those accepted now. Empty: there are none, so no peer is accepted."""
        now = self._now()
        return tuple(each.secret for each in self._read.current() if now < each.until)

    def known(self) -> tuple[bytes, ...]:
        """The same, and behind them those that have ended and are still in the file."""
        now = self._now()
        return tuple(
            each.secret for each in sorted(self._read.current(), key=lambda each: each.until <= now)
        )

    def lines(self) -> str:
        """What is in use, as in a file."""
        return b"".join(map(_line, self._read.current())).decode()


def read_secrets(path: str, where: str = WHERE) -> tuple[ClusterSecret, ...]:
    """The secrets of a file. where: the setting that names it. Raises `ConfigError`, which shows none of them."""
    # What an orchestrator has mounted is not the daemon's own, and has the mode that it gives to all secrets.
    return parse_secrets(read_small(path, where, private=is_own(path)), path, where)


def parse_secrets(content: str, path: str, where: str = WHERE) -> tuple[ClusterSecret, ...]:
    """The same of a file's content."""
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        text = line.strip()
        word, _, end = text.rpartition(UNTIL) if UNTIL in text else (text, "", "")
        if not word:
            continue
        if not is_printable(word.replace(" ", "")) or len(word) < SECRET_CHARACTERS_MIN:
            raise ConfigError(
                f"{where}: {path}, line {number}: must be one secret of at least {SECRET_CHARACTERS_MIN} printable "
                f"characters, perhaps with{UNTIL}and a time behind it; `kvpool secret create` makes such a file"
            )
        found.append(
            ClusterSecret(word.encode(), _time(end, path, number, where) if end else math.inf)
        )
    if not found:
        raise ConfigError(f"{where}: {path} has no secret; `kvpool secret create` makes one")
    if len(found) > SECRETS_MAX:
        raise ConfigError(f"{where}: {path} has {len(found)} secrets; the limit is {SECRETS_MAX}")
    if found[0].until != math.inf:
        raise ConfigError(
            f"{where}: {path}: the first secret must not end: put the new one above it"
        )
    return tuple(found)


def _time(text: str, path: str, line: int, where: str) -> float:
    try:
        return datetime.strptime(text.strip(), TIME_FORMAT).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(
            f"{where}: {path}, line {line}: the time must look like 2026-12-01T12:00:00Z"
        ) from None


def create_secrets(path: Path) -> bool:
    """Make a file with a random secret, of mode 0600; leaves one alone that is there. Returns whether this one is.

    Of several processes that do this at a time, one makes it. Raises `ConfigError`.
    """
    return write_whole(path, _line(ClusterSecret(_random())), replace=False)


def rotate_secrets(path: Path, keep_s: float, now: float) -> float:
    """Put a new secret first; the others are accepted for `keep_s` more at most. Returns until when.

    Those that have ended stay in the file as long as there is room: by them a node that was away knows the cluster.
    The file's owner and mode stay. Raises `ConfigError`.
    """
    if not 0 <= keep_s <= KEEP_S_MAX:
        raise ConfigError(f"--keep: at most {KEEP_S_MAX // 86400} days")
    until = math.floor(now + keep_s)
    old = read_secrets(str(path))
    if sum(now < each.until for each in old) >= SECRETS_MAX:
        raise ConfigError(
            f"{path} has {SECRETS_MAX} secrets that are still accepted: wait until one has ended"
        )
    kept = [ClusterSecret(each.secret, min(each.until, until)) for each in old]
    while len(kept) >= SECRETS_MAX:
        kept.remove(min(kept, key=lambda each: each.until))
    made = [ClusterSecret(_random()), *kept]
    write_whole(path.resolve(), b"".join(map(_line, made)), keep=True)
    return until


def default_path(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the daemons of one user on one machine have a cluster's secret that nobody has given them."""
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvpool" / f"{cluster}.secret"


def make_default(cluster: str, environ: Mapping[str, str] = os.environ) -> SecretSource:
    """The secret of this user and machine, made if there is none yet. Raises `ConfigError`."""
    try:
        path = default_path(cluster, environ)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # a user without a home, too
        raise ConfigError(
            f"{WHERE}: there is no place for a secret of this user: {error}: set cluster_secret_file to a file of "
            "another folder (`kvpool secret create`), or KVPOOL_CLUSTER_SECRET"
        ) from None
    if create_secrets(path):
        log.warning("a secret for the peers of this machine was made: %s", path)
    return SecretSource(path=str(path), local=True)


def _random() -> bytes:
    return secrets.token_hex(SECRET_BYTES).encode()


def _line(secret: ClusterSecret) -> bytes:
    end = ""
    if secret.until != math.inf:
        end = UNTIL + datetime.fromtimestamp(secret.until, UTC).strftime(TIME_FORMAT)
    return secret.secret + f"{end}\n".encode()
