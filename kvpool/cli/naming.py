"""What operators type for a namespace, a block or a time."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.config import parse_size
from kvpool.errors import ConfigError, InvalidRequest
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import KEY_BYTES
from kvpool.wire.jobs import JOB_KEYS_MAX

DIGEST_HEX = 32
PREFIX_MIN = 4
FILE_CHARACTERS_MAX = JOB_KEYS_MAX * 64  # of a file of keys
SHOWN_MAX = 5  # candidates that an error lists
QUOTA_TIERS = ("dram", "ssd")

_HEX = re.compile(r"[0-9a-f]+")
_PERIOD = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)
_PERIOD_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def block_key(text: str) -> bytes:
    """A block key from its 32 hex digits. Raises `InvalidRequest`."""
    if len(text) != 2 * KEY_BYTES or not _HEX.fullmatch(text.lower()):
        raise InvalidRequest(
            f"{text!r} is no block key: {2 * KEY_BYTES} hex digits, as `kvpool blocks locate --json` shows them"
        )
    return bytes.fromhex(text)


def block_keys(texts: Sequence[str], file: Path | None = None) -> list[bytes]:
    """Keys that were typed, and those of a file, one a line; - is standard input. Each once, in order.

    Raises `InvalidRequest` for what is none, and for more than one request may name.
    """
    lines = [(f"key {number}", text) for number, text in enumerate(texts, 1)]
    if file is not None:
        try:
            with sys.stdin if str(file) == "-" else file.open() as opened:
                content = opened.read(FILE_CHARACTERS_MAX + 1)
        except OSError as error:
            raise InvalidRequest(f"cannot read keys from {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidRequest(f"{file} is not text: one key a line") from None
        if len(content) > FILE_CHARACTERS_MAX:
            raise InvalidRequest(f"{file} is too long: at most {JOB_KEYS_MAX:,} keys")
        rows = enumerate(content.splitlines(), 1)
        lines += [(f"{file}, line {number}", row.strip()) for number, row in rows if row.strip()]
    found: dict[bytes, None] = {}
    for where, text in lines:
        try:
            found[block_key(text)] = None
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from None
    if len(found) > JOB_KEYS_MAX:
        raise InvalidRequest(f"{len(found):,} keys: at most {JOB_KEYS_MAX:,} may be named at once")
    return list(found)


def size(text: str) -> int:
    """Bytes, from 10GiB. Raises `InvalidRequest`."""
    try:
        found = parse_size(text, "size")
    except ConfigError:
        found = 0
    if not isinstance(found, int) or found <= 0:
        raise InvalidRequest(f"{text!r} is no size: write 10GiB, 512MiB or bytes")
    return found


def period(text: str) -> float:
    """Seconds, from 30s, 15m, 12h, 7d, or 0. Raises `InvalidRequest`."""
    if text == "0":
        return 0.0
    if not (match := _PERIOD.fullmatch(text)):
        raise InvalidRequest(f"{text!r} is no time: write 30s, 15m, 12h or 7d; or 0 for no end")
    return float(match[1]) * _PERIOD_S[match[2]]


def quotas(text: str) -> dict[str, int | float]:
    """By tier, from dram=20%,ssd=50GiB: bytes or a share, or 0 for none. Raises `InvalidRequest`."""
    found: dict[str, int | float] = {}
    for item in text.split(","):
        tier, _, size = item.strip().partition("=")
        if tier not in QUOTA_TIERS or tier in found:
            raise InvalidRequest(
                f"{item!r} is no quota: write dram=20% or ssd=50GiB, with a comma between them; none "
                f"takes one away"
            )
        try:
            found[tier] = 0 if size in {"0", "none"} else parse_size(size, tier)
        except ConfigError:
            raise InvalidRequest(f"{item!r}: a quota is a size (8GiB) or a share (20%)") from None
    return found


def known_digests(cluster: Mapping[str, Any], stats: NodeStats, tenant: str) -> frozenset[str]:
    """The namespaces of a tenant, in hex: those of the cluster, and those that are open on this node."""
    agreed = {entry["digest"] for entry in cluster["namespaces"] if entry["tenant"] == tenant}
    return frozenset(agreed | stats.tenants[tenant].namespaces.keys())


def full_digest(text: str, known: Collection[str]) -> bytes:
    """The digest that begins with `text`, of those known. Whole ones need not be known.

    Raises `InvalidRequest` for what is no beginning of a digest, of none that is known, or of several.
    """
    start = text.lower()
    if not PREFIX_MIN <= len(start) <= DIGEST_HEX or not _HEX.fullmatch(start):
        raise InvalidRequest(
            f"{text!r} is no namespace: give {PREFIX_MIN} to {DIGEST_HEX} hex digits of one that "
            f"`kvpool namespaces` shows"
        )
    found = sorted(digest for digest in known if digest.startswith(start))
    if len(start) == DIGEST_HEX:
        return bytes.fromhex(start)
    if len(found) == 1:
        return bytes.fromhex(found[0])
    if not found:
        raise InvalidRequest(
            f"no namespace of this tenant begins with {start}; `kvpool namespaces` shows what there is"
        )
    more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    raise InvalidRequest(
        f"{start} is the beginning of {', '.join(found[:SHOWN_MAX])}{more}: give more digits"
    )
