"""Large blocks of memory, used again once nothing refers to them: fresh pages cost as much as the copy into them, or more."""

import weakref
from collections import deque
from typing import Any, TypeAlias

import numpy as np
import torch

Block: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_PAGE_BYTES = 4096


class BlockPool:
    """Blocks that were lent and came back, and wait to be lent again. Thread-safe.

    Args:
        max_blocks, max_bytes: How much waits at most; what comes back beyond it is freed.
    """

    def __init__(self, *, max_blocks: int, max_bytes: int) -> None:
        self.max_blocks = max_blocks
        self.max_bytes = max_bytes
        self.idle: deque[Block] = deque()  # its methods are atomic, so there is no lock to be held across a fork

    def lend(self, nbytes: int) -> Block:
        """Uninitialised uint8[nbytes or more], which comes back when no array or tensor refers to it."""
        owner = self._idle_block(-(-nbytes // _PAGE_BYTES) * _PAGE_BYTES)
        lent = np.frombuffer(owner.data, np.uint8)  # numpy takes this for the base of all views of it
        weakref.finalize(lent, self._take_back, owner).atexit = False
        return lent

    def release(self) -> None:
        """Frees what waits."""
        self.idle.clear()

    def _take_back(self, owner: Block) -> None:
        waiting = [block.nbytes for block in self.idle.copy()]
        if len(waiting) < self.max_blocks and sum(waiting) + owner.nbytes <= self.max_bytes:
            self.idle.append(owner)

    def _idle_block(self, wanted: int) -> Block:
        for _ in range(len(self.idle)):
            try:
                known = self.idle.popleft()
            except IndexError:  # another thread took it
                break
            if wanted <= known.nbytes <= 2 * wanted:
                return known
            self.idle.append(known)
        # by torch, which does not ask for huge pages as numpy does: where those have to be made first, they cost three times as much
        block: Block = torch.empty(wanted, dtype=torch.uint8).numpy()
        return block


BATCHES = BlockPool(max_blocks=2, max_bytes=1 << 62)
"""For batches: two, so that one can be used while the next is gathered."""
TRAJECTORIES = BlockPool(max_blocks=64, max_bytes=256 * 1024 * 1024)
"""For the copies of trajectories that wait to be written."""
