"""What the doctor says of machines that are made up of a few files."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool.cli import verbs
from kvpool.cli.machine import (
    BAD,
    NOTE,
    OK,
    Finding,
    Machine,
    examine,
    servers,
    starting,
)
from kvpool.cli.render.doctor import findings_view
from kvpool.daemon.server.memory_wait import MemoryWait, write_wait
from kvpool.errors import Unavailable
from tests.support.printed import printed

MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Free:        0\n"


def machine(root: Path, files: dict[str, str] | None = None, **settings) -> Machine:
    for name, text in ({"proc/meminfo": MEMINFO} | (files or {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    settings.setdefault("environ", {})
    settings.setdefault("locked_limit", lambda: 8 << 20)
    settings.setdefault("cores", lambda: 12)
    return Machine(root, **settings)


def port(
    device: str = "mlx5_0", *, state: str = "4: ACTIVE", layer: str = "InfiniBand", **more: str
):
    place = f"sys/class/infiniband/{device}/ports/1"
    files = {f"{place}/state": state, f"{place}/link_layer": layer, f"{place}/rate": "400 Gb/sec"}
    for gid, kind in more.items():
        files[f"{place}/gid_attrs/types/{gid.removeprefix('gid')}"] = kind
    return files | {"dev/infiniband/uverbs0": ""}


def of(findings: list[Finding], topic: str) -> list[Finding]:
    return [finding for finding in findings if finding.topic == topic]


def test_a_plain_machine_is_fine(tmp_path):
    found = examine(machine=machine(tmp_path, {"dev/shm/x": ""}))
    assert {finding.state for finding in found} == {OK, NOTE}
    assert [finding.topic for finding in found if finding.state == NOTE] == ["huge pages"]
    assert "12 may be used" in of(found, "cores")[0].found
    assert of(found, "memory")[0].found == "8 GiB of 16 GiB are free"
    assert "no device" in of(found, "RDMA")[0].found
    assert "none" in of(found, "GPU")[0].found


@pytest.mark.parametrize(
    ("setting", "state"),
    [
        ("always within_size advise [never] deny force", NOTE),
        ("always within_size [advise] never deny force", OK),
        ("[always] within_size advise never deny force", OK),
        ("always within_size advise never [deny] force", NOTE),
    ],
)
def test_huge_pages(tmp_path, setting, state):
    files = {"sys/kernel/mm/transparent_hugepage/shmem_enabled": setting}
    (found,) = of(examine(machine=machine(tmp_path, files)), "huge pages")
    assert found.state == state
    assert ("echo advise" in found.remedy) == (state == NOTE)


@pytest.mark.parametrize(
    ("files", "states", "says"),
    [
        (port(), [OK], "mlx5_0:1, InfiniBand, 400 Gb/sec"),
        (port(state="1: DOWN"), [NOTE], "1: DOWN"),
        (port(layer="Ethernet", gid0="IB/RoCE v1", gid3="RoCE v2"), [OK], "3 (RoCE v2)"),
        (port(layer="Ethernet", gid0="IB/RoCE v1"), [BAD], "no RoCE v2 address"),
        (port(layer="Ethernet"), [BAD], "GIDs none"),
        (port() | port("mlx5_1"), [OK, OK], "mlx5_1:1"),
    ],
    ids=["ib", "down", "roce", "v1", "no gid", "two"],
)
def test_rdma_devices(tmp_path, files, states, says):
    found = of(examine(machine=machine(tmp_path, files)), "RDMA")
    assert [finding.state for finding in found] == states
    assert says in found[-1].found


def test_rdma_devices_that_nobody_may_open(tmp_path):
    files = {name: text for name, text in port().items() if "uverbs" not in name}
    found = of(examine(machine=machine(tmp_path, files)), "RDMA")
    assert [finding.state for finding in found] == [BAD, OK]
    assert "ib_uverbs" in found[0].remedy


@pytest.mark.parametrize(
    ("rdma", "limit", "state"),
    [
        (False, 8 << 20, OK),
        (True, 8 << 20, BAD),
        (True, resource.RLIM_INFINITY, OK),
        (False, resource.RLIM_INFINITY, OK),
    ],
)
def test_locked_memory_matters_to_rdma(tmp_path, rdma, limit, state):
    here = machine(tmp_path, port() if rdma else {}, locked_limit=lambda: limit)
    (found,) = of(examine(machine=here), "locked memory")
    assert (found.state, bool(found.remedy)) == (state, state == BAD)


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        ({}, OK),
        ({"UCX_TLS": "^tcp"}, OK),
        ({"UCX_TLS": "rc,sm"}, OK),
        ({"UCX_TLS": "tcp,sm"}, BAD),
        ({"UCX_TLS": "all"}, BAD),
        ({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}, OK),
        ({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}, BAD),
    ],
)
def test_ucxs_tcp_lane_is_open_to_strangers(tmp_path, monkeypatch, environ, state):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    (found,) = of(examine(machine=machine(tmp_path, environ=environ)), "NIXL")
    assert found.state == state
    assert "nixl-cu12 1.2.3" in found.found


@pytest.mark.parametrize(("rdma", "state"), [(False, OK), (True, NOTE)])
def test_nixl_is_missed_where_it_would_be_of_use(tmp_path, monkeypatch, rdma, state):
    monkeypatch.setattr("kvpool.cli.machine.NIXL_PACKAGE", "no-such-package-of-ours")
    (found,) = of(examine(machine=machine(tmp_path, port() if rdma else {})), "NIXL")
    assert (found.state, bool(found.remedy)) == (state, rdma)


def test_gpus(tmp_path):
    files = {
        f"proc/driver/nvidia/gpus/0000:0{n}:00.0/information": f"Model: \t\t NVIDIA H200\nIRQ: {n}"
        for n in range(2)
    }
    found = of(examine(machine=machine(tmp_path, files)), "GPU")
    assert [finding.found for finding in found] == [
        "NVIDIA H200 at 0000:00:00.0",
        "NVIDIA H200 at 0000:01:00.0",
    ]


def test_folders_for_disks(tmp_path, monkeypatch):
    here = machine(tmp_path)
    good, refuses = tmp_path / "good", tmp_path / "refuses"
    good.mkdir()
    refuses.mkdir()
    real = os.open

    def scripted(path, flags, *rest, **more):
        if flags & os.O_DIRECT and str(path).startswith(str(refuses)):
            raise OSError(errno.EINVAL, "Invalid argument")
        # The folder may lie where there is no O_DIRECT; whether it works there is not the question.
        return real(path, flags & ~os.O_DIRECT, *rest, **more)

    monkeypatch.setattr(os, "open", scripted)
    paths = [str(good), str(refuses), str(tmp_path / "absent")]
    found = examine(paths, here)[-3:]
    assert [finding.state for finding in found] == [OK, BAD, BAD]
    assert "O_DIRECT does not work (Invalid argument)" in found[1].found
    assert "No such file" in found[2].found
    assert list(good.iterdir()) == list(refuses.iterdir()) == [], "nothing is left behind"


def test_network_cards_and_where_they_are(tmp_path):
    place = "sys/class/net"
    files = {
        f"{place}/eth0/device/numa_node": "1",
        f"{place}/eth0/speed": "100000",
        f"{place}/eth1/device/numa_node": "-1",
        f"{place}/eth1/speed": "-1",
        f"{place}/lo/mtu": "65536",
    }
    found = of(examine(machine=machine(tmp_path, files)), "network card")
    assert [finding.found for finding in found] == [
        "eth0: NUMA node 1, 100000 Mb/s",
        "eth1: NUMA node not known, no link",
    ]


def test_what_is_shown():
    findings = [Finding("a [b]", BAD, "it is [broken]", "mend it")]
    shown = printed(findings_view(findings, []), width=100)
    for text in ("a [b]", "bad", "it is [broken]", "mend it"):
        assert text in shown
    link = {
        "node": "n",
        "distance": "rack",
        "path": "nixl://n:2",
        "latency_s": 0.001,
        "bytes_s": 1e9,
    }
    links = [link | {"latency_age_s": 1.0, "bytes_age_s": None}]
    shown = printed(findings_view(findings, links), width=100)
    assert "nixl://n:2" in shown and "rate assumed" in shown
    remedy = f"echo advise > /sys/{'x' * 60}"
    narrow = printed(findings_view([Finding("pages", NOTE, "none " * 9, remedy)], []), width=60)
    assert f"  {remedy}\n" in narrow, "a remedy is to be typed"


def test_what_servers_refuse_is_shown_as_long_as_they_do():
    assert list(servers({})) == []
    assert list(servers({"errors": {}, "undecodable_records": 0})) == []
    found = list(servers({"errors": {"membership": "no role"}, "undecodable_records": 3}))
    assert [(one.topic, one.state) for one in found] == [("membership", BAD), ("membership", NOTE)]
    assert found[0].found == "no role"
    assert "role" in found[0].remedy
    assert "3 times" in found[1].found
    (one,) = servers({"errors": {"directory": "NOPERM"}})
    assert "Redis" in one.remedy


def test_the_command(monkeypatch):
    def nobody(socket, tenant):
        raise Unavailable("no daemon [here]")

    monkeypatch.setattr("kvpool.cli.base.daemon_client", nobody)
    monkeypatch.setattr(
        "kvpool.cli.machine.examine", lambda paths: [Finding("x", OK, f"looked at {paths}")]
    )
    done = CliRunner().invoke(verbs.app, ["doctor", "--path", "/a", "--path", "/b", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "findings": [
            {"topic": "x", "state": "ok", "found": "looked at ['/a', '/b']", "remedy": ""},
            {
                "topic": "other nodes",
                "state": "ok",
                "found": "not known: no daemon [here]",
                "remedy": "",
            },
        ],
        "peers": [],
    }
    assert "no daemon [here]" in CliRunner().invoke(verbs.app, ["doctor"]).stdout
    monkeypatch.setattr("kvpool.cli.machine.examine", lambda paths: [Finding("x", BAD, "broken")])
    assert CliRunner().invoke(verbs.app, ["doctor"]).exit_code == 1


SEGMENT = "7f0000000000-7f0080000000 rw-s 00000000 00:01 1037   /memfd:kvpool-segment (deleted)"


@pytest.fixture
def last(tmp_path):
    """The socket of an ended daemon whose segment had inode 1037."""
    socket = tmp_path / "kvpool.sock"
    kept = {"default": {"memory": 0.5, "nbytes": 2 << 30, "inode": 1037}}
    socket.with_suffix(".sock.memory").write_text(json.dumps(kept))
    return str(socket)


def waits(socket: str) -> None:
    write_wait(socket, MemoryWait(3 << 30, 5 << 30, 12.3, 17.7))


def test_a_starting_daemon_is_told_of(tmp_path, last):
    assert not list(starting(last, tmp_path))
    waits(last)
    (found,) = starting(last, tmp_path)
    assert (found.topic, found.state) == ("starting daemon", NOTE)
    assert "3 GiB are missing, 5 GiB are free" in found.found
    assert "waited for 12 s, and gives up in 18 s" in found.found
    assert "as root" in found.remedy


def test_who_holds_the_memory_is_named(tmp_path, last):
    machine(
        tmp_path,
        {
            "proc/12/maps": f"00400000-00500000 r-xp 0 08:01 1037 /bin/x\n{SEGMENT}\n{SEGMENT}",
            "proc/12/comm": "VLLM::EngineCor",
            "proc/7/maps": SEGMENT.replace("1037", "1038"),
            "proc/7/comm": "another daemon's engine",
            "proc/9/comm": "another user's",
            "proc/self/maps": SEGMENT,
        },
    )
    (held,) = starting(last, tmp_path)
    assert held.topic == "memory of the last daemon"
    assert "VLLM::EngineCor (process 12, 2048 MiB) still map it" in held.found
    waits(last)
    assert [found.topic for found in starting(last, tmp_path)] == [held.topic, "starting daemon"]


def test_commands_say_what_the_daemon_waits_for(last):
    waits(last)
    for command in ("status", "nodes"):
        ended = CliRunner().invoke(verbs.app, [command, "--socket", last])
        assert isinstance(ended.exception, Unavailable)
        assert "is starting, and waits for memory: 3 GiB are missing" in str(ended.exception)
