"""Two servers' answers to one request, field by field. No I/O.

A field is a place in an answer: `status`, `header content-type`, `body.choices[0].text`, `event 3.choices[0].delta`. Ids
and times are compared by their form alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ITS_OWN = frozenset(
    ("connection", "content-length", "date", "keep-alive", "server", "transfer-encoding")
)
"""Headers that are about a connection or a program, not about an answer."""
ROUTERS = "header x-kvpool-request-id"
"""A header that the router adds to each answer."""
_TIMES = frozenset(("created", "created_at", "completed_at"))
_COUNTS = frozenset(("sequence_number",))
"""Numbers of events, which depend on how many there are."""
_IDS = frozenset(
    ("call_id", "id", "item_id", "request_id", "response_id", "tool_call_id", "x-request-id")
)
_PARTS = frozenset(("choices", "tool_calls"))
_GROWING = frozenset(
    ("arguments", "content", "delta", "partial_json", "reasoning", "text", "thinking")
)
"""Of events: lists whose items have an index, and texts that come in pieces."""
_ID = re.compile(r"^([a-z]+[-_])?.+$", re.DOTALL)
ABSENT = "no such field"


@dataclass(frozen=True)
class Case:
    """A request. differs: the fields in which the router's answer is another one, and why, in a few words.

    body: an object, sent as JSON; or bytes, sent as they are.
    """

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0]

    @property
    def value(self) -> Any:
        """The object of a body that is JSON; else None."""
        if self.content_type != "application/json" or not self.body:
            return None
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Of a stream: names and data, `joined`."""
        if self.content_type != "text/event-stream":
            return []
        found = []
        for block in self.body.decode().replace("\r\n", "\n").strip("\n").split("\n\n"):
            lines = [line.partition(":") for line in block.split("\n")]
            said = {name: text.strip() for name, _, text in lines}
            data = said.get("data", "")
            found.append((said.get("event", ""), json.loads(data) if data[:1] == "{" else data))
        return joined(found)

    def fields(self) -> dict[str, Any]:
        """All that is compared."""
        found: dict[str, Any] = {"status": self.status}
        for name, text in self.headers.items():
            if (short := name.lower()) not in ITS_OWN:
                value = json.loads(text) if text[:1] == "{" else text
                found.update(flat(f"header {short}", value))
        if events := self.events:
            found["events"] = len(events)
            for number, (name, data) in enumerate(events):
                found[f"event {number}"] = name
                found.update(flat(f"event {number}", data))
        elif (value := self.value) is not None:
            found.update(flat("body", value))
        else:
            found["body"] = self.body
        return found


def differences(engine: Answer, router: Answer) -> dict[str, tuple[Any, Any]]:
    """The fields whose values are not the same, with both; `ABSENT`: not there."""
    one, other = engine.fields(), router.fields()
    assert ROUTERS in other, "the router says which request it was"
    del other[ROUTERS]
    return {
        name: (one.get(name, ABSENT), other.get(name, ABSENT))
        for name in {**one, **other}
        if one.get(name, ABSENT) != other.get(name, ABSENT)
    }


CACHED = "body.usage.prompt_tokens_details.cached_tokens"
"""Lower through a router, where the engine that computed the prompt had less of it than the one that answers."""


def _lower(differ: tuple[Any, Any]) -> bool:
    """Whether the second is a smaller number than the first: where there is none, it says so."""
    engine, router = differ
    return isinstance(engine, int) and isinstance(router, int) and router < engine


def unstated(case: Case, found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Of the differences found, those that are not stated; and those that are stated and were not found.

    A stated name that ends with `*` covers all fields that begin like it.
    """

    def covers(stated: str, name: str) -> bool:
        return name == stated or (stated.endswith("*") and name.startswith(stated[:-1]))

    new = [
        name
        for name, differ in found.items()
        if not (name == CACHED and _lower(differ))
        and not any(covers(stated, name) for stated in case.differs)
    ]
    gone = [stated for stated in case.differs if not any(covers(stated, name) for name in found)]
    return new, gone


def joined(events: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """A stream's names and data, as if all that is of one kind had come at once.

    An engine says several tokens in one event if they are there, and of several choices any one first: both are chance.
    """
    found: list[tuple[str, Any]] = []
    for name, data in sorted(events, key=_choice):
        before, last = found[-1] if found else ("", None)
        alike = before == name and _kind((name, last)) == _kind((name, data))
        if isinstance(data, dict) and isinstance(last, dict) and alike:
            found[-1] = (name, _merged(last, data))
        else:
            found.append((name, data))
    return found


def _choice(event: tuple[str, Any]) -> int:
    """What an event is about; what is about no choice comes at the end."""
    choices = event[1].get("choices") if isinstance(event[1], dict) else None
    return int(choices[0]["index"]) if choices else 1 << 30


def _kind(event: tuple[str, Any]) -> tuple[Any, ...]:
    data = event[1] if isinstance(event[1], dict) else {}
    return _choice(event), data.get("type"), data.get("index"), data.get("output_index")


def _merged(one: Any, other: Any, name: str = "") -> Any:
    if other is None or one is None:
        return one if other is None else other
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _merged(one.get(key), other.get(key), key) for key in {**one, **other}}
    if isinstance(one, list) and isinstance(other, list):
        if name in _PARTS:
            by_index = {item["index"]: item for item in one}
            for item in other:
                by_index[item["index"]] = _merged(by_index.get(item["index"]), item)
            return list(by_index.values())
        return one + other
    return one + other if isinstance(one, str) and name in _GROWING else other


def flat(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values in an object, by their places."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            if name in _COUNTS:
                continue
            yield from flat(f"{place}.{name}", item)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from flat(f"{place}[{number}]", item)
    else:
        yield place, _plain(re.split("[. ]", place)[-1], value)


def _plain(name: str, value: Any) -> Any:
    """Without what is another one each time: of ids their kind, of times that they are."""
    if name in _TIMES and isinstance(value, int | float):
        return "a time"
    if name in _IDS and isinstance(value, str):
        kind = _ID.match(value)
        return f"{kind[1] or ''}..." if kind else value
    return value
