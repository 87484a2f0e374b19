"""Oracles that know nothing of the rules: what bytes a block must have, and who uses which memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from xxhash import xxh3_128_digest

from kvpool.types import CHECKSUM_BYTES

CELL = 64  # bytes; all strides of memory are multiples


class Violation(AssertionError):
    """A promise of the pool is broken."""


class Contents:
    """The bytes of every block: a function of its name, so that nobody has to remember what was put."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int, bytes, int, int], tuple[bytes, bytes]] = {}

    def block(
        self, namespace: bytes, epoch: int, key: bytes, part: int, nbytes: int
    ) -> tuple[bytes, bytes]:
        """(bytes, checksum). namespace: the digest of its fields."""
        name = (namespace, epoch, key, part, nbytes)
        found = self._known.get(name)
        if found is None:
            seed = namespace + key + epoch.to_bytes(4, "little") + part.to_bytes(4, "little")
            data = b"".join(
                xxh3_128_digest(seed, number) for number in range(-(-nbytes // CHECKSUM_BYTES))
            )[:nbytes]
            found = self._known[name] = (data, xxh3_128_digest(data))
        return found

    def recognise(self, data: bytes) -> str:
        """Whose bytes these are."""
        for (_, epoch, key, part, _), (known, _) in self._known.items():
            if known == data:
                return f"those of block {key[:4].hex()}, part {part}, epoch {epoch}"
        return "those of no block"


@dataclass(eq=False, slots=True)
class Use:
    """Somebody writes or reads these bytes, until it is ended or its time is over."""

    what: str
    writes: bool
    cells: list[int]
    until: float = float("inf")
    ended: bool = field(default=False)


class Memory:
    """The segment of one life of a node, or a disk, and who may touch what of it.

    Slots of different lengths lie over each other, so uses are kept by cell; all lengths are multiples.
    """

    def __init__(self, size: int, cell: int = CELL) -> None:
        self.data = bytearray(size)
        self._cell = cell
        self._uses: list[list[Use]] = [[] for _ in range(size // cell)]

    def use(
        self,
        what: str,
        stride: int,
        rows: list[int],
        now: float,
        *,
        writes: bool,
        until: float = float("inf"),
    ) -> Use:
        """Begin to use slots. Raises `Violation` if somebody else writes there, or reads what we write."""
        per_slot = stride // self._cell
        cells = [row * per_slot + n for row in rows for n in range(per_slot)]
        use = Use(what, writes, cells, until)
        for cell in cells:
            held = self._uses[cell]
            if held:
                held[:] = [other for other in held if not other.ended and other.until > now]
                for other in held:
                    if writes or other.writes:
                        raise Violation(
                            f"the memory at {cell * self._cell} is used by {other.what} "
                            f"({'writes' if other.writes else 'reads'}), and given to {what} "
                            f"({'writes' if writes else 'reads'})"
                        )
            held.append(use)
        return use

    def end(self, use: Use) -> None:
        """Idempotent."""
        use.ended = True

    def write(self, at: int, data: bytes) -> None:
        self.data[at : at + len(data)] = data

    def read(self, at: int, nbytes: int) -> bytes:
        return bytes(self.data[at : at + nbytes])
