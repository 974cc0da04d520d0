"""The file system of a measurement: sizes, syncing, and dropping a folder from the page cache."""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class DropOutcome:
    """How the page cache was dropped.

    Attributes:
        method: `"drop_caches"`, `"posix_fadvise"`, or `"none"` where the system offers neither.
        resident_fraction: Share of the folder's pages still in RAM afterwards; None where that can't be told.
    """

    method: str
    resident_fraction: float | None


def regular_files(root: Path) -> Iterator[Path]:
    """Every file below `root`."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path


def tree_bytes(root: Path) -> int:
    """Bytes of all files below `root`; several links to one file count once."""
    sizes = {(status.st_dev, status.st_ino): status.st_size for status in map(os.stat, regular_files(root))}
    return sum(sizes.values())


def sync_tree(root: Path) -> None:
    """Fsync of every file and folder below `root`: what a program does that wants its files to survive a power cut."""
    for folder, _, names in os.walk(root):
        for path in (*(Path(folder, name) for name in names), Path(folder)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def drop_page_cache(root: Path, *, whole_system: bool = False) -> DropOutcome:
    """Makes the next read of the files below `root` come from the disk, as far as the system lets us.

    Args:
        root: A folder whose files are closed and unmapped; they are synced first.
        whole_system: Drop every page of the machine, which slows down all who share it; only root may. Else, and where
            that is refused, only the pages of these files.
    """
    sync_tree(root)
    method = "posix_fadvise" if hasattr(os, "posix_fadvise") else "none"
    if whole_system:
        with contextlib.suppress(OSError):
            DROP_CACHES.write_text("1")
            method = "drop_caches"
    if method == "posix_fadvise":
        for path in regular_files(root):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return DropOutcome(method, resident_fraction(root))


def resident_fraction(root: Path, *, max_files: int = 200) -> float | None:
    """Share of the pages of the largest files below `root` that are in RAM; None where the C library can't tell."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError):
        return None
    files = sorted(regular_files(root), key=lambda path: path.stat().st_size, reverse=True)[:max_files]
    counts = [_resident_pages(path, mincore) for path in files if path.stat().st_size]
    total = sum(pages for _, pages in counts)
    return sum(resident for resident, _ in counts) / total if total else 0.0


def _resident_pages(path: Path, mincore: "ctypes._NamedFuncPointer") -> tuple[int, int]:
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        view = ctypes.c_char.from_buffer(mapped)
        flags = (ctypes.c_ubyte * pages)()
        failed = mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), flags)
        del view
    return (0 if failed else sum(flag & 1 for flag in flags)), pages
