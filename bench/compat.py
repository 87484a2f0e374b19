"""Mooncake Store's Python interface over the pool, beside the wheel that it is taken from: the same calls, in turns.

    .venv/bin/python bench/compat.py [--quick] [--json FILE]

One node. kvpool: one daemon. Peer: the non-CUDA wheel with its master and a process that holds the segment, from and
into which the caller's calls cross its TCP transport, as for every user whose objects are not in its own process; and,
for the reads, once more with the segment in the caller's own process, where it copies memory (rows `own`, no check).
Both are called from one process, which .venv-vllm's Python runs. The objects of a size are a tenant's of its own: what an engine
has, whose pages have one size. Rows `mixed` are of a tenant with three sizes and small objects.

What was read is compared with what was put, outside the clock. Times are medians of a call.

Checks: compat_get_1m_vs_peer, compat_get_64k_vs_peer: batch_get_into of 16 objects. compat_slowest_call_vs_peer: the
least ratio of any call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from engines import VLLM_PYTHON, Broken, peer_store
from harness import Report, daemon, in_turns, median, parse_arguments

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64k": 64 * KIB, "1m": MIB}
BATCH = 16
PIECES = 32
"""Of an object in the multi-buffer calls, as an engine's layers are."""
ROUNDS, ROUNDS_QUICK = 40, 12
CALLS_A_TURN = {"64k": 8, "1m": 2}
MEMORY = "1GiB"
PEER_BYTES = 1 << 30
BOUNDS = {
    "compat_get_1m_vs_peer": 4.0,
    "compat_get_64k_vs_peer": 4.0,
    "compat_slowest_call_vs_peer": 1.0,
}


class WrongError(Exception):
    """A call gave another answer than it should."""


def expect(got: Any, wanted: Any, what: str) -> None:
    if got != wanted:
        raise WrongError(f"{what}: {got!r:.200} instead of {wanted!r:.200}")


class Caller:
    """One store, and the calls that are timed. Keys are fresh for each put, and what is read was put last."""

    def __init__(self, store: Any, size: int, tag: str, config: Any = None) -> None:
        self.store = store
        self._config = () if config is None else (config,)
        self.size = size
        self._numbers = itertools.count()
        self._tag = tag
        generator = np.random.default_rng(7)
        self.source = generator.integers(0, 256, (BATCH, size), dtype=np.uint8)
        self.out = np.zeros_like(self.source)
        for memory in (self.source, self.out):
            expect(store.register_buffer(memory.ctypes.data, memory.nbytes), 0, "register_buffer")
        self.value = self.source[0].tobytes()
        self.values = [row.tobytes() for row in self.source]
        self.sizes = [size] * BATCH
        self.sources = [row.ctypes.data for row in self.source]
        self.targets = [row.ctypes.data for row in self.out]
        step = size // PIECES
        self.piece_sizes = [[step] * PIECES] * BATCH
        self.source_pieces = [[at + step * i for i in range(PIECES)] for at in self.sources]
        self.target_pieces = [[at + step * i for i in range(PIECES)] for at in self.targets]
        self.keys = self.fresh()
        self.victims: list[str] = []
        expect(
            store.batch_put_from(self.keys, self.sources, self.sizes, *self._config),
            [0] * BATCH,
            "put",
        )

    def fresh(self, count: int = BATCH) -> list[str]:
        serial = next(self._numbers)
        return [f"bench/{self._tag}/{serial}/{i}" for i in range(count)]

    def compare(self) -> None:
        expect(bool((self.out == self.source).all()), True, "bytes read")
        self.out.fill(0)

    def make_room(self) -> None:
        """Before a turn of puts, outside the clock: what was put before is not needed."""
        self.store.remove_all(True)
        expect(
            self.store.batch_put_from(self.keys, self.sources, self.sizes, *self._config),
            [0] * BATCH,
            "put",
        )

    # ---- the calls -----------------------------------------------------------------------------------

    def put(self) -> None:
        expect(self.store.put(self.fresh(1)[0], self.value), 0, "put")

    def put_from(self) -> None:
        expect(self.store.put_from(self.fresh(1)[0], self.sources[0], self.size), 0, "put_from")

    def put_parts(self) -> None:
        half = self.size // 2
        parts = (self.value[:half], self.value[half:])
        expect(self.store.put_parts(self.fresh(1)[0], *parts), 0, "put_parts")

    def put_batch(self) -> None:
        expect(self.store.put_batch(self.fresh(), self.values), 0, "put_batch")

    def batch_put_from(self) -> None:
        got = self.store.batch_put_from(self.fresh(), self.sources, self.sizes, *self._config)
        expect(got, [0] * BATCH, "batch_put_from")

    def batch_put_from_multi_buffers(self) -> None:
        got = self.store.batch_put_from_multi_buffers(
            self.fresh(), self.source_pieces, self.piece_sizes
        )
        expect(got, [0] * BATCH, "batch_put_from_multi_buffers")

    def put_again(self) -> None:
        expect(self.store.put(self.keys[0], self.value), 0, "put of a present key")

    def get(self) -> None:
        expect(len(self.store.get(self.keys[0])), self.size, "get")

    def get_buffer(self) -> None:
        expect(self.store.get_buffer(self.keys[0]).size(), self.size, "get_buffer")

    def get_into(self) -> None:
        got = self.store.get_into(self.keys[0], self.targets[0], self.size)
        expect(got, self.size, "get_into")

    def get_batch(self) -> None:
        expect([len(one) for one in self.store.get_batch(self.keys)], self.sizes, "get_batch")

    def batch_get_buffer(self) -> None:
        got = self.store.batch_get_buffer(self.keys)
        expect([one.size() for one in got], self.sizes, "batch_get_buffer")

    def batch_get_into(self) -> None:
        got = self.store.batch_get_into(self.keys, self.targets, self.sizes)
        expect(got, self.sizes, "batch_get_into")

    def batch_get_into_multi_buffers(self) -> None:
        got = self.store.batch_get_into_multi_buffers(
            self.keys, self.target_pieces, self.piece_sizes
        )
        expect(got, self.sizes, "batch_get_into_multi_buffers")

    def is_exist(self) -> None:
        expect(self.store.is_exist(self.keys[0]), 1, "is_exist")

    def is_exist_missing(self) -> None:
        expect(self.store.is_exist("nobody has it"), 0, "is_exist")

    def batch_is_exist(self) -> None:
        expect(self.store.batch_is_exist(self.keys), [1] * BATCH, "batch_is_exist")

    def batch_is_exist_missing(self) -> None:
        got = self.store.batch_is_exist([f"nobody has {i}" for i in range(BATCH)])
        expect(got, [0] * BATCH, "batch_is_exist")

    def get_missing(self) -> None:
        expect(self.store.get("nobody has it"), b"", "get")

    def get_size(self) -> None:
        expect(self.store.get_size(self.keys[0]), self.size, "get_size")

    def get_replica_desc(self) -> None:
        expect(len(self.store.get_replica_desc(self.keys[0])), 1, "get_replica_desc")

    def remove(self) -> None:
        expect(self.store.remove(self.victims.pop(), True), 0, "remove")

    def upsert(self) -> None:
        expect(self.store.upsert(self.upserted, self.value), 0, "upsert")

    # ---- before and after turns ----------------------------------------------------------------------

    def stock_victims(self, count: int) -> None:
        self.victims = self.fresh(count)
        for at in range(0, count, BATCH):
            some = self.victims[at : at + BATCH]
            n = len(some)
            expect(
                self.store.batch_put_from(some, self.sources[:n], self.sizes[:n]), [0] * n, "put"
            )

    upserted = "bench/upserted"


READS = ("get", "get_buffer", "get_into", "get_batch", "batch_get_buffer", "batch_get_into")
READS_INTO = ("get_into", "batch_get_into", "batch_get_into_multi_buffers")
PUTS = (
    "put",
    "put_from",
    "put_parts",
    "put_batch",
    "batch_put_from",
    "batch_put_from_multi_buffers",
)
LOOKUPS = (
    "is_exist",
    "is_exist_missing",
    "batch_is_exist",
    "batch_is_exist_missing",
    "get_missing",
    "get_size",
    "get_replica_desc",
    "put_again",
)
CALLS = (*PUTS, *READS, "batch_get_into_multi_buffers", *LOOKUPS, "remove", "upsert")


def timed(rounds: int, call: str, name: str, callers: list[Caller]) -> list[list[float]]:
    """Seconds of one call of each, in turns."""
    count = CALLS_A_TURN[name] if call not in LOOKUPS else 8
    if call == "remove":
        for caller in callers:
            caller.stock_victims((rounds + 3) * count)

    def often(one: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                one()

        return work

    times = in_turns(rounds, *[often(getattr(caller, call)) for caller in callers])
    return [[taken / count for taken in some] for some in times]


def race(report: Report, rounds: int, name: str, ours: Caller, theirs: Caller) -> dict[str, float]:
    """The ratio of each call."""
    ratios = {}
    for call in CALLS:
        if call in PUTS or call in ("remove", "upsert"):
            ours.make_room()
            theirs.make_room()
        pool_s, peer_s = map(median, timed(rounds, call, name, [ours, theirs]))
        if call == "batch_get_into":
            ours.compare()
            theirs.compare()
        ratios[call] = peer_s / pool_s
        report.row(
            f"{call} {name}",
            kvpool_us=round(1e6 * pool_s, 1),
            peer_us=round(1e6 * peer_s, 1),
            ratio=round(ratios[call], 3),
        )
    return ratios


def own_segment(report: Report, rounds: int, name: str, ours: Caller, own: Caller) -> None:
    """The peer where the objects are in the caller's own process."""
    for call in ("batch_get_into", "get", "batch_put_from"):
        own.make_room()
        ours.make_room()
        pool_s, peer_s = map(median, timed(rounds, call, name, [ours, own]))
        report.row(
            f"own {call} {name}",
            kvpool_us=round(1e6 * pool_s, 1),
            peer_us=round(1e6 * peer_s, 1),
            ratio=round(peer_s / pool_s, 3),
        )


def here(store: Any) -> Any:
    """A configuration that has the peer store in this process's segment."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    return config


def mixed(report: Report, rounds: int, pool: Callable[[str], Any], peer: Any) -> None:
    """Where a tenant has objects of several sizes, each of which is in a namespace of its own."""
    store = pool("mixed")
    callers = [Caller(store, size, f"mixed-{size}") for size in (16 * KIB, 64 * KIB, 256 * KIB)]
    expect(store.put("a small one", b"small"), 0, "put")
    theirs = Caller(peer, 64 * KIB, "mixed-peer")
    for call in (
        *("is_exist", "is_exist_missing", "get_size", "batch_get_into"),
        *("put", "remove", "upsert"),
    ):
        pool_s, peer_s = map(median, timed(rounds, call, "64k", [callers[1], theirs]))
        report.row(
            f"mixed {call}",
            kvpool_us=round(1e6 * pool_s, 1),
            peer_us=round(1e6 * peer_s, 1),
            ratio=round(peer_s / pool_s, 3),
        )


@contextlib.contextmanager
def peer_client(master: str, segment_bytes: int) -> Iterator[Any]:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 256 << 20, "tcp", "", master)
    if code:
        raise Broken(f"the peer's setup: {code}")
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def pool_clients(socket_path: str) -> Iterator[Callable[[str], Any]]:
    from kvpool.engine_plugins.mooncake.store import MooncakeDistributedStore

    os.environ["KVPOOL_SOCKET"] = socket_path
    with contextlib.ExitStack() as stack:

        def of(tenant_id: str) -> Any:
            store = MooncakeDistributedStore()
            expect(
                store.setup("127.0.0.1", "", 0, 0, "tcp", "", "", tenant_id=tenant_id), 0, "setup"
            )
            stack.callback(store.close)
            return store

        yield of


def main() -> int:
    report, arguments = parse_arguments((__doc__ or "").splitlines()[0])
    rounds = ROUNDS_QUICK if arguments.quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name:
        folder = Path(name)
        try:
            run(report, rounds, folder, arguments.only)
        except Broken as error:
            for check, bound in BOUNDS.items():
                report.not_run(check, str(error), at_least=bound)
    return report.finish()


def run(report: Report, rounds: int, folder: Path, only: str) -> None:
    least: dict[str, float] = {}
    gets: dict[str, float] = {}
    with (
        daemon(folder, "n1", MEMORY) as node,
        pool_clients(node.socket) as pool,
        peer_store(folder, PEER_BYTES) as variables,
    ):
        master = json.loads(Path(variables["MOONCAKE_CONFIG_PATH"]).read_text())
        address = master["master_server_address"]
        with peer_client(address, 0) as peer:
            for name, size in SIZES.items():
                if only not in name:
                    continue
                ours, theirs = Caller(pool(name), size, name), Caller(peer, size, name)
                ratios = race(report, rounds, name, ours, theirs)
                gets[name] = ratios["batch_get_into"]
                least |= {f"{call} {name}": ratio for call, ratio in ratios.items()}
            if only in "mixed":
                mixed(report, rounds, pool, peer)
            peer.remove_all(True)
        with peer_client(address, 256 * MIB) as own:
            for name, size in SIZES.items():
                if only in f"own {name}":
                    ours = Caller(pool(f"own {name}"), size, name)
                    own_segment(
                        report, rounds, name, ours, Caller(own, size, f"own-{name}", here(own))
                    )
    for name, ratio in gets.items():
        report.check(
            f"compat_get_{name}_vs_peer", ratio, at_least=BOUNDS[f"compat_get_{name}_vs_peer"]
        )
    if least:
        slowest = min(least, key=lambda call: least[call])
        report.row("slowest call", call=slowest)
        report.check("compat_slowest_call_vs_peer", least[slowest], at_least=1.0)


if __name__ == "__main__":
    if not sys.executable.startswith(str(VLLM_PYTHON.parent)) and VLLM_PYTHON.exists():
        os.execv(VLLM_PYTHON, [str(VLLM_PYTHON), *sys.argv])
    sys.exit(main())
