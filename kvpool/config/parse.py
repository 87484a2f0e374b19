"""Parsers for sizes, lists, addresses and tables, and the kinds of settings that use them.

Each function takes a value as it comes from TOML, a variable or an option, and the name of its source. It
returns plain values for `msgspec` to check, or raises `ConfigError`, which names the source and a correct value.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from kvpool.config.declare import kind
from kvpool.errors import ConfigError
from kvpool.secret_files import SECRET_CHARACTERS_MIN

LABELS_MAX = 32
SOCKET_PATH_MAX = 107  # sockaddr_un
HTTP_ADDRESSES_MAX = 16
HTTP_UNIX = "unix:"
OBJECT_SCHEMES = ("s3", "gs", "az", "file")
OBJECT_BYTES_MIN = 64 << 20
SECONDS_MAX = 86_400
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def parse_size(value: object, where: str) -> int | float:
    """Bytes ("8GiB", 1048576) or a share between 0 and 1 ("25%")."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.endswith("%"):
            try:
                share = float(text[:-1]) / 100
            except ValueError:
                share = 0.0
            if 0 < share <= 1:
                return share
        elif match := _SIZE.fullmatch(text):
            size = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
            if size > 0:
                return size
    raise ConfigError(
        f'{where} = {value!r}: must be bytes ("8GiB") or a share of free memory ("25%")'
    )


def bandwidth(value: object, where: str) -> int:
    """Bytes a second. Raises `ConfigError`."""
    size = parse_size(value, where)
    if not isinstance(size, int):
        raise ConfigError(f'{where} = {value!r}: must be bytes a second, such as "256MiB"')
    return size


def bytes_or_none(value: object, where: str) -> int:
    """Bytes, or 0."""
    return 0 if value in (0, "0") else bandwidth(value, where)


def object_bytes(value: object, where: str) -> int:
    """The size of an object in object storage. Raises `ConfigError`."""
    size = parse_size(value, where)
    if not isinstance(size, int) or size < OBJECT_BYTES_MIN:
        raise ConfigError(
            f"{where} = {value!r}: must be a size of at least {OBJECT_BYTES_MIN >> 20}MiB"
        )
    return size


def audit_bytes(value: object, where: str) -> int:
    """How large an audit file may become."""
    found = parse_size(value, where)
    if not isinstance(found, int) or found < 64 << 10:
        raise ConfigError(f"{where}: must be a size of at least 64KiB")
    return found


def mode(value: object, where: str) -> int:
    """Permissions. A text is octal, as `chmod` takes it; a number is what TOML's 0o660 gives."""
    try:
        found = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= 0o777:
        raise ConfigError(
            f'{where} = {value!r}: must be octal permissions such as 0o660 (as text: "660")'
        )
    return found


def text(value: object, where: str) -> str:
    """A text without NUL. Raises `ConfigError`."""
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{where} = {value!r}: must be a text")
    return value


def hidden(value: object, where: str) -> str:
    """A text that no message may show."""
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{where}: must be a text, in quotes")
    return value


def secret(value: object, where: str) -> str:
    """A secret of at least the minimum length; empty: none. Raises `ConfigError`."""
    found = hidden(value, where)
    if any(ord(character) < 32 for character in found):
        raise ConfigError(
            f"{where}: must be one line; for a cluster's secret with an older one, set cluster_secret_file"
        )
    if found and len(found) < SECRET_CHARACTERS_MIN:
        # Whoever connects may try as many as a connection takes; of a cluster's, which proves, even offline.
        raise ConfigError(
            f"{where}: must have at least {SECRET_CHARACTERS_MIN} random characters; `openssl rand -hex 32` creates "
            "one"
        )
    return found


def word(value: object, where: str) -> str:
    """A name. Raises `ConfigError`."""
    found = text(value, where)
    if not _NAME.fullmatch(found):
        raise ConfigError(
            f"{where} = {found!r}: must be 1 to 63 letters, digits and ._-, beginning with a letter or digit"
        )
    return found


def socket_path(value: object, where: str) -> str:
    """A path that fits a unix socket's address. Raises `ConfigError`."""
    found = text(value, where)
    if not found or len(os.fsencode(found)) > SOCKET_PATH_MAX:
        raise ConfigError(f"{where} = {found!r}: must be a path of 1 to {SOCKET_PATH_MAX} bytes")
    return found


def items(value: object, where: str, wanted: str) -> list[str]:
    """A list of texts, or one text with commas."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)):
        raise ConfigError(f"{where} = {value!r}: {wanted}")
    return [text(item, where).strip() for item in found]


def urls(value: object, where: str) -> tuple[str, ...]:
    """URLs with scheme, host and port. Raises `ConfigError`."""
    found = items(value, where, "a list of URLs such as tcp://127.0.0.1:7070")
    for url in filter(None, found):
        try:
            parts = urlsplit(url)
            good = bool(parts.scheme and parts.hostname) and parts.port is not None
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"{where}: {url!r} is not a URL such as tcp://127.0.0.1:7070")
    return tuple(filter(None, found))


def router_urls(value: object, where: str) -> tuple[str, ...]:
    """URLs of routers. Raises `ConfigError`."""
    found = urls(value, where)
    for url in found:
        if urlsplit(url).scheme not in {"http", "https"} or "@" in url:
            raise ConfigError(
                f"{where}: {url!r} is not a router's URL such as http://10.0.0.9:8080"
            )
    return tuple(url.rstrip("/") for url in found)


def host_and_port(address: str) -> tuple[str, int]:
    """Of HOST:PORT, [ADDRESS]:PORT for IPv6. Raises `ValueError`."""
    parts = urlsplit(f"//{address}")
    if not parts.hostname or parts.port is None or parts.netloc != address or "@" in address:
        raise ValueError(address)
    return parts.hostname, parts.port


def http_addresses(value: object, where: str) -> tuple[str, ...]:
    """HOST:PORT or unix:PATH."""
    wanted = 'a list of addresses such as ["127.0.0.1:7071"]'
    found = tuple(filter(None, items(value, where, wanted)))
    if len(found) > HTTP_ADDRESSES_MAX:
        raise ConfigError(f"{where}: at most {HTTP_ADDRESSES_MAX} addresses")
    for address in found:
        if address.startswith(HTTP_UNIX):
            socket_path(address.removeprefix(HTTP_UNIX), where)
            continue
        try:
            host_and_port(address)
        except ValueError:
            raise ConfigError(
                f"{where}: {address!r} is not HOST:PORT, such as 127.0.0.1:7071, nor unix:/PATH"
            ) from None
    return found


def names(value: object, where: str) -> tuple[str, ...]:
    """Names of nodes. Raises `ConfigError`."""
    return tuple(word(item, where) for item in items(value, where, 'a list of names such as "a,b"'))


def rails(value: object, where: str) -> tuple[str, ...]:
    """Names; "-" is none."""
    found = items(value, where, 'a list of names such as "a,b"')
    return tuple("" if item == "-" else word(item, where) for item in found)


def labels(value: object, where: str) -> dict[str, str]:
    """A table, or "zone=a,rack=7"."""
    if isinstance(value, str):
        value = [item for item in value.split(",") if item]
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, str) and "=" not in item:
                raise ConfigError(f"{where}: {item!r} is not NAME=VALUE, such as zone=a")
        pairs = [item.partition("=")[::2] if isinstance(item, str) else ("", "") for item in value]
        value = dict(pairs)
    if not isinstance(value, dict) or len(value) > LABELS_MAX:
        raise ConfigError(f'{where}: at most {LABELS_MAX} labels, such as "zone=a,rack=7"')
    return {word(key, where): word(label, f"{where}.{key}") for key, label in value.items()}


def object_store(value: object, where: str) -> str:
    """A URL without credentials, which must not be visible in the configuration."""
    found = hidden(value, where)
    try:
        parts = urlsplit(found)
        good = parts.scheme in OBJECT_SCHEMES and bool(
            parts.path.strip("/") if parts.scheme == "file" else parts.hostname
        )
        bare = not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        good = bare = False
    if found and not (good and bare):
        raise ConfigError(
            f"{where}: must be the URL of object storage such as s3://BUCKET/PREFIX, with one of "
            f"{', '.join(OBJECT_SCHEMES)}; put credentials into the environment"
        )
    return found


def otlp_endpoint(value: object, where: str) -> str:
    """A collector's URL: http://HOST:PORT, with or without a path; or empty."""
    found = text(value, where)
    try:
        parts = urlsplit(found)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if found and (not good or parts.username or parts.query or parts.fragment):
        raise ConfigError(
            f"{where} = {found!r}: must be the URL of a collector that accepts OTLP over HTTP, such as http://127.0.0.1:4318"
        )
    return found.rstrip("/")


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Text = Annotated[str, kind(parse=text)]
File = Annotated[str, kind(parse=text, metavar="FILE")]
Folder = Annotated[str, kind(parse=text, metavar="FOLDER")]
Secret = Annotated[str, kind(parse=hidden)]
Name = Annotated[str, kind(parse=word, metavar="NAME")]
Url = Annotated[str, kind(parse=text, metavar="URL")]
Urls = Annotated[tuple[str, ...], kind(parse=urls, metavar="URL")]
Seconds = Annotated[
    float,
    kind("seconds, above 0 and at most 86400", metavar="SECONDS", gt=0, le=SECONDS_MAX),
]
SecondsOrNever = Annotated[
    float,
    kind("seconds, at most 86400; 0: not at all", metavar="SECONDS", ge=0, le=SECONDS_MAX),
]
Size = Annotated[int | float, kind(parse=parse_size, metavar="SIZE")]
