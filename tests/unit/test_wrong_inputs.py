"""What is mistyped, or not there, is named with what would be right, and has an exit status of its own."""

import logging
import os
import socket
import subprocess
import sys

import grpc
import pytest
from typer.testing import CliRunner

from kvpool.cli import base, verbs
from kvpool.config import load
from kvpool.daemon.server import server
from kvpool.errors import ConfigError, InvalidRequest, NotAuthenticated
from kvpool.placement.etcd.client import Refused, _in_words
from kvpool.router.config import load as load_router


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"labels": ["zone"]}, "--label: 'zone' is not NAME=VALUE, such as zone=a"),
        (
            {"join": "http://10.0.0.1:2379", "listen": ["tcp://127.0.0.1:0"]},
            "join = 'http://10.0.0.1:2379': must be the URL of etcd, such as etcd://10.0.0.1:2379",
        ),
        ({"ssd_write": "sideways"}, "--ssd-write = 'sideways': one of back, through, none"),
    ],
)
def test_flags(flags, text):
    with pytest.raises(ConfigError) as caught:
        load(flags=flags, environ={})
    assert str(caught.value).startswith(text)


def test_a_choice_in_a_table_is_named_as_it_is_written():
    with pytest.raises(ConfigError) as caught:
        load_router(flags={"engines": ["http://a:1", "http://b:1,role=foo"]}, environ={})
    assert str(caught.value) == (
        "--engine number 2, role: Invalid enum value 'foo'; one of both, prefill, decode"
    )


def test_too_little_memory_is_refused_before_anything_is_taken(tmp_path):
    config = load(flags={"memory": "64KiB", "socket": str(tmp_path / "s")}, environ={})
    with pytest.raises(ConfigError, match="65536 bytes are too few for blocks: give at least 1MiB"):
        server.serve(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "details", "text"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused",
            "no connection (Connection refused)",
        ),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "it did not answer in time"),
        (grpc.StatusCode.INTERNAL, "what", "INTERNAL: what"),
    ],
)
def test_why_etcd_is_asked_again_is_said_in_words(code, details, text):
    assert _in_words(Refused(code, details)) == text


def test_an_etcd_that_is_away_is_told_while_it_is_waited_for(caplog):
    """By a loop that calls at once what it is told to call later."""

    class Loop:
        def call_later(self, seconds, callback):
            assert seconds < 2
            callback()
            return self

        def cancel(self):
            self.cancelled = True

    settings = {"join": "etcd://maria@10.0.0.1:2379,10.0.0.2:2379", "listen": ["tcp://127.0.0.1:0"]}
    environ = {"KVPOOL_JOIN_PASSWORD": "hush", "KVPOOL_PLAINTEXT_PASSWORDS": "true"}
    loop = Loop()
    said_if_late = server._said_if_late
    with (
        caplog.at_level(logging.WARNING),
        said_if_late(loop, load(flags=settings, environ=environ)),
    ):
        pass
    assert "etcd at 10.0.0.1:2379,10.0.0.2:2379 does not answer so far" in caplog.text
    assert loop.cancelled
    caplog.clear()
    with said_if_late(Loop(), load(environ={})):
        pass
    assert caplog.text == "", "a node that is alone waits for nobody"


def test_the_socket_of_another_user(tmp_path, monkeypatch):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))  # nobody listens: as unreachable as one without permission
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(NotAuthenticated, match=r"permission denied: the daemon at .* is .*'s"):
            base.client_of(str(path), "default")
    assert base.exit_status(NotAuthenticated("x")) == base.EXIT_NOT_ALLOWED != base.EXIT_NO_DAEMON


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("events", "--kind", "nonsense"), "must be one of node joined, node state"),
        (
            ("job", "start", "evict", "--all", "--unused-s", "2h"),
            "--all is all of the tenant: do not combine it with",
        ),
    ],
)
def test_verbs(words, text):
    """They are refused before a daemon is looked for."""
    error = CliRunner().invoke(verbs.app, [*words, "--socket", "/nowhere"]).exception
    assert isinstance(error, InvalidRequest)
    assert text in str(error)


def test_an_interruption_outside_of_a_command_has_the_same_status(tmp_path):
    code = (
        "import kvpool.cli, sys\n"
        "def load(_): raise KeyboardInterrupt\n"
        "kvpool.cli.load = load\n"
        "kvpool.cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (base.EXIT_INTERRUPTED, "", "")
