"""What this machine has of what a pool can use, and what to do about what it lacks.

Nothing is changed, and nothing needs a daemon: what is looked at is in /proc, /sys and /dev, below `root`.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.text import Text

from kvpool.cli.render.cluster import silent_text
from kvpool.cli.render.starting import waiting
from kvpool.cli.render.text import fold, make_console, make_table, size_text
from kvpool.daemon.server.memory_wait import last_mappers
from kvpool.extras import install

if TYPE_CHECKING:
    from rich.console import Console

OK, NOTE, BAD = "ok", "note", "bad"
STYLES = {OK: "green", NOTE: "yellow", BAD: "red"}
NIXL_PACKAGE = "nixl-cu12"
SECTOR = 4096
PORT_STATE_ACTIVE = "4: ACTIVE"
REMEDIES = {
    "membership": "look at etcd, and at this node's user, role and password there",
    "directory": "look at Redis, and at this node's user and password there",
}
NOT_BY_NIXL = "NIXL has failed lately, or is slower (kvpool status)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    state: ok, note (works, and could be better) or bad (something that is there, or was asked for, cannot be
    used). remedy: what to do; empty where there is nothing to do.
    """

    topic: str
    state: str
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

    def folder(self, path: str) -> list[Path]:
        """What is in a folder, sorted; nothing where there is none."""
        try:
            return sorted((self.root / path).iterdir())
        except OSError:
            return []


def examine(paths: Sequence[str] = (), machine: Machine | None = None) -> list[Finding]:
    """All findings, in the order in which they are shown. paths: folders meant for tier ssd."""
    machine = machine or Machine()
    devices = machine.folder("sys/class/infiniband")
    return [
        Finding("cores", OK, f"{machine.cores()} may be used by this process"),
        _memory(machine),
        *_huge_pages(machine),
        _shm(machine),
        *_rdma(machine, devices),
        _locked(machine, bool(devices)),
        _nixl(machine, bool(devices)),
        *_gpus(machine),
        *_cards(machine),
        *(_direct(path) for path in paths),
    ]


def _meminfo(machine: Machine) -> dict[str, int]:
    """Bytes, or a count, by name."""
    found = {}
    for line in machine.read("proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _memory(machine: Machine) -> Finding:
    info = _meminfo(machine)
    free, total = info.get("MemAvailable", 0), info.get("MemTotal", 0)
    if free < total / 2:
        # A share that was silently of too little is found out by its misses only.
        return Finding(
            "memory",
            NOTE,
            f"{size_text(free)} of {size_text(total)} are free, and {size_text(info.get('Shmem', 0))} are shared memory: "
            f"a daemon that starts now gets its share (`memory = 25%`) of what is free",
            "free memory first (an engine may still map an ended daemon's segment), or give the size in bytes",
        )
    return Finding("memory", OK, f"{size_text(free)} of {size_text(total)} are free")


def _huge_pages(machine: Machine) -> Iterator[Finding]:
    setting = machine.read("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in {"always", "advise", "within_size", "force"}:
        yield Finding("huge pages", OK, f"shared memory may have them (shmem_enabled: {chosen})")
    else:
        yield Finding(
            "huge pages",
            NOTE,
            f"shared memory has none (shmem_enabled: {chosen or 'not known'}): mapping a segment and direct "
            f"I/O from it take longer",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )


def _shm(machine: Machine) -> Finding:
    try:
        room = os.statvfs(machine.root / "dev/shm")
    except OSError:
        return Finding(
            "shared memory",
            NOTE,
            "there is no /dev/shm: segments need none, but engines and UCX do",
            "mount -t tmpfs tmpfs /dev/shm; in a container, --shm-size",
        )
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    return Finding(
        "shared memory",
        OK,
        f"{size_text(free)} of {size_text(size)} in /dev/shm are free (segments do not lie there: they are limited by "
        f"memory alone)",
    )


def _rdma(machine: Machine, devices: Sequence[Path]) -> Iterator[Finding]:
    if not devices:
        yield Finding("RDMA", OK, "no device: blocks go over TCP")
        return
    nodes = machine.folder("dev/infiniband")
    if not any(node.name.startswith("uverbs") for node in nodes):
        yield Finding(
            "RDMA",
            BAD,
            "there are devices, but no /dev/infiniband/uverbs*",
            "modprobe ib_uverbs; in a container, --device=/dev/infiniband",
        )
    for device in devices:
        for port in machine.folder(f"sys/class/infiniband/{device.name}/ports"):
            yield _port(machine, device.name, port.name)


def _port(machine: Machine, device: str, port: str) -> Finding:
    place = f"sys/class/infiniband/{device}/ports/{port}"
    state, rate = machine.read(f"{place}/state"), machine.read(f"{place}/rate")
    layer = machine.read(f"{place}/link_layer")
    what = f"{device}:{port}, {layer or 'link layer not known'}, {rate or 'rate not known'}"
    if state != PORT_STATE_ACTIVE:
        return Finding(
            "RDMA", NOTE, f"{what}: {state or 'state not known'}", "ibstat; check cable and switch"
        )
    if layer == "Ethernet":
        versions = [
            f"{gid.name} ({kind})"
            for gid in machine.folder(f"{place}/gid_attrs/types")
            if (kind := machine.read(f"{place}/gid_attrs/types/{gid.name}"))
        ]
        what += f"; GIDs {', '.join(versions) or 'none'}"
        if not any("v2" in version for version in versions):
            return Finding(
                "RDMA",
                BAD,
                f"{what}: no RoCE v2 address",
                "give the network interface an IP address; then UCX_IB_GID_INDEX (deploy/rdma.md)",
            )
    return Finding("RDMA", OK, what)


def _locked(machine: Machine, rdma: bool) -> Finding:
    limit = machine.locked_limit()
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", OK, "no limit")
    return Finding(
        "locked memory",
        BAD if rdma else OK,
        f"{size_text(limit)} a process"
        + (": RDMA locks each segment whole" if rdma else ", which only RDMA needs"),
        "ulimit -l unlimited; LimitMEMLOCK=infinity in the unit; --ulimit memlock=-1 in a container"
        if rdma
        else "",
    )


def _nixl(machine: Machine, rdma: bool) -> Finding:
    try:
        version = importlib.metadata.version(NIXL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "NIXL",
            NOTE if rdma else OK,
            f"{NIXL_PACKAGE} is not installed",
            f"{install('nixl')} (deploy/rdma.md)" if rdma else "",
        )
    lanes = machine.environ.get("UCX_TLS", "")
    if (
        lanes
        and not lanes.startswith("^")
        and {"tcp", "all"} & set(lanes.split(","))
        and machine.environ.get("UCX_NET_DEVICES") != "lo"
    ):
        return Finding(
            "NIXL",
            BAD,
            f"{NIXL_PACKAGE} {version}; UCX_TLS={lanes}: whoever reaches UCX's TCP port can read and write "
            f"the pool's memory",
            "leave UCX_TLS unset, or without tcp; or set UCX_NET_DEVICES=lo",
        )
    return Finding("NIXL", OK, f"{NIXL_PACKAGE} {version}")


def _gpus(machine: Machine) -> Iterator[Finding]:
    folders = machine.folder("proc/driver/nvidia/gpus")
    if not folders:
        yield Finding("GPU", OK, "none that this process can see")
    for folder in folders:
        lines = machine.read(f"proc/driver/nvidia/gpus/{folder.name}/information").splitlines()
        model = next((line.partition(":")[2] for line in lines if line.startswith("Model:")), "")
        yield Finding("GPU", OK, f"{model.strip() or 'unknown model'} at {folder.name}")


def _cards(machine: Machine) -> Iterator[Finding]:
    """Network cards of which it is known where they are: the others, loopback and bridges, do not matter."""
    for card in machine.folder("sys/class/net"):
        place = f"sys/class/net/{card.name}"
        node = machine.read(f"{place}/device/numa_node")
        if not node:
            continue
        speed = machine.read(f"{place}/speed")
        where = f"NUMA node {node}" if node != "-1" else "NUMA node not known"
        rate = f"{speed} Mb/s" if speed.isdigit() else "no link"
        yield Finding("network card", OK, f"{card.name}: {where}, {rate}")


def _direct(path: str) -> Finding:
    """Whether a file there can be written and read without the page cache."""
    topic = f"disk at {path}"
    try:
        room = os.statvfs(path)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".kvpool-doctor-") as file:
            try:
                fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                return _no_direct(topic, error)
            try:
                page = mmap.mmap(-1, SECTOR)
                page[:] = b"k" * SECTOR
                if os.pwrite(fd, page, 0) != SECTOR or os.preadv(fd, [page], 0) != SECTOR:
                    return Finding(
                        topic, BAD, "a page written to it was cut short", "look at the disk"
                    )
            except OSError as error:
                return _no_direct(topic, error)
            finally:
                os.close(fd)
    except OSError as error:
        return Finding(
            topic,
            BAD,
            f"cannot be written to: {error.strerror}",
            "create it, and let the daemon's user write",
        )
    return Finding(
        topic,
        OK,
        f"O_DIRECT works, {size_text(room.f_bavail * room.f_frsize)} are free",
    )


def _no_direct(topic: str, error: OSError) -> Finding:
    return Finding(
        topic,
        BAD,
        f"O_DIRECT does not work ({error.strerror})",
        "use a file system on a disk of this machine, such as xfs or ext4",
    )


def routes(cluster: Mapping[str, Any]) -> list[dict[str, str]]:
    """How this node pulls from each other one: `node`, `transport`, `url`, `otherwise`, what takes over, `note`.

    cluster: as `Client.cluster` tells it. By which way that is at present, it says itself.
    """
    own = cluster["node"]
    paths = {link["incarnation"]: link["path"] for link in cluster.get("links", ())}

    def urls(record: Mapping[str, Any]) -> tuple[str, str]:
        listed = [transport["url"] for transport in record["transports"]]
        nixl = next((url for url in listed if url.startswith("nixl://")), "")
        return nixl, next((url for url in listed if not url.startswith("nixl://")), "")

    records = {record["node"]: record for record in cluster["nodes"]}
    we_have_nixl = own in records and bool(urls(records[own])[0])
    found = []
    for name, record in sorted(records.items()):
        if name == own:
            continue
        nixl, other = urls(record)
        by_nixl = we_have_nixl and bool(nixl) and bool(other)
        default = nixl if by_nixl else other
        url = paths.get(record["incarnation"], default)
        listed = [transport["url"] for transport in record["transports"]]
        rest = [one for one in listed if one not in {nixl, url.partition("?")[0]}]
        found.append(
            {
                "node": name,
                "transport": url.partition("://")[0] or "none",
                "url": url,
                "otherwise": ", ".join(rest),
                "note": NOT_BY_NIXL if by_nixl and url != nixl else "",
            }
        )
    return found


def servers(cluster: Mapping[str, Any]) -> Iterator[Finding]:
    """What etcd and Redis do not do that this node asks. cluster: as `Client.cluster` tells it."""
    for server, error in cluster.get("errors", {}).items():
        yield Finding(
            server, BAD, error, "the node continues with what it knows; " + REMEDIES[server]
        )
    for silent in cluster.get("silent_peers", ()):
        yield Finding(
            "peer of the configuration",
            NOTE,
            silent_text(silent),
            "check that its daemon listens there and has the same cluster secret, or take it out of the settings",
        )
    if unreadable := cluster.get("undecodable_records", 0):
        yield Finding(
            "membership",
            NOTE,
            f"records in etcd that cannot be read were met {unreadable} times, and are left out",
            "the daemon's log names each one; delete it unless a newer version wrote it",
        )


def starting(socket: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Why no daemon answers at this socket, as far as that is for want of memory."""
    said, mappers = waiting(socket), last_mappers(socket, root)
    if mappers:
        holders = ", ".join(map(str, mappers))
        yield Finding(
            "memory of the last daemon",
            NOTE,
            f"the daemon has ended, and its memory is not free: {holders} still map it",
            "they let go when their last lease ends; otherwise restart them",
        )
    if said:
        yield Finding(
            "starting daemon",
            NOTE,
            said,
            ""
            if mappers
            else "free memory; as root, `kvpool doctor` sees who maps an ended daemon's",
        )


def plain(findings: Sequence[Finding], pairs: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """For --json."""
    return {"findings": [asdict(finding) for finding in findings], "peers": list(pairs)}


def show(
    findings: Sequence[Finding],
    pairs: Sequence[Mapping[str, str]],
    console: Console | None = None,
) -> None:
    """Print what was found, and how this node pulls from others."""
    console = console or make_console()
    table = make_table("This machine", "what", "", "found", "remedy")
    for one in findings:
        table.add_row(
            escape(one.topic),
            Text(one.state, style=STYLES[one.state]),
            escape(one.found),
            escape(one.remedy),
        )
    fold(table)
    console.print(table)
    if pairs:
        peers = make_table("Other nodes", "node", "pulled from by", "at", "where that fails", "")
        for pair in pairs:
            peers.add_row(
                *(escape(pair[key]) for key in ("node", "transport", "url", "otherwise", "note"))
            )
        fold(peers)
        console.print()
        console.print(peers)
