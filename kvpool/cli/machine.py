"""What this machine has of what a pool can use, and what to do about what it lacks.

Nothing is changed, and nothing needs a daemon: what is looked at is in /proc, /sys and /dev, below `root`.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvpool.cli.render.cluster import silent_text
from kvpool.cli.render.starting import waiting
from kvpool.cli.render.text import size_text
from kvpool.daemon.server.memory_wait import last_mappers
from kvpool.extras import install

State = Literal["ok", "note", "bad"]
OK: State = "ok"
NOTE: State = "note"
"""It works, and could be better."""
BAD: State = "bad"
"""Something that is there, or was asked for, cannot be used."""
NIXL_PACKAGE = "nixl-cu12"
SECTOR = 4096
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
REMEDIES = {
    "membership": "look at etcd, and at this node's user, role and password there",
    "directory": "look at Redis, and at this node's user and password there",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and what to do about it, if anything."""

    topic: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where to look: the real one, or a test's."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    locked_limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))

    def read(self, path: str) -> str:
        """A small file; empty where there is none, or none that may be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What is in a folder, sorted; nothing where there is none."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []

    @property
    def rdma(self) -> list[str]:
        """RDMA devices."""
        return self.names("sys/class/infiniband")


Said = Iterator[tuple[State, str] | tuple[State, str, str]]
"""Findings of one topic: a state, what was found, and the remedy if there is one."""


def examine(paths: Sequence[str] = (), machine: Machine | None = None) -> list[Finding]:
    """All findings, in the order in which they are shown. paths: folders meant for tier ssd."""
    machine = machine or Machine()
    found = [Finding(topic, *each) for topic, check in CHECKS.items() for each in check(machine)]
    return found + [Finding(f"disk at {path}", *_direct(path)) for path in paths]


def _cores(machine: Machine) -> Said:
    yield OK, f"{machine.cores()} may be used by this process"


def _memory(machine: Machine) -> Said:
    lines = (line.split() for line in machine.read("proc/meminfo").splitlines())
    info = {words[0]: int(words[1]) << 10 for words in lines if words[-1:] == ["kB"]}
    free, total = info.get("MemAvailable:", 0), info.get("MemTotal:", 0)
    text = f"{size_text(free)} of {size_text(total)} are free"
    if free >= total / 2:
        yield OK, text
        return
    # A share that was silently of too little is found out by its misses only.
    text += f", and {size_text(info.get('Shmem:', 0))} are shared memory: a daemon that starts now gets its share (`memory = 25%`) of what is free"
    remedy = "free memory first (an engine may still map an ended daemon's segment), or give the size in bytes"
    yield NOTE, text, remedy


def _huge_pages(machine: Machine) -> Said:
    chosen = machine.read(HUGE_PAGES).partition("[")[2].partition("]")[0]
    if chosen in {"always", "advise", "within_size", "force"}:
        yield OK, f"shared memory may have them (shmem_enabled: {chosen})"
        return
    text = f"shared memory has none (shmem_enabled: {chosen or 'not known'}): mapping a segment and direct I/O from it take longer"
    yield NOTE, text, f"echo advise > /{HUGE_PAGES}"


def _shm(machine: Machine) -> Said:
    try:
        room = shutil.disk_usage(machine.root / "dev/shm")
    except OSError:
        text = "there is no /dev/shm: segments need none, but engines and UCX do"
        yield NOTE, text, "mount -t tmpfs tmpfs /dev/shm; in a container, --shm-size"
        return
    text = f"{size_text(room.free)} of {size_text(room.total)} in /dev/shm are free"
    yield OK, f"{text} (segments are limited by memory alone)"


def _rdma(machine: Machine) -> Said:
    if not machine.rdma:
        yield OK, "no device: blocks go over TCP"
        return
    if not any(name.startswith("uverbs") for name in machine.names("dev/infiniband")):
        text = "there are devices, but no /dev/infiniband/uverbs*"
        yield BAD, text, "modprobe ib_uverbs; in a container, --device=/dev/infiniband"
    for device in machine.rdma:
        for port in machine.names(f"sys/class/infiniband/{device}/ports"):
            yield _port(machine, f"sys/class/infiniband/{device}/ports/{port}", f"{device}:{port}")


def _port(machine: Machine, place: str, name: str) -> tuple[State, str, str]:
    state, rate = machine.read(f"{place}/state"), machine.read(f"{place}/rate")
    layer = machine.read(f"{place}/link_layer")
    what = f"{name}, {layer or 'link layer not known'}, {rate or 'rate not known'}"
    if not state.endswith("ACTIVE"):
        return NOTE, f"{what}: {state or 'state not known'}", "ibstat; check cable and switch"
    if layer == "Ethernet":
        types = f"{place}/gid_attrs/types"
        kinds = {gid: machine.read(f"{types}/{gid}") for gid in machine.names(types)}
        gids = [f"{gid} ({kind})" for gid, kind in kinds.items() if kind]
        what += f"; GIDs {', '.join(gids) or 'none'}"
        if not any("v2" in gid for gid in gids):
            remedy = (
                "give the network interface an IP address; then UCX_IB_GID_INDEX (deploy/rdma.md)"
            )
            return BAD, f"{what}: no RoCE v2 address", remedy
    return OK, what, ""


def _locked(machine: Machine) -> Said:
    limit = machine.locked_limit()
    text = f"{size_text(limit)} a process"
    if limit == resource.RLIM_INFINITY:
        yield OK, "no limit"
    elif not machine.rdma:
        yield OK, f"{text}, which only RDMA needs"
    else:
        remedy = "ulimit -l unlimited; LimitMEMLOCK=infinity in the unit; --ulimit memlock=-1 in a container"
        yield BAD, f"{text}: RDMA locks each segment whole", remedy


def _nixl(machine: Machine) -> Said:
    try:
        text = f"{NIXL_PACKAGE} {importlib.metadata.version(NIXL_PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        text = f"{NIXL_PACKAGE} is not installed"
        yield (NOTE, text, f"{install('nixl')} (deploy/rdma.md)") if machine.rdma else (OK, text)
        return
    lanes = machine.environ.get("UCX_TLS", "")
    # A list that begins with ^ has what is left out.
    tcp = not lanes.startswith("^") and {"tcp", "all"} & set(lanes.split(","))
    if tcp and machine.environ.get("UCX_NET_DEVICES") != "lo":
        text += f"; UCX_TLS={lanes}: whoever reaches UCX's TCP port can read and write the pool's memory"
        yield BAD, text, "leave UCX_TLS unset, or without tcp; or set UCX_NET_DEVICES=lo"
    else:
        yield OK, text


def _gpus(machine: Machine) -> Said:
    gpus = machine.names("proc/driver/nvidia/gpus")
    for gpu in gpus:
        lines = machine.read(f"proc/driver/nvidia/gpus/{gpu}/information").splitlines()
        model = next((line.partition(":")[2] for line in lines if line.startswith("Model:")), "")
        yield OK, f"{model.strip() or 'unknown model'} at {gpu}"
    if not gpus:
        yield OK, "none that this process can see"


def _cards(machine: Machine) -> Said:
    """Network cards of which it is known where they are: the others, loopback and bridges, do not matter."""
    for card in machine.names("sys/class/net"):
        if node := machine.read(f"sys/class/net/{card}/device/numa_node"):
            speed = machine.read(f"sys/class/net/{card}/speed")
            where = f"NUMA node {node}" if node != "-1" else "NUMA node not known"
            yield OK, f"{card}: {where}, {f'{speed} Mb/s' if speed.isdigit() else 'no link'}"


CHECKS: dict[str, Callable[[Machine], Said]] = {
    "cores": _cores,
    "memory": _memory,
    "huge pages": _huge_pages,
    "shared memory": _shm,
    "RDMA": _rdma,
    "locked memory": _locked,
    "NIXL": _nixl,
    "GPU": _gpus,
    "network card": _cards,
}
"""What looks at the machine, by the topic of its findings."""


def _direct(path: str) -> tuple[State, str] | tuple[State, str, str]:
    """Whether a file there can be written and read without the page cache."""
    text, remedy = "cannot be written to", "create it, and let the daemon's user write"
    try:
        free = shutil.disk_usage(path).free
        with tempfile.NamedTemporaryFile(dir=path, prefix=".kvpool-doctor-") as file:
            text = "O_DIRECT does not work"
            remedy = "use a file system on a disk of this machine, such as xfs or ext4"
            _write_page(file.name)
    except OSError as error:
        return BAD, f"{text} ({error.strerror})", remedy
    return OK, f"O_DIRECT works, {size_text(free)} are free"


def _write_page(path: str) -> None:
    """Write and read a page without the page cache. Raises `OSError`."""
    page = mmap.mmap(-1, SECTOR)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        if os.pwrite(fd, page, 0) != SECTOR or os.preadv(fd, [page], 0) != SECTOR:
            raise OSError(0, "a page was cut short")
    finally:
        os.close(fd)


def servers(cluster: Mapping[str, Any]) -> Iterator[Finding]:
    """What etcd, Redis and peers do not do that this node asks. cluster: as `Client.cluster` tells it."""
    for server, error in cluster.get("errors", {}).items():
        remedy = f"the node continues with what it knows; {REMEDIES[server]}"
        yield Finding(server, BAD, error, remedy)
    for silent in cluster.get("silent_peers", ()):
        remedy = "check that its daemon listens there and has the same cluster secret, or take it out of the settings"
        yield Finding("peer of the configuration", NOTE, silent_text(silent), remedy)
    if unreadable := cluster.get("undecodable_records", 0):
        text = f"records in etcd that cannot be read were met {unreadable} times, and are left out"
        remedy = "the daemon's log names each one; delete it unless a newer version wrote it"
        yield Finding("membership", NOTE, text, remedy)


def starting(socket: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Why no daemon answers at this socket, as far as that is for want of memory."""
    mappers = ", ".join(map(str, last_mappers(socket, root)))
    if mappers:
        text = f"the daemon has ended, and its memory is not free: {mappers} still map it"
        remedy = "they let go when their last lease ends; otherwise restart them"
        yield Finding("memory of the last daemon", NOTE, text, remedy)
    if said := waiting(socket):
        remedy = "free memory; as root, `kvpool doctor` sees who maps an ended daemon's"
        yield Finding("starting daemon", NOTE, said, "" if mappers else remedy)
