"""Validates clients' and peers' requests at the edge, so that the rest of the daemon can rely on them."""

from __future__ import annotations

import hashlib
import re
from array import array
from typing import Any

from kvpool.decoding import JsonDecoder
from kvpool.errors import InvalidRequest, LimitExceeded, ProtocolError
from kvpool.placement.kv_events.engine_blocks import GROUPS_MAX
from kvpool.placement.records import DEFAULT_SETTINGS, NamespaceSettings, SettingsChange
from kvpool.types import (
    DATA_PARALLEL_RANKS_MAX,
    ENGINE_SIZE_MAX,
    KEY_BYTES,
    PARTS_MAX,
    RECORD_BYTES_MAX,
    REQUEST_MAX,
    EngineRecord,
    PartKind,
    PartSpec,
)
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire

FIELDS_DEPTH_MAX = 32  # nesting of a namespace's record
TEXT_MAX = 256  # of endpoints, topics and the like
ENGINE_ROLES = ("both", "prefill", "decode")
# Events are not authenticated, and a client must not make the daemon connect anywhere else.
_HTTP = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_ANYWHERE = re.compile(r"tcp://[^\s/*]+:[1-9]\d{0,4}|ipc://[/@][^*\0]+")
_HEX = re.compile(r"([0-9a-f]{2}){0,64}")
_ON_THIS_MACHINE = re.compile(
    r"tcp://(127\.\d{1,3}\.\d{1,3}\.\d{1,3}|localhost):[1-9]\d{0,4}|ipc://[/@][^*\0]+"
)


def rows(packed: bytes) -> array[int]:
    """Row numbers or indices, u32 each."""
    if len(packed) % 4:
        raise InvalidRequest("rows and indices must be packed as 4 bytes each")
    return array("I", packed)


def check_counts(namespaces: int, packed: bytes, beside: bytes = b"") -> None:
    """Of a request for the same keys in several namespaces, and for those beside in one. Raises `LimitExceeded`, and
    `InvalidRequest` for no namespace, or what are no whole keys.
    """
    if not namespaces or len(packed) % KEY_BYTES or len(beside) % KEY_BYTES:
        raise InvalidRequest(
            f"{len(packed)} and {len(beside)} bytes of block keys, {KEY_BYTES} each, in {namespaces} namespaces: at "
            "least one namespace is required, and whole keys"
        )
    keys = (len(packed) * namespaces + len(beside)) // KEY_BYTES
    if namespaces > frame.NAMESPACES_MAX or keys > frame.KEYS_MAX:
        raise LimitExceeded(
            f"{keys} keys in {namespaces} namespaces in one request; the limit is {frame.NAMESPACES_MAX} namespaces, and "
            f"{frame.KEYS_MAX} keys in all of them together"
        )


_decode_fields = JsonDecoder[dict[str, Any]](dict[str, Any], "a namespace's fields, a JSON object")


def parse_parts(
    digest: bytes, fields: bytes, parts: list[tuple[int, str, int, int]]
) -> list[PartSpec]:
    """Validate a client's namespace. Raises `InvalidRequest`."""
    if len(fields) > RECORD_BYTES_MAX or not 0 < len(parts) <= PARTS_MAX:
        raise InvalidRequest(
            f"a namespace must have at most {RECORD_BYTES_MAX} bytes of fields and 1 to {PARTS_MAX} parts"
        )
    if hashlib.sha256(fields).digest()[:16] != digest:
        raise InvalidRequest("the namespace's digest does not match its fields")
    try:
        decoded = _decode_fields(fields)
    except ProtocolError as error:
        raise InvalidRequest(str(error)) from None
    if _deeper(decoded, FIELDS_DEPTH_MAX):
        raise InvalidRequest(
            f"a namespace's fields must be a JSON object, nested at most {FIELDS_DEPTH_MAX} deep"
        )
    specs = []
    for nbytes, kind, window, stride in parts:
        if kind not in list(PartKind):
            raise InvalidRequest(
                f"a part's kind must be one of {[str(k) for k in PartKind]}, not {kind!r}"
            )
        specs.append(PartSpec(nbytes, PartKind(kind), window, stride))
    return specs


def parse_wish(m: client_wire.OpenNamespace) -> NamespaceSettings:
    """The settings that a client requests for a new namespace. Raises `InvalidRequest`."""
    wish = SettingsChange(
        m.replicas or None, m.write, m.ttl_s, m.ssd_codec, write_object=m.write_remote
    )
    return wish.checked().apply(DEFAULT_SETTINGS)


def parse_change(m: operator_wire.Configure) -> SettingsChange:
    """The settings change that an operator requests. Raises `InvalidRequest`."""
    change = SettingsChange(
        m.replicas, m.write, m.ttl_s, m.ssd_codec, m.dram_quota, m.ssd_quota, m.write_remote
    )
    if change.empty:
        raise InvalidRequest("name at least one setting to change")
    return change.checked()


def check_events(m: client_wire.FollowEvents, parts: int) -> None:
    """Raises `InvalidRequest` for events that cannot be followed, or are not on this machine."""
    for endpoint in (m.endpoint, m.replay):
        if endpoint and (len(endpoint) > TEXT_MAX or not _ON_THIS_MACHINE.fullmatch(endpoint)):
            raise InvalidRequest(
                f"events must be published on this machine, as tcp://127.0.0.1:5557 or ipc:///path, "
                f"not {endpoint!r:.100}"
            )
    if len(m.topic) > TEXT_MAX:
        raise InvalidRequest(f"a topic of events must have at most {TEXT_MAX} characters")
    if len(m.groups) != parts or not all(0 <= group < GROUPS_MAX for group in m.groups):
        raise InvalidRequest(
            f"each of the namespace's {parts} parts must have one group, from 0 to {GROUPS_MAX - 1}"
        )


def check_engine(engine: EngineRecord) -> None:
    """Raises `InvalidRequest` for invalid announcements, or ones that others could not use."""
    if not _HTTP.fullmatch(engine.url) or len(engine.url) > TEXT_MAX:
        raise InvalidRequest(
            f"an engine's url must be http://HOST:PORT as others reach it, not {engine.url!r:.100}"
        )
    if engine.role not in ENGINE_ROLES:
        raise InvalidRequest(
            f"an engine's role must be one of {', '.join(ENGINE_ROLES)}, not {engine.role!r:.100}"
        )
    for endpoint in (engine.events, engine.replay):
        if endpoint and (len(endpoint) > TEXT_MAX or not _ANYWHERE.fullmatch(endpoint)):
            raise InvalidRequest(
                f"the address of events must be tcp://HOST:PORT or ipc:///path, not {endpoint!r:.100}"
            )
    texts = (engine.model, engine.topic, engine.hash_algorithm)
    if any(len(text) > TEXT_MAX for text in texts):
        raise InvalidRequest(f"an engine's model and topic must have at most {TEXT_MAX} characters")
    if not _HEX.fullmatch(engine.none_hash):
        raise InvalidRequest(
            "the start of a chain of hashes must be at most 64 bytes, as hex digits"
        )
    if len(engine.groups) > GROUPS_MAX or not all(0 <= n < GROUPS_MAX for n in engine.groups):
        raise InvalidRequest(f"an engine's groups must be from 0 to {GROUPS_MAX - 1}")
    sizes = (
        *(engine.block_tokens, engine.block_bytes, engine.capacity_tokens),
        *(engine.step_tokens, engine.steps_at_once, engine.max_len, engine.follows_max),
    )
    if not all(0 <= size <= ENGINE_SIZE_MAX for size in sizes):
        raise InvalidRequest(f"an engine's sizes must be from 0 to {ENGINE_SIZE_MAX}")
    if engine.rank is not None and not 0 <= engine.rank < DATA_PARALLEL_RANKS_MAX:
        raise InvalidRequest(
            f"an engine's data-parallel rank must be from 0 to {DATA_PARALLEL_RANKS_MAX - 1}"
        )


def _deeper(value: object, levels: int) -> bool:
    """Whether a JSON value is nested deeper than that: others must be able to walk it."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_deeper(item, levels - 1) for item in value)


def check_request(label: str) -> str:
    """Raises `InvalidRequest` for what cannot be a request's label."""
    if len(label) > REQUEST_MAX or not label.isprintable():
        raise InvalidRequest(
            f"the label of a request must be at most {REQUEST_MAX} printable characters, not {label!r:.100}"
        )
    return label
