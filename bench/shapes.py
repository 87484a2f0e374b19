"""Does it matter to what is stored how an engine is split?

Worker halves of the vLLM plugin over paged KV made by hand, without vLLM, and one real daemon.

`any`: engines of 1, 2, 4 and 8 tensor-parallel ranks, and of two pipeline stages, each read what each other has
written: with as many KV heads as ranks, with fewer, with MLA, with a window. Wrong bytes are counted.

`mla`: what four ranks with the same KV take in the pool, in copies.

`states`: what is stored of a model with linear attention, in real vLLM, against the states of all its blocks.

`lookups`: how long the lookup of a million tokens holds an engine's scheduler.

    python bench/shapes.py [--quick] [--json FILE] [--only any|mla|states|lookups]

Needs vLLM: without it, it runs itself in the vLLM environment.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import REPO, Daemon, Report, daemon, parse_arguments
from shapes_lookups import lookups
from shapes_states import hybrid

from kvpool.client import Client

RANKS = (1, 2, 4, 8)


def main() -> int:
    if importlib.util.find_spec("vllm") is None:
        python = str(REPO / ".venv-vllm" / "bin" / "python")
        os.execv(python, [python, *sys.argv])
    report, arguments = parse_arguments(__doc__ or "")
    parts = {"any": any_reads_any, "mla": one_copy, "states": hybrid}
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(Path(folder), "shapes", "512MiB") as running,
        Client(running.socket, instance="shapes", timeout_s=30.0) as client,
    ):
        for name, part in parts.items():
            if arguments.only in name:
                part(report, client, running)
    if arguments.only in "lookups":
        lookups(report)
    return report.finish()


def keys_of(seed: Any, count: int) -> list[bytes]:
    draw = random.Random(str(seed))
    return [draw.randbytes(16) for _ in range(count)]


def random_kv(layers: int, blocks: int, heads: int, tokens: int, content: int) -> Any:
    """The model's KV in bf16: any bits."""
    import torch

    bits = torch.randint(-(1 << 15), 1 << 15, (layers, blocks, heads, tokens, content))
    return bits.to(torch.int16).view(torch.bfloat16)


# ---- any ---------------------------------------------------------------------------------------------


def any_reads_any(report: Report, client: Client, _: Daemon) -> None:
    from kvpool.engine_plugins.vllm.plan import GroupRule
    from kvpool.types import PartKind
    from tests.support.paged_ranks import Engine

    layouts = {1: "LBHNC", 2: "LBNHC", 4: "BLHNC", 8: "LHBNC"}
    engines = [Engine(tp=tp, layout=layouts[tp], pieces=2) for tp in RANKS]
    engines.append(Engine(tp=2, pp=2, layout="BLNHC", pieces=2))
    window = GroupRule(0, kind=PartKind.WINDOW, window_blocks=3)
    wrong = 0
    for name, heads, mla, rule in (
        ("8 heads", 8, False, GroupRule(0)),
        ("2 heads", 2, False, GroupRule(0)),
        ("mla", 1, True, GroupRule(0)),
        ("window", 8, False, window),
    ):
        kv = random_kv(4, 12, heads, 16, 64)
        found = {
            (writer, reader): wrong_bytes(client, name, rule, kv, writer, reader, mla=mla)
            for writer, reader in itertools.product(engines, engines)
        }
        wrong += sum(found.values())
        report.row(f"any {name}", pairs=len(found), wrong_bytes=sum(found.values()))
    report.check("tp_any_wrong", wrong, at_most=0)


def wrong_bytes(
    client: Client, name: str, rule: Any, kv: Any, writer: Any, reader: Any, *, mla: bool
) -> int:
    """How many bytes a reader's ranks have that are not the writer's, where it loaded, or its own, elsewhere."""
    from dataclasses import replace

    import torch

    from tests.support.paged_ranks import PagedRanks

    written, read = [7, 2, 3, 4, 11, 0], [1, 2, 3, 10, 9, 5]
    if rule.window_blocks:
        written, read = written[-rule.window_blocks :], read[-rule.window_blocks :]
    unique = f"{name} {writer} {reader}"
    keys = keys_of(unique, 6)
    wrote = PagedRanks(client, replace(writer, mla=mla), kv, name=unique, rule=rule)
    wrote.save(keys[-len(written) :], written)
    wrote.close()
    empty = random_kv(*kv.shape)
    got = PagedRanks(client, replace(reader, mla=mla), empty, name=unique, rule=rule)
    assert got.record == wrote.record, "they are of different namespaces"
    got.load(keys, read)
    wanted = empty.clone()
    wanted[:, read] = kv[:, written]
    wrong = 0
    for rank in range(reader.tp * reader.pp):
        here, there = (
            each.contiguous().view(torch.uint8) for each in (got.kv(rank), got.share(wanted, rank))
        )
        wrong += int((here != there).sum())
    got.close()
    return wrong


# ---- mla ---------------------------------------------------------------------------------------------


def one_copy(report: Report, client: Client, _: Daemon) -> None:
    from tests.support.paged_ranks import Engine, PagedRanks

    kv = random_kv(61, 12, 1, 16, 576)
    copy = kv[:, :8].numel() * kv.element_size()
    copies = []
    for tp in RANKS:
        before = client.stats().counters.committed_bytes
        wrote = PagedRanks(client, Engine(tp=tp, mla=True), kv, name=f"mla {tp}")
        wrote.save(keys_of(("mla", tp), 8), range(8))
        wrote.close()
        copies.append((client.stats().counters.committed_bytes - before) / copy)
        report.row(f"mla tp={tp}", copies=copies[-1])
    report.check("mla_bytes_vs_one_copy", max(copies), at_most=1.02)


if __name__ == "__main__":
    sys.exit(main())
