"""A daemon whose disk and objects are encrypted: blocks outlive restarts and changes of secrets, and files show nothing."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.security.cluster_secrets import TIME_FORMAT, create_secrets, rotate_secrets
from kvpool.types import NamespaceRecord
from tests.support.waiting import PATIENCE_S

NBYTES = 64 << 10
RECORD = NamespaceRecord.simple("at-rest", block_bytes=NBYTES, block_tokens=16)
WORDS = b"words that a prompt had "


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def block(number: int) -> bytes:
    """Blocks that can be packed, with a text that is searched for in the files."""
    noise = np.random.default_rng(number).bytes(NBYTES // 2)
    return (noise + WORDS * (NBYTES // 2 // len(WORDS) + 1))[:NBYTES]


class Engine:
    """A daemon with an encrypted disk, and a client of it."""

    def __init__(self, daemon, codec: str = "") -> None:
        self.daemon = daemon
        self.client: Client = daemon.client(connect=True)
        self.ns = self.client.open(RECORD, ssd_codec=codec)

    def put(self, numbers: range) -> None:
        self.client.put(self.ns, keys_of(numbers), [block(n) for n in numbers])

    def read(self, numbers: Iterable[int]) -> set[int]:
        """Which of them are found; each found one is whole and right."""
        numbers = list(numbers)
        came = self.client.get(self.ns, keys_of(numbers), wait_s=PATIENCE_S)
        for number, data in zip(numbers, came, strict=True):
            assert data is None or data == block(number), f"block {number} is wrong"
        return {number for number, data in zip(numbers, came, strict=True) if data is not None}

    @property
    def disk(self):
        return self.client.stats().tiers.ssd[0]


@pytest.fixture
def secret(folder: Path) -> Path:
    path = folder / "encryption.secret"
    create_secrets(path)
    return path


@pytest.fixture
def begin(start, folder: Path, until):
    """Starts daemons with the same disk."""
    with contextlib.ExitStack() as stack:

        def start_one(*args: str, codec: str = "", **settings: str) -> Engine:
            disk = f"{folder / 'disk'}=64MiB"
            given = ("--memory", "4MiB", "--ssd", disk, "--ssd-write", "through")
            engine = Engine(start(*given, *args, **settings), codec)
            stack.callback(engine.client.close)
            # A node does not wait long for its disk before it is ready.
            until(lambda: engine.disk.state == "serving", "the disk is open")
            return engine

        yield start_one


def end(engine: Engine) -> None:
    engine.client.close()
    assert engine.daemon.stop() == 0


def files_of(folder: Path) -> Iterable[Path]:
    return [path for path in (folder / "disk").rglob("*") if path.is_file()]


@pytest.mark.parametrize("codec", ["", "blosc2"])
def test_blocks_on_an_encrypted_disk_outlive_a_restart(
    begin, secret: Path, folder: Path, until, codec: str
) -> None:
    if codec == "blosc2":
        pytest.importorskip("blosc2")
    engine = begin("--encryption-secret-file", str(secret), codec=codec)
    engine.put(range(40))
    until(lambda: engine.disk.written_blocks == 40)
    assert engine.disk.packed_blocks == (40 if codec else 0)
    assert engine.disk.encrypted
    end(engine)
    for path in files_of(folder):
        assert WORDS not in path.read_bytes(), path
    engine = begin("--encryption-secret-file", str(secret), codec=codec)
    until(lambda: engine.disk.restored_blocks == 40)
    assert engine.read(range(40)) == set(range(40))
    assert engine.disk.mismatches == 0


def test_a_secret_is_changed_without_a_restart(begin, secret: Path, until) -> None:
    engine = begin("--encryption-secret-file", str(secret))
    engine.put(range(20))
    until(lambda: engine.disk.written_blocks == 20)
    rotate_secrets(secret, 3600.0, time.time())
    os.utime(secret, (1.0, 1.0))  # as if all nodes had it for long
    until(lambda: "new encryption secrets are in use" in engine.daemon.stderr)
    engine.put(range(20, 40))
    until(lambda: engine.disk.written_blocks == 40)
    end(engine)
    engine = begin("--encryption-secret-file", str(secret))
    assert engine.read(range(40)) == set(range(40)), "by the old secret, and by the new one"
    end(engine)
    newest, old = secret.read_text().splitlines()
    ended = time.strftime(TIME_FORMAT, time.gmtime(time.time() - 1))
    secret.write_text(f"{newest}\n{old.split()[0]} until {ended}\n")
    engine = begin("--encryption-secret-file", str(secret))
    found = engine.read(range(40))
    assert found == set(range(20, 40)), "what only an ended secret decrypts is gone"


def test_secrets_come_from_a_command(begin, start, secret: Path, folder: Path, until) -> None:
    program = folder / "key service.py"
    program.write_text(f"print(open({str(secret)!r}).read())")
    command = shlex.join([sys.executable, str(program)])
    engine = begin(KVPOOL_ENCRYPTION_SECRET_COMMAND=command)
    engine.put(range(10))
    until(lambda: engine.disk.written_blocks == 10)
    end(engine)
    engine = begin("--encryption-secret-file", str(secret))
    assert engine.read(range(10)) == set(range(10)), "it is the same secret"
    end(engine)
    program.write_text("import sys; print('no key\\033[2Jhere', file=sys.stderr); sys.exit(3)")
    refused = start(ready=False, KVPOOL_ENCRYPTION_SECRET_COMMAND=command)
    assert refused.wait_end() == 1
    assert "encryption_secret_command: exit status 3: no key\ufffd[2Jhere" in refused.stderr


def test_switched_off_and_on_again_the_disk_starts_empty(begin, secret: Path, until) -> None:
    for number, args in enumerate(
        [
            (),
            ("--encryption-secret-file", str(secret)),
            (),
            ("--encryption-secret-file", str(secret)),
        ]
    ):
        engine = begin(*args)
        if number:
            assert "it starts empty" in engine.daemon.stderr
        assert engine.read(range(10)) == set()
        engine.put(range(10))
        until(lambda engine=engine: engine.disk.written_blocks == 10)
        end(engine)


def test_a_file_that_others_can_read_is_refused(start, secret: Path) -> None:
    secret.chmod(0o644)
    refused = start("--encryption-secret-file", str(secret), ready=False)
    assert refused.wait_end() == 1
    assert "chmod 600" in refused.stderr


def test_nothing_of_the_secret_is_seen(begin, secret: Path) -> None:
    engine = begin("--encryption-secret-file", str(secret))
    word = secret.read_text().strip()
    for pid in engine.daemon.family():
        for name in ("cmdline", "environ"):
            with contextlib.suppress(FileNotFoundError):
                assert word.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    shown = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "config", "--socket", engine.daemon.socket],
        capture_output=True,
        text=True,
        check=False,
    )
    assert word not in shown.stdout + shown.stderr + engine.daemon.stderr
