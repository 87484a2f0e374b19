"""The output of `kvpool blocks lookup --why`: why a node lacks a block of a prompt."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from kvpool.cli.render.text import DIGEST_SHOWN, Parts, count, duration
from kvpool.wire.answers import MissedBlock, Missing


def why_view(told: Mapping[str, Missing]) -> Parts:
    """What is missing now on each node, and what was at the last read, if that differs."""
    for node, found in told.items():
        missing, last = found.missing, found.last
        if missing is not None:
            yield Text(f"{node}: {sentence(missing, found.asked)}")
        else:
            yield Text(f"{node}: all {count(found.asked, 'block')} are there")
        same = missing and last and (last.key, last.reason) == (missing.key, missing.reason)
        if last is not None and not same:
            when = f"{duration(last.ago_s or 0)} ago a read ended at"
            yield Text(f"{node}: {when} {sentence(last, last.asked or 0)}")


def sentence(why: MissedBlock, asked: int) -> str:
    """`block 12 of 40: evicted, as its tier was full, 34 s ago from dram, 12 min after its last use, …`."""
    text = [f"block {why.block + 1} of {asked}: {why.words}"]
    if why.age_s is not None:
        text.append(f"{duration(why.age_s)} ago from {why.tier}")
    if why.idle_s is not None:
        text.append(f"{duration(why.idle_s)} after its last use")
    if why.by:
        text.append(f"by a put of namespace {why.by[:DIGEST_SHOWN]}")
    if why.where:
        text.append(why.where)
    if why.differs:
        text += [
            f"{name}: {there!r} there, {here!r} here" for name, (there, here) in why.differs.items()
        ]
    return ", ".join(text)
