"""Log format: one line a record, on standard error, for people (`text`) or for programs (`json`).

Fields are kept beside the message, so that it need not be parsed: `log.warning("...", extra={"peer": name})`.
A worker process logs as its daemon does, and its lines carry its name.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvpool.plain_text import plain

LEVEL_VARIABLE = "KVPOOL_LOG_LEVEL"
FORMAT_VARIABLE = "KVPOOL_LOG_FORMAT"
FIELD_CHARACTERS_MAX = 2000
HIDDEN = "***"
OURS = "kvpool"

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every record has; the others are fields."""
_SECRET_FIELD = re.compile(r"token|secret|password|api_key")
_PASSWORD = re.compile(r"(?<=://)[^\s/@]*:[^\s/@]*(?=@)")
_PLAIN = re.compile(r"[^\s\"=]+")


def setup(level: str, form: str, **fields: str) -> None:
    """Start logging, replacing an earlier setup. level: debug, info, warning or error. form: text or json.

    fields: carried by all lines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if form == JsonFormatter.form else TextFormatter)(fields))
    root = logging.getLogger()
    for other in root.handlers[:]:
        if isinstance(other.formatter, LineFormatter):
            root.removeHandler(other)
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """For kvpool's loggers, also while the process runs. Libraries log warnings at most."""
    logging.getLogger(OURS).setLevel(level.upper())
    logging.getLogger().setLevel(max(logging.getLogger(OURS).level, logging.WARNING))


def setup_worker(name: str) -> None:
    """In a worker process: log as its daemon, started with `inherited`. name: `transfer`."""
    environ = os.environ
    setup(environ.get(LEVEL_VARIABLE, "warning"), environ.get(FORMAT_VARIABLE, "text"), worker=name)


def inherited() -> dict[str, str]:
    """The environment with which a worker process logs as this one does; empty if logging was not set up."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter):
            level = logging.getLevelName(logging.getLogger(OURS).level).lower()
            return {LEVEL_VARIABLE: level, FORMAT_VARIABLE: handler.formatter.form}
    return {}


class LineFormatter(logging.Formatter):
    """One line a record. No secret is in it: neither fields of that name nor passwords in URLs."""

    form: str

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def _all_fields(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        yield from self._fields.items()
        for name, value in vars(record).items():
            if name not in _OWN:
                yield name, HIDDEN if _SECRET_FIELD.search(name) else _bounded(value)
        if record.exc_info:
            yield "exception", _without_passwords(self.formatException(record.exc_info))


class TextFormatter(LineFormatter):
    """`2026-03-01T12:00:00.000Z WARNING kvpool.daemon: the disk takes no writes disk=/mnt/nvme0`."""

    form = "text"

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname, f"{record.name}:", _message(record)]
        parts += [f"{name}={_word(value)}" for name, value in self._all_fields(record)]
        return plain(" ".join(parts).replace("\n", "\\n").replace("\r", "\\r"))


class JsonFormatter(LineFormatter):
    """`{"time": "...", "level": "warning", "logger": "kvpool.daemon", "message": "...", "disk": "/mnt/nvme0"}`."""

    form = "json"

    def format(self, record: logging.LogRecord) -> str:
        own = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        line = {**own, **dict(self._all_fields(record)), **own}
        return msgspec.json.encode(line, enc_hook=str).decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + (
        f"{int(record.msecs):03d}Z"
    )


def _message(record: logging.LogRecord) -> str:
    return _without_passwords(record.getMessage())


def _without_passwords(text: str) -> str:
    return _PASSWORD.sub(HIDDEN, text)


def _bounded(value: Any) -> Any:
    """The value; its beginning as text if it is long."""
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    if len(text) > FIELD_CHARACTERS_MAX:
        value = text[:FIELD_CHARACTERS_MAX]
    return _without_passwords(value) if isinstance(value, str) else value


def _word(value: Any) -> str:
    """A value of one word; in quotes if it has spaces."""
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else msgspec.json.encode(value).decode()
    return msgspec.json.encode(value, enc_hook=str).decode()
