"""`bench/node.py local`: how fast this node's daemon takes, finds and gives blocks, beside the copying of plain memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from kvpool.cli.render.bars import make_bar
from kvpool.cli.render.text import Parts, make_table, size_text
from kvpool.client import Client
from kvpool.errors import InvalidRequest
from kvpool.types import KEY_BYTES, Namespace, NamespaceRecord
from kvpool.wire.frame import KEYS_MAX

if TYPE_CHECKING:
    from rich.console import Console

NAME = "bench/node.py local"
BLOCK_TOKENS = 16
SHARE_MAX = 0.25  # of the tenant's memory that it takes for a moment
TOGETHER_BYTES = 8 << 20  # in one call, as an engine has it
ROUNDS = 3
BLOCK_BYTES_MAX = 64 << 20
AVAILABLE_LOOKS, AVAILABLE_LOOK_S = 100, 0.02

Clock = Callable[[], float]


def wait_available(client: Client, sleep: Callable[[float], None] = time.sleep) -> None:
    """An interrupted request was a failure to the client, which then sends none for a moment: wait that long."""
    for _ in range(AVAILABLE_LOOKS):
        if client.available:
            return
        sleep(AVAILABLE_LOOK_S)


class Measured(NamedTuple):
    """One question: `calls` of `blocks` blocks each took these seconds at best."""

    what: str
    blocks: int
    nbytes: int
    calls: int
    seconds: float


class Bench:
    """Blocks of a namespace of its own, on one node. Nothing of it stays when the `with` ends."""

    def __init__(
        self,
        client: Client,
        block_bytes: int,
        total_bytes: int,
        *,
        seed: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        """total_bytes: of all blocks; less is taken where the pool is small. seed: of keys and bytes."""
        if not 0 < block_bytes <= BLOCK_BYTES_MAX:
            raise InvalidRequest(f"blocks have 1 byte to {size_text(BLOCK_BYTES_MAX)}")
        self._client = client
        self._clock = clock
        self._block_bytes = block_bytes
        segment = client.stats().tenants[client.tenant].segment_bytes
        count = min(int(min(total_bytes, SHARE_MAX * segment)) // block_bytes, KEYS_MAX)
        if count < 1:
            raise InvalidRequest(
                f"a block of {size_text(block_bytes)} is more than a quarter of this tenant's memory, "
                f"{size_text(segment)}: use smaller ones with --block-size"
            )
        self.count = count
        self.cut = (
            count < total_bytes // block_bytes
        )  # there is not room for all that was asked for
        self._together = max(1, min(count, TOGETHER_BYTES // block_bytes))
        random = np.random.default_rng(seed)
        packed = random.bytes(KEY_BYTES * count)
        self._keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        shape = (self._together, block_bytes)
        self._rows = random.integers(0, 256, shape, dtype=np.uint8)
        self._out = np.empty(shape, dtype=np.uint8)
        record = NamespaceRecord.simple(
            f"{NAME} {block_bytes}", block_bytes=block_bytes, block_tokens=BLOCK_TOKENS
        )
        self._ns: Namespace = client.open(record, write="none", write_remote="none")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        wait_available(self._client)
        self.forget()

    def forget(self) -> None:
        """Give all its blocks up."""
        for keys in self._batches():
            self._client.remove(self._ns, keys)

    def _batches(self) -> list[list[bytes]]:
        return [self._keys[at : at + self._together] for at in range(0, self.count, self._together)]

    def run(self, step: Callable[[str], None]) -> list[Measured]:
        """step: called with the name of what has been measured. Raises `InvalidRequest` for wrong bytes."""
        best: dict[str, Measured] = {}
        parts: tuple[tuple[str, Callable[[], None]], ...] = (
            ("memcpy", self._copy),
            ("put", self._put),
            ("match", self._match),
            ("get", self._get),
        )
        for turn in range(ROUNDS):
            if turn:
                self.forget()
            for name, part in parts:
                began = self._clock()
                part()
                seconds = self._clock() - began
                calls = len(self._batches()) if name != "match" else 1
                nbytes = 0 if name == "match" else self.count * self._block_bytes
                found = Measured(name, self.count, nbytes, calls, seconds)
                if name not in best or seconds < best[name].seconds:
                    best[name] = found
                step(name)
        return list(best.values())

    def _copy(self) -> None:
        for keys in self._batches():
            np.copyto(self._out[: len(keys)], self._rows[: len(keys)])

    def _put(self) -> None:
        parent = None
        for keys in self._batches():
            self._client.put(self._ns, keys, self._rows[: len(keys)], parent=parent)
            parent = keys[-1]

    def _match(self) -> None:
        found = self._client.match(self._ns, self._keys)
        self._expect(found, "match")

    def _get(self) -> None:
        got = 0
        for keys in self._batches():
            self._out[: len(keys)] = 0
            there = self._client.get_into(self._ns, keys, self._out[: len(keys)])
            got += int(np.count_nonzero(there))
            if not np.array_equal(self._out[: len(keys)], self._rows[: len(keys)]):
                raise InvalidRequest(
                    "blocks went while they were read, evicted by others: the pool is under pressure; "
                    "measure with a smaller --size, or when it is idle"
                )
        self._expect(got, "get")

    def _expect(self, found: int, what: str) -> None:
        if found != self.count:
            raise InvalidRequest(
                f"{what} found {found:,} of {self.count:,} blocks, the the others were evicted meanwhile: measure with "
                f"a smaller --size, or when the pool is idle"
            )


def measure(bench: Bench, console: Console | None = None) -> list[Measured]:
    """With a bar where there is a terminal."""
    columns = (TextColumn("measuring {task.description}"), BarColumn())
    with make_bar(*columns, console=console) as bar:
        task = bar.add_task("", total=4 * ROUNDS)
        return bench.run(lambda name: bar.update(task, description=name, advance=1))


def plain(found: list[Measured]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [
        {
            "what": each.what,
            "blocks": each.blocks,
            "bytes": each.nbytes,
            "calls": each.calls,
            "seconds": each.seconds,
            "bytes_s": each.nbytes / each.seconds if each.seconds else None,
            "blocks_s": each.blocks / each.seconds if each.seconds else None,
        }
        for each in found
    ]


def view(found: list[Measured], block_bytes: int, *, cut: bool = False) -> Parts:
    """What was measured, a line each. cut: of less than was asked for."""
    if cut:
        yield Text(
            f"measured with {size_text(found[0].blocks * block_bytes)}, less than --size: a quarter of the tenant's "
            f"memory, and {KEYS_MAX:,} blocks, at most",
            style="yellow",
        )
    yield Text(f"{found[0].blocks:,} blocks of {size_text(block_bytes)}, the best of {ROUNDS}")
    yield Text()
    table = make_table("", "what", ">GB/s", ">blocks/s", ">a call")
    for each in found:
        rate = f"{each.nbytes / each.seconds / 1e9:.2f}" if each.nbytes else ""
        call = f"{each.seconds / each.calls * 1e3:.3f} ms"
        table.add_row(each.what, rate, f"{each.blocks / each.seconds:,.0f}", call)
    yield table
