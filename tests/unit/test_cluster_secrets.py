"""The cluster's secrets: their file, its change, and what is refused."""

import math
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.security.cluster_secrets import (
    SECRETS_MAX,
    ClusterSecrets,
    SecretSource,
    create_secrets,
    default_path,
    make_default,
    read_secrets,
    rotate_secrets,
)
from kvpool.security.file_watch import LOOK_S

OLD, NEW = "0123456789abcdef" * 4, "fedcba9876543210" * 4
NOON = 1_764_590_400.0  # 2025-12-01T12:00:00Z


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "secret"


def write(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def test_a_file_of_one_and_one_of_several(file: Path) -> None:
    [one] = read_secrets(write(file, f"{OLD}\n"))
    assert (one.secret, one.until) == (OLD.encode(), math.inf)
    text = f"\n{NEW}\n  {OLD} until 2025-12-01T12:00:00Z\n\nwith some words in it until 2025-12-01T12:00:01Z"
    found = read_secrets(write(file, text))
    assert [(each.secret.decode(), each.until) for each in found] == [
        (NEW, math.inf),
        (OLD, NOON),
        ("with some words in it", NOON + 1),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no secret"),
        ("\n \n", "has no secret"),
        ("short", "at least 16"),
        ("0123456789abcde\u00e9", "printable"),
        ("0123456789abcdef\x00", "printable"),
        (f"{NEW}\n{OLD} until tomorrow", "line 2: the time must look like"),
        (f"{NEW}\n{OLD} until 2025-13-01T12:00:00Z", "line 2: the time must look like"),
        (f"{OLD} until 2025-12-01T12:00:00Z", "the first secret must not end"),
        ("\n".join(f"{OLD}{n}" for n in range(SECRETS_MAX + 1)), "the limit is 4"),
        ("x" * 5000, "more than 4096 bytes"),
    ],
)
def test_what_is_no_file_of_secrets(file: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read_secrets(write(file, text))
    assert str(file) in str(caught.value)
    assert OLD not in str(caught.value)


def test_a_file_that_others_may_read_is_refused(file: Path) -> None:
    write(file, OLD)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secrets(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        read_secrets(str(file.with_name("missing")))


class Clocks:
    def __init__(self) -> None:
        self.monotonic = 0.0
        self.wall = NOON - 10

    def secrets(self, source: SecretSource) -> ClusterSecrets:
        return ClusterSecrets(source, lambda: self.monotonic, lambda: self.wall)


def test_a_secret_ends_at_its_time(file: Path) -> None:
    clocks = Clocks()
    secrets = clocks.secrets(
        SecretSource(path=write(file, f"{NEW}\n{OLD} until 2025-12-01T12:00:00Z"))
    )
    assert secrets.current() == (NEW.encode(), OLD.encode())
    clocks.wall = NOON
    assert secrets.current() == (NEW.encode(),)


def test_a_changed_file_is_taken_and_a_broken_one_is_not(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks()
    secrets = clocks.secrets(SecretSource(path=write(file, OLD)))
    write(file, NEW + "\n")
    assert secrets.current() == (OLD.encode(),), "it was looked at a moment ago"
    clocks.monotonic += LOOK_S
    assert secrets.current() == (NEW.encode(),)
    write(file, "short")
    clocks.monotonic += LOOK_S
    assert secrets.current() == (NEW.encode(),)
    assert "the previous ones stay in use" in caplog.text
    file.unlink()
    clocks.monotonic += LOOK_S
    assert secrets.current() == (NEW.encode(),)


def test_without_a_source_there_is_none() -> None:
    assert ClusterSecrets(SecretSource()).current() == ()
    assert ClusterSecrets(SecretSource("a secret of these tests")).current() == (
        b"a secret of these tests",
    )


def test_create_makes_a_file_once(file: Path) -> None:
    assert create_secrets(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    [made] = read_secrets(str(file))
    assert len(made.secret) == 64
    assert not create_secrets(file)
    assert read_secrets(str(file)) == (made,)
    with pytest.raises(ConfigError, match="cannot write"):
        create_secrets(file / "below")


def test_of_many_at_a_time_one_makes_the_default(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    found: list[SecretSource] = []
    barrier = threading.Barrier(16)

    def make() -> None:
        barrier.wait()
        found.append(make_default("c", environ))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = default_path("c", environ)
    assert found == [SecretSource(path=str(path), local=True)] * 16
    assert [each.name for each in path.parent.iterdir()] == ["c.secret"]
    assert len({ClusterSecrets(source).current() for source in found}) == 1


def test_where_no_default_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match="set cluster_secret_file"):
        make_default("c", {"XDG_STATE_HOME": str(tmp_path / "state")})


@given(keeps=st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 2000)), max_size=8))
def test_after_rotations_all_of_before_are_accepted_as_long_as_was_said(
    tmp_path_factory: pytest.TempPathFactory, keeps: list[tuple[float, int]]
) -> None:
    """Against a table of ends kept here. Refused is only what would be a fifth."""
    file = tmp_path_factory.mktemp("rotated") / "secret"
    create_secrets(file)
    now = NOON
    ends: dict[bytes, float] = {read_secrets(str(file))[0].secret: math.inf}
    for pause, keep in keeps:
        now += pause
        living = {secret: end for secret, end in ends.items() if now < end}
        if len(living) >= SECRETS_MAX:
            with pytest.raises(ConfigError, match="wait until one has ended"):
                rotate_secrets(file, keep, now)
            continue
        until = rotate_secrets(file, keep, now)
        assert now + keep - 1 < until <= now + keep
        found = read_secrets(str(file))
        assert found[0].secret not in ends
        ends = {secret: min(end, until) for secret, end in living.items()}
        assert {each.secret: each.until for each in found[1:] if now < each.until} == {
            secret: end for secret, end in ends.items() if now < end
        }
        assert len(found) <= SECRETS_MAX
        ends[found[0].secret] = math.inf
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_is_made_readable_afterwards_is_taken(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It came with the wrong mode, as copies do; nothing but the mode is changed then."""
    clocks = Clocks()
    secrets = clocks.secrets(SecretSource(path=write(file, OLD)))
    file.write_text(NEW)
    file.chmod(0o644)
    for _ in range(3):
        clocks.monotonic += LOOK_S
        assert secrets.current() == (OLD.encode(),)
    assert caplog.text.count("the previous ones stay in use") == 1, "it is said once"
    file.chmod(0o600)
    clocks.monotonic += LOOK_S
    assert secrets.current() == (NEW.encode(),)


def test_rotation_keeps_owner_mode_and_links(tmp_path: Path) -> None:
    """Otherwise the daemon's user could not read it any more."""
    real, link = tmp_path / "real", tmp_path / "link"
    create_secrets(real)
    link.symlink_to(real)
    if os.getuid() == 0:
        os.chown(real, 10001, 10002)
        real.chmod(0o640)
    before = real.stat()
    rotate_secrets(link, 60, NOON)
    after = real.stat()
    assert link.is_symlink()
    assert (after.st_uid, after.st_gid, after.st_mode) == (
        before.st_uid,
        before.st_gid,
        before.st_mode,
    )
    assert len(real.read_text().splitlines()) == 2


def test_a_process_that_starts_while_the_file_is_broken_uses_what_the_others_use(
    file: Path,
) -> None:
    clocks = Clocks()
    first = clocks.secrets(
        SecretSource(path=write(file, f"{NEW}\n{OLD} until 2025-12-01T12:00:00Z"))
    )
    write(file, "half")
    with pytest.raises(ConfigError):
        clocks.secrets(SecretSource(path=str(file)))
    second = ClusterSecrets(
        SecretSource(path=str(file)),
        lambda: clocks.monotonic,
        lambda: clocks.wall,
        before=first.lines(),
    )
    assert second.current() == (NEW.encode(), OLD.encode())
    write(file, OLD)
    clocks.monotonic += LOOK_S
    assert second.current() == (OLD.encode(),)


def test_ended_ones_are_known_and_not_accepted(file: Path) -> None:
    clocks = Clocks()
    secrets = clocks.secrets(
        SecretSource(path=write(file, f"{NEW}\n{OLD} until 2025-12-01T12:00:00Z"))
    )
    clocks.wall = NOON
    assert secrets.current() == (NEW.encode(),)
    assert secrets.known() == (NEW.encode(), OLD.encode())


def test_keep_has_a_limit_and_a_user_without_a_home_is_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_secrets(file)
    with pytest.raises(ConfigError, match="at most 366 days"):
        rotate_secrets(file, 1e12, NOON)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="set cluster_secret_file"):
        make_default("c", {})
