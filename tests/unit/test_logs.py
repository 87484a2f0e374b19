"""What is logged: one line a record, for people or for programs, without secrets."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from datetime import datetime

import pytest

from kvpool.telemetry import logs

log = logging.getLogger("kvpool.test")


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("warning", "text")
    fields = {"peer": "host-2", "path": "/a b", "blocks": 3, "details": {"of": "x"}}
    log.warning("an offer to %s failed", "host-2", extra=fields)
    log.info("nobody hears it")
    (line,) = printed(capsys)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING kvpool\.test: an offer to host-2 failed "
        r'peer=host-2 path="/a b" blocks=3 details={"of":"x"}',
        line,
    )


def test_text_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("warning", "text")
    log.warning("two\nlines\r", extra={"path": "a\nb"})
    try:
        raise ValueError("broken\nhere")
    except ValueError:
        log.exception("it failed")
    first, second = printed(capsys)
    assert first.endswith(r'two\nlines\r path="a\nb"')
    assert "Traceback" in second and r"broken\\nhere" in second


def test_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "json")
    log.info('said "%s"\n', "x", extra={"job": "evict-1", "keys": (b"k", {1})})
    log.warning("a field of ours", extra={"level": "mine"})
    first, second = map(json.loads, printed(capsys))
    when = datetime.fromisoformat(first.pop("time"))
    assert when.utcoffset() is not None
    assert first == {
        "level": "info",
        "logger": "kvpool.test",
        "message": 'said "x"\n',
        "job": "evict-1",
        "keys": ["aw==", [1]],
    }
    assert second["level"] == "warning"


def test_json_has_what_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("error", "json")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    (line,) = map(json.loads, printed(capsys))
    assert line["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_logged(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("warning", form)
    url = "redis://user:hush@host:6379"
    log.warning("%s does not answer", url, extra={"operator_token": "hush", "url": url})
    try:
        raise OSError(f"cannot connect to {url}")
    except OSError:
        log.exception("it failed")
    lines = printed(capsys)
    assert len(lines) == 2
    assert not any("hush" in line for line in lines)
    assert "redis://***@host:6379 does not answer" in lines[0]


def test_a_long_field_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("warning", "json")
    log.warning("long", extra={"details": {"all": "x" * 3 * logs.FIELD_CHARACTERS_MAX}})
    (line,) = map(json.loads, printed(capsys))
    assert len(line["details"]) == logs.FIELD_CHARACTERS_MAX


def test_the_level_changes_while_it_runs_and_libraries_stay_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup("warning", "text")
    logs.set_level("debug")
    log.debug("now it is heard")
    logging.getLogger("somebody.else").info("this is not")
    assert len(printed(capsys)) == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_worker_logs_as_its_daemon_does_with_its_name(form: str) -> None:
    logs.setup("info", form)
    code = (
        "import logging; from kvpool.telemetry import logs; logs.setup_worker('transfer');"
        "logging.getLogger('kvpool.transfer').info('connected')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **logs.inherited()},
        capture_output=True,
        text=True,
        check=True,
    )
    if form == "json":
        assert json.loads(done.stderr)["worker"] == "transfer"
    else:
        assert done.stderr.endswith("INFO kvpool.transfer: connected worker=transfer\n")


def test_where_nothing_is_set_up_nothing_is_inherited() -> None:
    assert logs.inherited() == {}
