"""Files as memory, without a descriptor each: Python's own maps keep one open, of which a process may have few (often 1,024)."""

import ctypes
import mmap
import os
import weakref
from typing import Any, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""uint8[n], not to be written to."""


class _Mapping:
    """Memory at an address, for numpy to refer to."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}


def map_file(descriptor: int, size: int) -> Bytes:
    """A file's bytes, uint8[size], until no array refers to them; the descriptor may be closed. `OSError` if it can't be mapped."""
    if not size:
        return np.zeros(0, np.uint8)
    if _mmap is None:
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
    address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapping = _Mapping(address, size)
    weakref.finalize(mapping, _munmap, address, size).atexit = False
    return np.asarray(mapping)


def _find_functions() -> tuple[Any, Any]:
    """C's mmap and munmap; None where there are none."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        find, drop = library.mmap, library.munmap
    except (OSError, AttributeError, TypeError):
        return None, None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    find.argtypes, find.restype = [pointer, size, number, number, number, ctypes.c_long], pointer
    drop.argtypes = [pointer, size]
    return find, drop


_mmap, _munmap = _find_functions()
_MAP_FAILED = ctypes.c_void_p(-1).value
