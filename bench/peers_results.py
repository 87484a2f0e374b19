"""What the race of bench/peers.py comes to: rows, checks and a table. No processes, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
LARGE, MIDDLE, SMALL = (MIB, 32), (64 * KIB, 64), (4 * KIB, 128)
MIDDLE_MANY = (64 * KIB, 512)  # as many bytes as LARGE
MIDDLE_ONE = (64 * KIB, 1)

PEERS = ("mooncake", "mooncake tuned")
ASKS = ("exists", "match")  # operations that move no blocks: keys a second
Shape = tuple[int, int]


@dataclass
class Samples:
    """Of one contestant, operation and shape: seconds of each batch, CPU seconds of all of them."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, seconds: Iterable[float], cpu_s: float) -> None:
        self.seconds.extend(seconds)
        self.cpu_s += cpu_s

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Results:
    """All that was measured, and who could not be: absent says why, by name of the contestant."""

    samples: dict[tuple[str, str, Shape], Samples] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, who: str, op: str, shape: Shape, seconds: list[float], cpu_s: float) -> None:
        self.samples.setdefault((who, op, shape), Samples()).add(seconds, cpu_s)

    def drop(self, who: str, why: str) -> None:
        """A contestant that failed has no numbers: what it did before is not to be believed either."""
        self.absent[who] = why
        self.samples = {key: value for key, value in self.samples.items() if key[0] != who}

    def rows(self) -> Iterator[dict[str, Any]]:
        for (who, op, (nbytes, n)), samples in sorted(
            self.samples.items(), key=lambda item: (item[0][2], item[0][1], item[0][0])
        ):
            total = nbytes * n / 1e9
            middle = median(samples.seconds)
            row: dict[str, Any] = {"who": who, "op": op, "block_bytes": nbytes, "blocks": n}
            if op in ASKS:
                row["keys_s"] = n / middle
                row["cpu_us_per_key"] = 1e6 * samples.cpu_s / (n * len(samples.seconds))
            else:
                row["gb_s"] = total / middle
                row["cpu_s_per_gb"] = samples.cpu_s / (total * len(samples.seconds))
            row["p50_ms"] = 1e3 * middle
            row["p99_ms"] = 1e3 * samples.percentile(0.99)
            row["batches"] = len(samples.seconds)
            yield row

    def seconds(self, names: tuple[str, ...], op: str, shape: Shape) -> float:
        """The median of the best of these contestants. Raises `Missing` when none of them has any."""
        return min(median(samples.seconds) for samples in self._of(names, op, shape))

    def cpu(self, names: tuple[str, ...], op: str, shape: Shape) -> float:
        """CPU seconds a GB of the thriftiest of these contestants."""
        total = shape[0] * shape[1] / 1e9
        return min(
            samples.cpu_s / (total * len(samples.seconds)) for samples in self._of(names, op, shape)
        )

    def _of(self, names: tuple[str, ...], op: str, shape: Shape) -> list[Samples]:
        found = [self.samples[key] for name in names if (key := (name, op, shape)) in self.samples]
        if not found:
            reasons = [f"{name}: {self.absent.get(name, 'not in this run')}" for name in names]
            raise MissingError("; ".join(reasons))
        return found


class MissingError(Exception):
    """What a check compares was not measured."""


@dataclass(frozen=True)
class Check:
    """value: None when it was not run, then `why` says what was missing."""

    name: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None
    why: str = ""


def compared(
    name: str,
    value: Callable[[], float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Check:
    """The check of a value. What it compares may be missing."""
    try:
        return Check(name, value(), at_least, at_most)
    except MissingError as missing:
        return Check(name, None, at_least, at_most, str(missing))


def checks(results: Results) -> Iterator[Check]:
    """The ratios of DESIGN section 8, and those that issue 5 adds."""

    def times(name: str, ours: str, op: str, theirs: tuple[str, ...], shape: Shape, bound: float,
              their_op: str = "") -> Check:  # fmt: skip
        """How many times as fast as the best of the others."""
        return compared(
            name,
            lambda: (
                results.seconds(theirs, their_op or op, shape) / results.seconds((ours,), op, shape)
            ),
            at_least=bound,
        )

    def no_dearer(name: str, ours: str, op: str, their_op: str) -> Check:
        """CPU seconds a GB, over the peer's."""
        return compared(
            name,
            lambda: results.cpu((ours,), op, LARGE) / results.cpu(PEERS, their_op, LARGE),
            at_most=1,
        )

    yield times("get_1m_vs_peer", "kvpool shm", "get", PEERS, LARGE, 5)
    yield times("put_1m_vs_peer", "kvpool shm", "put", PEERS, LARGE, 4.5)
    yield times("get_64k_vs_peer", "kvpool shm", "get", PEERS, MIDDLE, 7)
    yield times("get_4k_vs_peer", "kvpool shm", "get", PEERS, SMALL, 20)
    yield times("tcp_vs_peer", "kvpool tcp", "get", PEERS, LARGE, 1.15)
    yield one_block(results)
    yield times("match_vs_peer", "kvpool shm", "match", PEERS, SMALL, 2, "exists")
    yield times("tcp_vs_stream", "kvpool tcp", "pull", ("stream",), LARGE, 1)
    yield four_streams(results)
    yield many_small(results)
    yield times("nixl_vs_raw", "kvpool nixl tcp", "pull", ("nixl tcp",), LARGE, 0.9)
    yield times("nixl_shm_vs_raw", "kvpool nixl shm", "pull", ("nixl shm",), LARGE, 0.65)
    yield no_dearer("cpu_get_1m_vs_peer", "kvpool shm", "get", "get")
    yield no_dearer("cpu_put_1m_vs_peer", "kvpool shm", "put", "put")
    yield no_dearer("cpu_tcp_vs_peer", "kvpool tcp", "get", "get")


def one_block(results: Results) -> Check:
    """How long one block of another node takes, over the best peer's time."""
    return compared(
        "get_one_64k_vs_peer",
        lambda: (
            results.seconds(("kvpool tcp",), "get", MIDDLE_ONE)
            / results.seconds(PEERS, "get", MIDDLE_ONE)
        ),
        at_most=0.8,
    )


def four_streams(results: Results) -> Check:
    """Ours over one plain stream, where four plain streams show that the machine allows it."""
    name, bound = "tcp_vs_stream_4", 1.5
    try:
        one = results.seconds(("stream",), "pull", LARGE)
        allowed = one / results.seconds(("4 streams",), "pull", LARGE)
        ours = one / results.seconds(("kvpool tcp",), "pull", LARGE)
    except MissingError as missing:
        return Check(name, None, at_least=bound, why=str(missing))
    if allowed < bound:
        why = f"this machine does not allow it: four plain streams make {allowed:.2f} x one"
        return Check(name, None, at_least=bound, why=f"{why}, kvpool {ours:.2f} x")
    return Check(name, ours, at_least=bound)


def many_small(results: Results) -> Check:
    """The rate of 64 KiB blocks over TCP, over that of 1 MiB blocks, with as many bytes a batch."""

    def value() -> float:
        small = results.seconds(("kvpool tcp",), "pull", MIDDLE_MANY)
        return results.seconds(("kvpool tcp",), "pull", LARGE) / small

    return compared("tcp_64k_vs_1m", value, at_least=0.85)


def size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def markdown(
    rows: list[dict[str, Any]], found: list[dict[str, Any]], absent: dict[str, str]
) -> str:
    """Tables for people: one of speeds for each operation, then the checks, then who was not there."""
    lines: list[str] = []
    titles = {
        "get": "Read, GB/s (CPU seconds a GB)",
        "put": "Write, GB/s (CPU seconds a GB)",
        "pull": "Brought here from another process, not yet copied out, GB/s (CPU seconds a GB)",
        "exists": "Which of these keys are there, 1,000 keys/s",
        "match": "Longest prefix that is there, 1,000 keys/s",
    }
    for op, title in titles.items():
        chosen = [row for row in rows if row.get("op") == op]
        if not chosen:
            continue
        shapes = sorted({(row["block_bytes"], row["blocks"]) for row in chosen})
        lines += [f"**{title}**", ""]
        lines.append("| | " + " | ".join(f"{size(b)} x {n}" for b, n in shapes) + " |")
        lines.append("|---|" + "---|" * len(shapes))
        for who in dict.fromkeys(row["who"] for row in chosen):
            cells = {(r["block_bytes"], r["blocks"]): r for r in chosen if r["who"] == who}
            shown = [_cell(cells[shape]) if shape in cells else "" for shape in shapes]
            lines.append(f"| {who} | " + " | ".join(shown) + " |")
        lines.append("")
    lines += ["| check | value | bound |", "|---|---|---|"]
    for check in found:
        low = check.get("at_least")
        bound = f"at least {low}" if low is not None else f"at most {check['at_most']}"
        value = (
            "not run: " + check["not_run"] if check["value"] is None else f"{check['value']:.2f}"
        )
        lines.append(f"| `{check['name']}` | {value} | {bound} |")
    for who, why in absent.items():
        lines += ["", f"Not there: {who} ({why})."]
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    if "keys_s" in row:
        return f"{row['keys_s'] / 1e3:,.0f}"
    return f"{row['gb_s']:.2f} ({row['cpu_s_per_gb']:.2f})"


def between_marks(document: str, name: str, text: str) -> str:
    """The document with what stands between its marks replaced. Raises ValueError without marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document has not one pair of marks for {name}")
    head, rest = document.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}{text}{end}{tail}"
