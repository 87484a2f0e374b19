"""What a machine says of its cards and of where memory comes from: on made-up ones, and this one."""

from pathlib import Path

import pytest

from kvpool.daemon.cluster.host_topology import Nic, interface_addresses, look_around, memory_numa

NODES = {
    "sys/devices/system/node/node0/cpulist": "0-3,8",
    "sys/devices/system/node/node1/cpulist": "4-7,9-11",
    "sys/devices/system/node/node2/cpulist": "",
}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def addresses():
    return [
        ("lo", "127.0.0.1", "255.0.0.0"),
        ("eth0", "10.0.0.7", "255.255.255.0"),
        ("bond0", "10.1.2.3", "255.255.0.0"),
        ("eth9", "2001:DB8::7", "ffff:ffff:ffff:ffff::"),
    ]


def test_the_card_behind_each_address(tmp_path):
    place = "sys/class/net"
    root = machine(
        tmp_path,
        {
            f"{place}/eth0/device/numa_node": "1",
            f"{place}/bond0/lower_eth1/device/numa_node": "0",
            f"{place}/bond0/lower_eth2/device/numa_node": "0",
            f"{place}/eth9/device/numa_node": "-1",
            "proc/sys/kernel/random/boot_id": "one boot",
        },
    )
    seen = look_around(root, addresses, lambda: [0])
    assert seen.nic("tcp://10.0.0.7:1") == Nic("eth0", "10.0.0.0/24", 1)
    assert seen.nic("tcp://10.1.2.3:1") == Nic("bond0", "10.1.0.0/16", 0)
    assert seen.nic("tcp://[2001:db8:0::7]:1") == Nic("eth9", "2001:db8::/64", -1)
    assert seen.nic("tcp://127.0.0.9:1") == Nic("lo", "127.0.0.0/8", -1)
    for url in ("tcp://0.0.0.0:1", "tcp://name:1", "tcp://10.0.0.8:1", "sim://a"):
        assert seen.nic(url) is None
    assert len(seen.host) == 16
    assert look_around(root, addresses).host == seen.host
    machine(root, {"proc/sys/kernel/random/boot_id": "another"})
    assert look_around(root, addresses).host != seen.host
    machine(root, {f"{place}/bond0/lower_eth2/device/numa_node": "1"})
    assert look_around(root, addresses).nic("tcp://10.1.2.3:1").numa == -1, "at two places"


def test_a_machine_that_says_nothing(tmp_path):
    seen = look_around(tmp_path, list, lambda: [0])
    assert (seen.host, seen.numa, dict(seen.nics)) == ("", -1, {})
    assert seen.nic("tcp://127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("files", "cpus", "numa"),
    [
        ({}, [0, 8], 0),
        ({}, [5], 1),
        ({}, [3, 4], -1),
        ({}, [77], -1),
        ({"proc/self/status": "Name:\tx\nMems_allowed_list:\t1"}, [0], 1),
        ({"proc/self/status": "Mems_allowed_list:\t0-1"}, [0], 0),
        ({"proc/self/numa_maps": "7f00 default file=/x mapped=1"}, [5], 1),
        ({"proc/self/numa_maps": "7f00 bind:1 file=/x\n7f01 bind:0"}, [0], 1),
        ({"proc/self/numa_maps": "7f00 prefer:1 file=/x"}, [0], 1),
        ({"proc/self/numa_maps": "7f00 bind=static:1 file=/x"}, [0], 1),
        ({"proc/self/numa_maps": "7f00 bind:0-1 file=/x"}, [0], 0),
        ({"proc/self/numa_maps": "7f00 interleave:0-1 file=/x"}, [3, 4], -1),
        (
            {"proc/self/numa_maps": "7f00 bind:0 x", "proc/self/status": "Mems_allowed_list:\t1"},
            [5],
            0,
        ),
    ],
)
def test_where_memory_comes_from(tmp_path, files, cpus, numa):
    assert memory_numa(machine(tmp_path, NODES | files), cpus) == numa


def test_this_machine_has_a_loopback_address():
    assert ("lo", "127.0.0.1", "255.0.0.0") in interface_addresses()
    seen = look_around()
    assert seen.nic("tcp://127.0.0.1:7070").net == "127.0.0.0/8"
