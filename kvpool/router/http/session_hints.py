"""What a request says of its session: a conversation or a run of an agent, of which it is one turn. No I/O.

Each field is taken from the first of these places that has a valid value:

    session   kv_transfer_params.kvpool_session.id; the headers of `SESSION_HEADERS`, in that order;
              nvext.agent_context.session_id; metadata.session_id; nvext.agent_hints.prefix_id; session_id;
              prompt_cache_key
    agent     kv_transfer_params.kvpool_session.agent; the header x-claude-code-agent-id;
              nvext.agent_context.trajectory_id; metadata.agent_id
    ended     kv_transfer_params.kvpool_session.end; the header x-dynamo-session-final; metadata.session_end
    shared    kv_transfer_params.kvpool_session.shared; true of a prompt_cache_key
    keep_s    the longest `ttl` of a `cache_control`: of the body, of nvext, of tools, of blocks of the system prompt and
              of messages

Values of metadata are texts, as in OpenAI's API. A value that is of no use is ignored and counted; no request is refused
for it. A `ttl` says for how long a prompt should be kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import xxhash

SESSION_HEADERS = ("x-session-id", "x-dynamo-session-id", "x-claude-code-session-id", "session-id")
"""The second one is NeMo's and Dynamo's, the others are those of OpenCode, Claude Code and Codex."""
AGENT_HEADER = "x-claude-code-agent-id"
END_HEADER = "x-dynamo-session-final"
HEADERS = (*SESSION_HEADERS, AGENT_HEADER, END_HEADER)
"""All that are read."""
NAME_MAX = 200  # characters
TENANT_MAX = 50  # characters of a tenant's name before those of its sessions, or its hash
KEEP_MAX_S = 7 * 86_400.0
CACHE_CONTROLS_MAX = 4096  # places that are looked at
DEFAULT_TTL_S = 300.0  # as in Anthropic's API
_TTL = re.compile(r"([0-9]{1,6})(s|m|h)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SessionHint:
    """session: empty: none is named, and then nothing else is of use. agent: a strand of it; empty: the main one.

    ended: there will be no further turn. keep_s: for how long the prompt should be kept; not used yet. bad: values that were ignored. shared:
    several conversations may have this name, as of a `prompt_cache_key`.
    """

    session: str = ""
    agent: str = ""
    ended: bool = False
    keep_s: float | None = None
    bad: int = 0
    shared: bool = False

    def params(self) -> dict[str, object]:
        """As engines with the plugin are told: the `kvpool_session` of their `kv_transfer_params`."""
        said: dict[str, object] = {"id": self.session}
        if self.agent:
            said["agent"] = self.agent
        if self.ended:
            said["end"] = True
        if self.shared:
            said["shared"] = True
        return said


NO_HINT = SessionHint()


class _Finder:
    """Takes the first valid value of several places, and counts what was given and is not valid."""

    def __init__(self) -> None:
        self.bad = 0

    def first(self, read: Callable[[object], Value | None], *given: object) -> Value | None:
        for each in given:
            if each is None:
                continue
            found = read(each)
            if found is not None:
                return found
            self.bad += 1
        return None


def hint_of(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    own: object = None,
    *,
    controls: bool = True,
) -> SessionHint:
    """What a request says of its session. own: the `kvpool_session` of its `kv_transfer_params`. controls: whether the
    body may have any `cache_control`, for which all its messages are looked at.
    """
    find = _Finder()
    own = _fields(own, find)
    metadata = _fields(body.get("metadata"), find)
    nvext = _fields(body.get("nvext"), find)
    context = _fields(nvext.get("agent_context"), find)
    hints = _fields(nvext.get("agent_hints"), find)
    session = find.first(
        _name,
        own.get("id"),
        *map(headers.get, SESSION_HEADERS),
        context.get("session_id"),
        metadata.get("session_id"),
        hints.get("prefix_id"),
        body.get("session_id"),
    )
    shared = find.first(_flag, own.get("shared")) or False
    if session is None:
        session = find.first(_name, body.get("prompt_cache_key"))
        shared = True
    agent = find.first(
        _name,
        own.get("agent") or None,
        headers.get(AGENT_HEADER),
        context.get("trajectory_id"),
        metadata.get("agent_id"),
    )
    ended = find.first(_flag, own.get("end"), headers.get(END_HEADER), metadata.get("session_end"))
    found = _cache_controls(body, nvext) if controls else iter(())
    keep_s = max((ttl for control in found if (ttl := _ttl_s(control, find))), default=None)
    if session is None:
        return SessionHint(keep_s=keep_s, bad=find.bad)
    return SessionHint(session, agent or "", bool(ended), keep_s, find.bad, shared)


def session_name(tenant: str, session: str) -> str:
    """A tenant's session by the name that daemons know it by: no two tenants have one in common.

    Requests without a tenant are the operator's, and name sessions as daemons know them.
    """
    if not tenant:
        return session
    if len(tenant) > TENANT_MAX or "/" in tenant or not tenant.isprintable():
        tenant = xxhash.xxh3_128_hexdigest(tenant.encode(errors="surrogatepass"))
    return f"{tenant}/{session}"


def _fields(value: object, find: _Finder) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    find.bad += value is not None
    return {}


def _name(value: object) -> str | None:
    if isinstance(value, str) and 0 < len(value) <= NAME_MAX and value.isprintable():
        return value
    return None


def _flag(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    return _FLAGS.get(value.lower()) if isinstance(value, str) else None


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def _cache_controls(body: Mapping[str, Any], nvext: Mapping[str, Any]) -> Iterator[object]:
    """All `cache_control` of the places that are looked at."""
    for place in islice(_places(body, nvext), CACHE_CONTROLS_MAX):
        if isinstance(place, dict) and (control := place.get("cache_control")) is not None:
            yield control


def _places(body: Mapping[str, Any], nvext: Mapping[str, Any]) -> Iterator[object]:
    yield body
    yield nvext
    for name in ("tools", "system"):
        if isinstance(blocks := body.get(name), list):
            yield from blocks
    if isinstance(messages := body.get("messages"), list):
        for message in messages:
            yield message
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                yield from content


def _ttl_s(control: object, find: _Finder) -> float | None:
    ttl = control.get("ttl", DEFAULT_TTL_S) if isinstance(control, dict) else None
    if isinstance(ttl, str) and (said := _TTL.fullmatch(ttl)):
        ttl = int(said[1]) * _UNITS[said[2]]
    if isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl <= KEEP_MAX_S:
        return float(ttl)
    find.bad += 1
    return None
