"""Who maps a segment: the memory of a dead owner, and slots to write to, are not free before they let go."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from kvpool.memory.segment import SEGMENT_NAME


class Mapper(NamedTuple):
    """A process, and how much of the segments it maps."""

    pid: int
    command: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.command} (process {self.pid}, {self.nbytes >> 20} MiB)"


def find_mappers(inodes: Collection[int], root: Path = Path("/")) -> list[Mapper]:
    """The processes that map these segments, as far as this user may look at them. Reads all of /proc."""
    if not inodes:
        return []
    found = []
    for folder in sorted(root.glob("proc/[0-9]*"), key=lambda each: int(each.name)):
        try:
            text = (folder / "maps").read_text(errors="replace")
            nbytes = _mapped_bytes(text, inodes)
            if nbytes:
                command = (folder / "comm").read_text(errors="replace").strip()
                found.append(Mapper(int(folder.name), command, nbytes))
        except OSError:
            pass  # it has ended, or is another user's
    return found


def may_touch(pidfd: int, inode: int, root: Path = Path("/")) -> bool:
    """Whether a process maps a segment or has its descriptor, or is not for this user to look at.

    False proves that it never will again, unless it is given the segment again. Takes milliseconds.
    """
    try:
        info = (root / f"proc/self/fdinfo/{pidfd}").read_text()
        # The number that /proc itself has for the process: -1 if it is dead, 0 if it is in a foreign namespace.
        pid = int(info.rpartition("Pid:")[2].split()[0])
        folder = root / f"proc/{pid}"
        # Descriptors first: without one there is no new mapping.
        for each in (folder / "fd").iterdir():
            try:
                if each.stat().st_ino == inode:
                    return True
            except FileNotFoundError:
                pass  # closed since
        return _mapped_bytes((folder / "maps").read_text(errors="replace"), {inode}) > 0
    except (OSError, ValueError, IndexError):
        return True


def _mapped_bytes(maps: str, inodes: Collection[int]) -> int:
    sizes: dict[int, int] = {}  # a segment that is mapped twice is not more memory
    for line in maps.splitlines():
        if SEGMENT_NAME not in line:
            continue
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        if int(inode) in inodes:
            start, _, end = addresses.partition("-")
            size = int(end, 16) - int(start, 16)
            sizes[int(inode)] = max(size, sizes.get(int(inode), 0))
    return sum(sizes.values())
