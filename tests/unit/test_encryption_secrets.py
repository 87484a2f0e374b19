"""Where the secrets of the encryption at rest come from, and how they change."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.security.encryption_secrets import ASK_S, LOOK_S, SETTLE_S, EncryptionSecrets

OLD, NEW = "0123456789abcdef" * 4, "fedcba9876543210" * 4
NOON = 1_764_590_400.0  # 2025-12-01T12:00:00Z


class World:
    """Time that passes when somebody sleeps, and what happens at each second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: dict[float, Callable[[], object]] = {}
        self.end_s = 10.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()
        if self.now > self.end_s:
            raise asyncio.CancelledError

    def secrets(self, **source: str) -> EncryptionSecrets:
        return EncryptionSecrets(
            source.get("file", ""),
            source.get("command", ""),
            lambda: self.now,
            lambda: NOON + self.now,
            self.sleep,
        )

    async def follow(self, secrets: EncryptionSecrets) -> list[list[bytes]]:
        """What they are, whenever that is told, until the end."""
        await secrets.open()
        told = [secrets.current()]
        try:
            await secrets.follow(lambda: told.append(secrets.current()))
        except asyncio.CancelledError:
            pass
        return told


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def write(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o600)


def command_of(folder: Path, code: str) -> str:
    program = folder / "program.py"
    program.write_text(code)
    return shlex.join([sys.executable, str(program)])


def test_without_a_source_there_are_none() -> None:
    assert run(World().follow(World().secrets())) == [[]]


def test_a_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, world = tmp_path / "secret", World()
    write(file, OLD)

    def rotate() -> None:
        write(file, f"{NEW}\n{OLD} until 2025-12-01T12:00:06Z")
        os.utime(file, (NOON, NOON))

    world.events[2.0] = rotate
    world.events[8.0] = lambda: write(file, "short")
    told = run(world.follow(world.secrets(file=str(file))))
    old, new = OLD.encode(), NEW.encode()
    assert told == [[old], [old, new], [new]], "an ended one is told too, an invalid file is not"
    assert "new encryption secrets are in use" in caplog.text
    assert "encryption_secret_file" in caplog.text, "names the setting"
    assert OLD not in caplog.text


def test_a_command_is_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.end_s = 3.5 * ASK_S
    said = tmp_path / "said"
    said.write_text(OLD)
    counted = tmp_path / "counted"
    code = f"open({str(counted)!r}, 'a').write('x'); print(open({str(said)!r}).read())"
    command = command_of(tmp_path, code)
    world.events[ASK_S + 1] = lambda: said.write_text(NEW)
    world.events[2 * ASK_S + 1] = said.unlink
    told = run(world.follow(world.secrets(command=command)))
    assert told == [[OLD.encode()], [NEW.encode()]]
    assert len(counted.read_text()) == 4, "at the start, and then at its pace, failures as well"
    assert caplog.text.count("the previous encryption secrets stay in use") == 1
    assert LOOK_S < ASK_S


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('short')", "at least 16"),
        ("", "has no secret"),
        ("import sys; sys.exit(1)", "exit status 1"),
        ("import sys; sys.exit('what is\\033[2J wrong')", "exit status 1: what is\ufffd.2J wrong"),
        ("print('x' * 5000)", "printed more than 4096 bytes"),
        ("import sys; print('x' * 9000, file=sys.stderr); sys.exit(2)", "exit status 2: xxx"),
        ("import sys; sys.stdout.buffer.write(b'\\xff' * 20)", "not UTF-8"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit status -9"),
    ],
)
def test_what_commands_do_wrong(tmp_path: Path, code: str, reason: str) -> None:
    secrets = World().secrets(command=command_of(tmp_path, code))
    with pytest.raises(ConfigError, match=reason) as caught:
        run(secrets.open())
    assert "encryption_secret_command" in str(caught.value)


def test_what_a_command_says_beside_its_secrets_is_no_fault(tmp_path: Path) -> None:
    code = f"import sys; print('debug' * 5000, file=sys.stderr); print({OLD!r})"
    secrets = World().secrets(command=command_of(tmp_path, code))
    run(secrets.open())
    assert secrets.current() == [OLD.encode()]


def test_a_new_secret_does_not_encrypt_at_once(tmp_path: Path) -> None:
    """The other nodes have to get it first."""
    file, world = tmp_path / "secret", World()
    world.end_s = SETTLE_S + 20
    write(file, OLD)
    os.utime(file, (NOON - 9e6, NOON - 9e6))

    def rotate() -> None:
        write(file, f"{NEW}\n{OLD} until 2026-12-01T12:00:00Z")
        os.utime(file, (NOON + 5, NOON + 5))

    world.events[5.0] = rotate
    old, new = OLD.encode(), NEW.encode()
    told = run(world.follow(world.secrets(file=str(file))))
    assert told == [[old], [old, new], [new, old]]
    assert run(World().follow(world.secrets(file=str(file))))[0] == [new, old], "after a restart"


@pytest.mark.parametrize("command", ["/there/is/none", "'unbalanced", "  "])
def test_commands_that_cannot_be_run(command: str) -> None:
    with pytest.raises(ConfigError, match="encryption_secret_command: cannot be run"):
        run(World().secrets(command=command).open())


def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    # At once with its content, since it is killed at any time.
    code = (
        f"import os, time; open({str(pid) + '.new'!r}, 'w').write(str(os.getpid())); "
        f"os.rename({str(pid) + '.new'!r}, {str(pid)!r}); time.sleep(600)"
    )
    secrets = World().secrets(command=command_of(tmp_path, code))
    secrets.COMMAND_S = 0.2
    with pytest.raises(ConfigError, match="did not end within"):
        run(secrets.open())
    if pid.exists():  # it may have been killed before its first line
        assert not Path(f"/proc/{pid.read_text()}").exists()
