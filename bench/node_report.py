"""What `bench/node.py transfer` has measured, what there is to say about it, and how it is printed. No daemon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvpool.cli.render.text import Parts, count, make_table, size_text
from kvpool.errors import InvalidRequest
from kvpool.telemetry.cluster_stats import PathsStats, PeerWays, WayStats
from kvpool.telemetry.node_stats import NodeStats

BLOCK_SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
BLOCK_BYTES_MAX = 64 << 20
BLOCKS_MAX = 4096
SHARE_MAX = 0.25  # of the tenant's memory at either node
ROUNDS = 3
SINGLES = 200
CPU_S_MIN = 0.05  # the system counts in steps of 0.01 s
OTHERS_SHARE = 1.2  # of ours: so much by these ways means that others pulled, too
NIXL, TCP = "nixl", "tcp"


# ---- what to measure ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """So many blocks of so many bytes each."""

    block_bytes: int
    blocks: int


def choose(
    wanted: Sequence[int], total_bytes: int, memory: Mapping[str, int]
) -> tuple[list[Size], list[str]]:
    """What is measured, the smallest blocks first; and in words, what of it is not as it was wanted.

    total_bytes: of all blocks of one size. memory: of the tenant, by node. Raises `InvalidRequest` if nothing is left.
    """
    least = min(memory, key=lambda node: memory[node])
    room = int(SHARE_MAX * memory[least])
    quarter = f"a quarter of this tenant's memory on {least}, which is {size_text(memory[least])}"
    sizes, left_out = [], []
    for nbytes in sorted(set(wanted)):
        if nbytes > BLOCK_BYTES_MAX:
            raise InvalidRequest(f"--block-size: blocks have at most {size_text(BLOCK_BYTES_MAX)}")
        if nbytes > total_bytes:
            raise InvalidRequest(
                f"a block of {size_text(nbytes)} is more than --size, {size_text(total_bytes)}: give more"
            )
        if nbytes > room:
            left_out.append(f"blocks of {size_text(nbytes)} are left out, being larger than that")
        else:
            sizes.append(Size(nbytes, min(min(total_bytes, room) // nbytes, BLOCKS_MAX)))
    if not sizes:
        raise InvalidRequest(
            f"a block of {size_text(min(wanted))} is more than {quarter}: use smaller ones with --block-size, or give "
            "the tenant more memory there"
        )
    if room >= total_bytes:
        return sizes, []
    return sizes, [f"measured with {size_text(room)} instead of --size: {quarter}", *left_out]


def find_node(cluster: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    """The record of the node to pull from. cluster: as `Client.cluster` tells it. Raises `InvalidRequest`."""
    own = cluster["node"]
    if node == own:
        raise InvalidRequest(
            f"{node} is this node: name another one. `bench/node.py local` measures this one alone"
        )
    if not cluster["joined"]:
        raise InvalidRequest(
            f"node {own} is in no cluster: start its daemon with --join, as in docs/cluster.md. Nodes of --peer "
            "cannot be asked by name"
        )
    records: dict[str, Mapping[str, Any]] = {one["node"]: one for one in cluster["nodes"]}
    if node not in records:
        others = ", ".join(sorted(records.keys() - {own})) or "no others"
        raise InvalidRequest(
            f"there is no node {node!r} in cluster {cluster['cluster']}; {own} knows of {others}. `kvpool nodes` "
            "lists them"
        )
    for record in (records.get(own), records[node]):
        if record is not None and record["state"] != "serving":
            raise InvalidRequest(
                f"node {record['node']} is {record['state']}, and pulls need both nodes serving: `kvpool nodes` says "
                "what that means"
            )
    return records[node]


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share is not above. At least one value."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


# ---- what was measured -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cpu:
    """CPU seconds of all processes of the two daemons while so many bytes were pulled."""

    nbytes: int
    here_s: float
    there_s: float


@dataclass(frozen=True)
class Latency:
    """Of one block a request, as its client sees it, in seconds."""

    pulls: int
    p50_s: float
    p99_s: float


@dataclass(frozen=True)
class Measured:
    """Blocks of one size. rounds_s: seconds of each request for all of them. bytes_s: of the fastest one. by: bytes that
    came, by transport. mismatches: blocks that arrived at this node meanwhile and did not match their checksums."""

    block_bytes: int
    blocks: int
    rounds_s: list[float]
    bytes_s: float
    one_block: Latency
    cpu: Cpu
    by: dict[str, int]
    mismatches: int


@dataclass(frozen=True)
class Machine:
    """What one core of this machine does, bytes a second."""

    memcpy_bytes_s: float
    xxh3_bytes_s: float


@dataclass(frozen=True)
class Ways:
    """The ways from the other node, and why others than NIXL were used.

    pull_over, transfer_workers: the settings here. nixl_here, nixl_there: who listens for it. usual: the transport that is
    used as a rule. nixl_gain: how often as fast as that NIXL was; None: not compared. ways: with what each has carried
    during the measurement, by anybody. failed_over: pulls that NIXL began and TCP ended; rested: that went by TCP soon
    after. error: the last one of NIXL.
    """

    pull_over: str
    transfer_workers: int
    nixl_here: bool
    nixl_there: bool
    usual: str
    nixl_gain: float | None
    ways: list[WayStats]
    failed_over: int
    rested: int
    error: str


@dataclass(frozen=True)
class Report:
    """All of it. pulled_bytes: by the measurement itself."""

    to_node: str
    from_node: str
    sizes: list[Measured]
    machine: Machine
    ways: Ways
    pulled_bytes: int
    notes: list[str]
    remarks: list[str]


def of_peer(paths: PathsStats, urls: Sequence[str]) -> PeerWays:
    """What is known of the ways to a node that listens at these URLs; empty if it was not pulled from."""
    return next((paths.peers[url] for url in urls if url in paths.peers), PeerWays())


def since(before: PeerWays, after: PeerWays) -> list[WayStats]:
    """The ways of `after`, with what each has carried since `before`."""
    was = {way.url: way for way in before.ways}
    nothing = WayStats()
    return [
        WayStats(
            url=way.url,
            transport=way.transport,
            pulls=way.pulls - was.get(way.url, nothing).pulls,
            bytes=way.bytes - was.get(way.url, nothing).bytes,
            rests_s=way.rests_s,
            reason=way.reason,
        )
        for way in after.ways
    ]


def by_transport(ways: Sequence[WayStats]) -> dict[str, int]:
    """Bytes by transport, of those that carried any."""
    found: dict[str, int] = {}
    for way in ways:
        if way.bytes:
            found[way.transport] = found.get(way.transport, 0) + way.bytes
    return found


def remarks(node: str, ways: Ways, pulled_bytes: int) -> list[str]:
    """What to look at, in words."""
    carried = sum(way.bytes for way in ways.ways)
    gauge = (
        "a card of 100 Gb/s carries 12.5 GB/s. By NIXL, blocks of 1 MiB should reach 0.9 of the slower card's line "
        "rate, or of xxh3's speed where that is less; by TCP the CPU is the limit, and more transfer_workers "
        f"({ways.transfer_workers} here) use more cores"
    )
    found = (about_nixl(node, ways), about_others(node, carried, pulled_bytes), gauge)
    return [remark for remark in found if remark]


def about_nixl(node: str, ways: Ways) -> str:
    """Whether NIXL was used, and if not, why."""
    by = by_transport(ways.ways)
    advice = "deploy/rdma.md says how, if the nodes have RDMA cards"
    match ways.nixl_here, ways.nixl_there:
        case False, False:
            return f"neither node listens at a nixl:// URL: add one to listen on both; {advice}"
        case True, False:
            return f"{node} does not listen at a nixl:// URL: add one to listen there; {advice}"
        case False, True:
            return f"{node} has NIXL and this node does not: add a nixl:// URL to listen here; {advice}"
    if not by.get(TCP):
        return (
            "all came by NIXL, over the cards that UCX chose: UCX_LOG_LEVEL=info in the daemon's environment makes it "
            "name them"
        )
    if ways.pull_over == TCP:
        return "NIXL is there and was not used: pull_over is tcp in this node's settings"
    share = f"{by[TCP] / sum(by.values()):.0%} of the bytes came by TCP"
    resting = next((way for way in ways.ways if way.transport == NIXL and way.reason), None)
    if resting is not None:
        return (
            f"NIXL is there, and {share}: NIXL failed and is not tried for another {resting.rests_s:.0f} s: "
            f"{resting.reason}"
        )
    if ways.failed_over or ways.rested:
        return (
            f"NIXL is there, and {share}: NIXL failed in {count(ways.failed_over, 'pull')}, and was given a rest in "
            f"{ways.rested}: {ways.error}"
        )
    if ways.usual == TCP:
        gain = "" if ways.nixl_gain is None else f" (NIXL was {ways.nixl_gain:.2f} times as fast)"
        return (
            f"NIXL is there, and {share}, which is faster between these two nodes as far as this one has seen{gain}. "
            'pull_over = "nixl" in this node\'s settings uses NIXL nevertheless'
        )
    return f"NIXL is used as a rule; {share}: one in 16 pulls of 4 MiB or more does, to compare"


def about_others(node: str, carried: int, ours: int) -> str:
    """Whether the bytes that came from the node, by all its ways, are those of the measurement."""
    if carried > OTHERS_SHARE * ours:
        return (
            f"other pulls from {node} went on meanwhile ({size_text(carried)} came, {size_text(ours)} of it measured "
            "here): measure again when it is quiet"
        )
    if ours > OTHERS_SHARE * carried:
        return (
            f"only {size_text(carried)} of {size_text(ours)} came from {node}, the rest from nodes that it had given "
            "blocks to, being full: use a smaller --size"
        )
    return ""


def why_lacking(node: str, lacking: int, asked: int, before: NodeStats, after: NodeStats) -> str:
    """Why not all blocks came that a node was asked for. before, after: the statistics of the node that asked."""
    came = f"{lacking:,} of {asked:,} blocks did not come from {node}"
    if wrong := after.counters.checksum_mismatches - before.counters.checksum_mismatches:
        return f"{came}: {_damaged(after.node, wrong)}"
    peer = next((peer for peer in after.fetch.peers if peer.node == node and peer.last_error), None)
    if peer is not None:
        return f"{came}: {peer.last_error}; `kvpool doctor` and the daemons' logs tell more"
    return (
        f"{came}: they were evicted there, or found no room here. Use a smaller --size, or measure when the pools are "
        "idle"
    )


def _damaged(node: str, blocks: int) -> str:
    return (
        f"{count(blocks, 'block')} arrived at {node} with other bytes than were sent, and were dropped. A network card, "
        "a switch or memory damages what it carries: see KvpoolChecksumMismatches in docs/operations.md"
    )


def trouble(report: Report) -> str:
    """What an operator has to look into; empty if nothing is wrong."""
    mismatches = sum(one.mismatches for one in report.sizes)
    return _damaged(report.to_node, mismatches) if mismatches else ""


# ---- how it is printed -------------------------------------------------------------------------------


def view(report: Report) -> Parts:
    """The report, within 80 columns."""
    yield Text.assemble(
        "pulled from ",
        (report.from_node, "bold"),
        " into ",
        (report.to_node, "bold"),
        f": all blocks at once, the best of {ROUNDS}; then one by one",
    )
    for note in report.notes:
        yield Text(note, style="yellow")
    yield Text()
    yield _sizes(report.sizes)
    yield Text("CPU: seconds for a GB, of all processes of the daemon", style="dim")
    yield Text()
    machine = report.machine
    yield Text(
        f"one core here: memcpy {_gb_s(machine.memcpy_bytes_s)} GB/s, xxh3 of blocks of 1 MiB "
        f"{_gb_s(machine.xxh3_bytes_s)} GB/s"
    )
    mismatches = sum(one.mismatches for one in report.sizes)
    yield Text(f"checksum failures: {mismatches}", style="bold red" if mismatches else "")
    if report.ways.ways:
        yield Text()
        yield _ways(report.from_node, report.ways.ways)
    yield Text()
    said = Table.grid(padding=(0, 1))
    for remark in report.remarks:
        said.add_row("-", Text(remark))
    yield said


def _sizes(sizes: Sequence[Measured]) -> Table:
    table = make_table(
        "", "block", ">blocks", ">GB/s", ">one, p50", ">one, p99", ">CPU here", ">CPU there", "by"
    )
    for one in sizes:
        table.add_row(
            size_text(one.block_bytes),
            f"{one.blocks:,}",
            _gb_s(one.bytes_s),
            f"{one.one_block.p50_s * 1e3:.2f} ms",
            f"{one.one_block.p99_s * 1e3:.2f} ms",
            _a_gb(one.cpu.here_s, one.cpu.nbytes),
            _a_gb(one.cpu.there_s, one.cpu.nbytes),
            _by(one.by),
        )
    return table


def _gb_s(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.2f}"


def _a_gb(seconds: float, nbytes: int) -> str:
    """Of what is too short to be counted, only the bound."""
    if seconds < CPU_S_MIN:
        return f"<{CPU_S_MIN / nbytes * 1e9:.2f}"
    return f"{seconds / nbytes * 1e9:.2f}"


def _by(by: Mapping[str, int]) -> str:
    total = sum(by.values())
    if len(by) == 1:
        return next(iter(by))
    return ", ".join(f"{name} {n / total:.0%}" for name, n in sorted(by.items())) or "?"


def _ways(node: str, ways: Sequence[WayStats]) -> Table:
    table = make_table(f"Ways from {node}", "way", ">pulls", ">bytes", "")
    for way in ways:
        rests = f"rests for {way.rests_s:.1f} s: {way.reason}" if way.reason else ""
        table.add_row(
            escape(way.url), f"{way.pulls:,}", size_text(way.bytes), Text(rests, style="yellow")
        )
    for column in table.columns:
        column.overflow = "fold"
    return table
