"""Files and folders on stable storage."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to stable storage: a new or renamed file is there after a crash. Raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, in as many turns as the disk takes. Raises `OSError`: then some of it may be there."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def shift_files(path: Path, files_max: int) -> None:
    """Rename NAME to NAME.1, NAME.1 to NAME.2 and so on, over the last of so many files. Raises `OSError`."""
    for number in range(files_max - 1, 0, -1):
        newer = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if newer.exists():
            newer.replace(path.with_name(f"{path.name}.{number}"))
