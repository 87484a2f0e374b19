"""Machines that are network namespaces, joined by a bridge, with links that can be cut one pair at a time.

Everything is made inside of a network namespace that the calling process is in already, which
`inside` starts a command in: so neither rights nor traces are left on the machine. Needs Linux that lets
users make namespaces, and the programs `ip`, `unshare` and `nsenter`.

    if reason := unavailable(): pytest.skip(reason)
    subprocess.run(inside([sys.executable, "my_script.py"]))

    # my_script.py
    with Network(["a", "b"]) as network:
        subprocess.run([*network.at("a"), "ping", network.address("b")])
        network.cut("a", "b")
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Self

from kvpool.errors import ConfigError
from tests.support.waiting import PATIENCE_S

PROGRAMS = ("ip", "unshare", "nsenter")
PREFIX = "10.77.0"
HOST = f"{PREFIX}.1"
"""Where the namespace that all of it is made in can be reached from the machines."""
NOBODY = "02:00:00:00:00:01"  # no machine has this hardware address
MACHINES_MAX = 200


def inside(command: Sequence[str]) -> list[str]:
    """The command, to be run as root of a user and network namespace of its own."""
    return ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "--fork", *command]


def unavailable() -> str:
    """Why this machine cannot do it; empty if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} on PATH"
    script = (
        f"ip link add kvpool0 type bridge && ip addr add {HOST}/24 dev kvpool0 && "
        "ip link add kvpool1 type veth peer name kvpool2"
    )
    tried = subprocess.run(
        inside(["sh", "-c", script]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if tried.returncode:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    return ""


class Network:
    """The machines by name, each with an address; all is gone with the `with`. One thread."""

    def __init__(self, names: Sequence[str]) -> None:
        if len(names) > MACHINES_MAX:
            raise ConfigError(f"{len(names)} machines: at most {MACHINES_MAX}")
        self._numbers = {name: number for number, name in enumerate(names, start=11)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "add", "kvpool0", "type", "bridge")
            _run("ip", "addr", "add", f"{HOST}/24", "dev", "kvpool0")
            _run("ip", "link", "set", "kvpool0", "up")
            for name, number in self._numbers.items():
                self._make(name, number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the machines; their networks go with the last process in each. Idempotent."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()

    def address(self, name: str) -> str:
        """A machine's."""
        return f"{PREFIX}.{self._numbers[name]}"

    def at(self, name: str) -> tuple[str, ...]:
        """What goes before a command that is to run on a machine."""
        return ("nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net")

    def cut(self, one: str, other: str) -> None:
        """Lose all that these two send to each other from now on. Nobody is told."""
        for here, there in ((one, other), (other, one)):
            address = self.address(there)
            self._at(here, "ip", "neigh", "replace", address, "lladdr", NOBODY, "dev", "eth0")

    def heal(self, one: str, other: str) -> None:
        """Undo `cut`."""
        for here, there in ((one, other), (other, one)):
            self._at(here, "ip", "neigh", "del", self.address(there), "dev", "eth0")

    def _make(self, name: str, number: int) -> None:
        # The namespace lives as long as this process, which says when it is in it.
        holder = subprocess.Popen(
            ["unshare", "--net", "--kill-child", "sh", "-c", "echo here; exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != b"here":
            raise ConfigError(f"no network namespace for machine {name!r}")
        port = f"kvpool{number}"
        _run(
            "ip",
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(holder.pid),
        )
        _run("ip", "link", "set", port, "master", "kvpool0", "up")
        self._at(name, "ip", "link", "set", "lo", "up")
        self._at(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self._at(name, "ip", "link", "set", "eth0", "up")

    def _at(self, name: str, *command: str) -> None:
        _run(*self.at(name), *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}")
