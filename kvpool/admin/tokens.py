"""Tokens, their roles and tenants, and rate limits. No I/O except reading one file.

    [[token]]
    name = "ci"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    role = "operator"
    tenants = ["*"]

The file contains no secrets: only the digests of random tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tomllib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from kvpool.errors import ConfigError
from kvpool.secret_files import write_whole
from kvpool.security.file_watch import FileWatch
from kvpool.token_bucket import TokenBucket
from kvpool.wire.command import Role

ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
ALL = "*"
LOCAL_NAME = "local"
"""The name of a principal without token, and of the daemon's own token."""
TOKENS_MAX = 1000
FILE_BYTES_MAX = 1 << 20
TOKEN_BYTES = 32
TOKEN_CHARACTERS_MAX = 512

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

Tenant = Annotated[str, msgspec.Meta(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,62})$")]


class TokenEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[token]]`."""

    name: Name
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    role: Role
    tenants: Annotated[list[Tenant], msgspec.Meta(min_length=1, max_length=1000)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    token: Annotated[list[TokenEntry], msgspec.Meta(max_length=TOKENS_MAX)] = []


@dataclass(frozen=True, slots=True)
class Principal:
    """The principal of a request. tenants: None: all. digest: of the token; empty: none was needed."""

    name: str
    role: Role
    tenants: frozenset[str] | None = None
    digest: bytes = field(default=b"", repr=False)

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def sees(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants

    @property
    def whole(self) -> bool:
        """Whether it sees what is of no one tenant."""
        return self.tenants is None


def digest_of(token: str) -> bytes:
    """The digest under which a token is stored."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class Tokens:
    """Principals by the digests of their tokens. Event loop only.

    file: re-read when it changes; an invalid one is logged, and the previous tokens stay. digest: of the
    daemon's own token, hex, if any. Raises `ConfigError` if the file is invalid at first.
    """

    def __init__(
        self,
        file: str,
        digest: str,
        clock: Callable[[], float],
        complain: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path = Path(file) if file else None
        self._complain = complain
        self._own: dict[bytes, Principal] = {}
        if digest:
            own = bytes.fromhex(digest)
            self._own[own] = Principal(LOCAL_NAME, "admin", digest=own)
        self._watch = FileWatch([file] if file else [], clock)
        self._known = self._load()

    def find(self, token: str) -> Principal | None:
        """Compares all digests, so that the timing reveals nothing about any."""
        self._refresh()
        asked = digest_of(token)
        found = None
        for digest, principal in self._known.items():
            if hmac.compare_digest(digest, asked):
                found = principal
        return found

    def has(self, principal: Principal) -> bool:
        """Whether its token is still good, for the same."""
        self._refresh()
        return self._known.get(principal.digest) == principal

    def _refresh(self) -> None:
        if not self._watch.changed():
            return
        try:
            self._known = self._load()
        except ConfigError as error:
            self._complain(f"the tokens stay as they were: {error}")

    def _load(self) -> dict[bytes, Principal]:
        if self._path is None:
            return self._own
        entries = read_tokens(self._path)
        found = dict(self._own)
        for entry in entries:
            tenants = None if ALL in entry.tenants else frozenset(entry.tenants)
            digest = bytes.fromhex(entry.sha256)
            found[digest] = Principal(entry.name, entry.role, tenants, digest)
        return found


def read_tokens(path: Path) -> list[TokenEntry]:
    """Raises `ConfigError` for a file that is not one of tokens, or that others may read."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"http_tokens: cannot read {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"http_tokens: other users can access {path}: chmod 600 {path}")
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"http_tokens: {path} has more than {FILE_BYTES_MAX} bytes")
    try:
        found = msgspec.convert(tomllib.loads(raw.decode()), _File).token
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"http_tokens: {path} is not a valid token file: {error}") from None
    names = [entry.name for entry in found]
    if len(set(names)) != len(names):
        raise ConfigError(f"http_tokens: {path} has a name twice: each token needs its own")
    if LOCAL_NAME in names:
        raise ConfigError(
            f"http_tokens: {path} has a token {LOCAL_NAME!r}, which is reserved for the daemon's own"
        )
    return found


def add_token(path: Path, name: str, role: str, tenants: list[str]) -> str:
    """Create a token, and append its entry to the file, which is created with mode 0600. Returns the token.

    The file is replaced atomically. Raises `ConfigError`.
    """
    old = read_tokens(path) if path.exists() else []
    token = secrets.token_urlsafe(TOKEN_BYTES)
    entry = {
        "name": name,
        "sha256": digest_of(token).hex(),
        "role": role,
        "tenants": tenants or [ALL],
    }
    try:
        made = msgspec.convert(entry, TokenEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not a valid token: {error}") from None
    if name == LOCAL_NAME or any(each.name == name for each in old):
        raise ConfigError(
            f"{path} already has a token {name!r}: remove it first, or choose another name"
        )
    if len(old) >= TOKENS_MAX:
        raise ConfigError(f"{path} has {TOKENS_MAX} tokens, the limit: remove some")
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        text += "\n"
    listed = ", ".join(f'"{tenant}"' for tenant in made.tenants)
    text += (
        f'\n[[token]]\nname = "{made.name}"\nsha256 = "{made.sha256}"\nrole = "{made.role}"\n'
        f"tenants = [{listed}]\n"
    )
    write_whole(path, text.lstrip("\n").encode(), keep=True)
    return token


@dataclass(eq=False, repr=False, slots=True)
class Rates:
    """Buckets by name, of bounded number: the longest unused are dropped."""

    _rate: float
    _most: float
    _clock: Callable[[], float]
    _names: int
    _buckets: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict, init=False)

    def take(self, name: str) -> float:
        """0, or the seconds to wait."""
        bucket, now = self._bucket(name), self._clock()
        wait_s = bucket.wait_s(1, now)
        if not wait_s:
            bucket.take(1, now)
        return wait_s

    def empty(self, name: str) -> bool:
        bucket = self._buckets.get(name)
        return bucket is not None and bucket.left(self._clock()) < 1

    def _bucket(self, name: str) -> TokenBucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = TokenBucket(self._rate, self._most, self._clock())
            if len(self._buckets) > self._names:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        return bucket
