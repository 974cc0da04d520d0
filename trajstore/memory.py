"""Memory for batches, used again once a batch is no longer referred to: fresh pages cost as much as the copy into them."""

import weakref
from collections import deque
from typing import Any, TypeAlias

import numpy as np

Block: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

MAX_IDLE = 2
"""Blocks kept for the next batch."""
_PAGE_BYTES = 4096

_idle: deque[Block] = deque(maxlen=MAX_IDLE)  # its methods are atomic, so there is no lock to be held across a fork


def block(nbytes: int) -> Block:
    """Uninitialised uint8[nbytes or more], which goes back to the pool when no array or tensor refers to it. Thread-safe."""
    owner = _idle_block(-(-nbytes // _PAGE_BYTES) * _PAGE_BYTES)
    lent = np.frombuffer(owner.data, np.uint8)  # numpy takes this for the base of all views of it
    weakref.finalize(lent, _idle.append, owner).atexit = False
    return lent


def _idle_block(wanted: int) -> Block:
    for _ in range(len(_idle)):
        try:
            known = _idle.popleft()
        except IndexError:  # another thread took it
            break
        if wanted <= known.nbytes <= 2 * wanted:
            return known
        _idle.append(known)
    return np.empty(wanted, np.uint8)


def release() -> None:
    """Frees what is kept for the next batch."""
    _idle.clear()
