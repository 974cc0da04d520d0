"""No rivals but floors: what a batch costs when nothing is done but moving its bytes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.episodes import Array
from benchmarks.files import sync_tree
from benchmarks.rivals.base import Batch, Mode, RivalBase
from benchmarks.specs import WorkloadSpec
from benchmarks.workloads import TrajectoryData, concatenated_rows


class TakeFloor(RivalBase):
    """One `np.take` a field out of RAM, into fresh memory as a user gets it."""

    name = "floor-take"
    modes = (Mode.CACHED,)
    reuse = False

    def writer(self, root: Path, spec: WorkloadSpec) -> "RowFiles":
        """Keeps one npy file a field and call of add; its speed is not of interest."""
        del spec
        return RowFiles(root)

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "TakeReader":
        """Reads all into RAM."""
        del mode
        return TakeReader(_load(root, spec), seed=spec.seed, reuse=self.reuse)


class TakeIntoFloor(TakeFloor):
    """The same into memory that is used again: what is left when page faults are not paid."""

    name = "floor-take-into"
    reuse = True


class MemcpyFloor(TakeFloor):
    """One copy of as many bytes in one piece, into memory that is used again: the speed of RAM."""

    name = "floor-memcpy"

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "CopyReader":  # type: ignore[override]
        """Reads nothing."""
        del root, mode
        return CopyReader(spec)


class RowFiles:
    """Writes flat rows as npy files."""

    def __init__(self, root: Path) -> None:
        self._root, self._num_parts = root, 0

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """One file a field."""
        for path, values in concatenated_rows(batch).items():
            np.save(self._root / f"{path.replace('/', '.')}.{self._num_parts:06d}.npy", values)
        self._num_parts += 1

    def commit(self) -> None:
        """Syncs the files."""
        sync_tree(self._root)

    def close(self) -> None:
        """Nothing is held."""


def _load(root: Path, spec: WorkloadSpec) -> list[Array]:
    """One array [rows, ...] a field."""
    names = [field.path.replace("/", ".") for field in spec.fields]
    return [np.concatenate([np.load(part) for part in sorted(root.glob(f"{name}.[0-9]*.npy"))]) for name in names]


class TakeReader:
    """Draws rows and takes them."""

    def __init__(self, fields: list[Array], *, seed: int, reuse: bool) -> None:
        self._fields, self._reuse = fields, reuse
        self._rng = np.random.default_rng(seed)
        self._out: dict[int, list[Array]] = {}

    def sample(self, num_rows: int) -> Batch:
        """A list of arrays, one a field."""
        available = len(self._fields[0])
        num_rows = min(num_rows, available)
        rows = self._rng.integers(0, available, num_rows)
        if not self._reuse:
            return [np.take(values, rows, axis=0) for values in self._fields]
        if num_rows not in self._out:
            self._out[num_rows] = [np.empty((num_rows, *values.shape[1:]), values.dtype) for values in self._fields]
        outs = self._out[num_rows]
        return [np.take(values, rows, axis=0, out=out, mode="clip") for values, out in zip(self._fields, outs, strict=True)]

    def close(self) -> None:
        """Frees the arrays."""
        self._fields, self._out = [], {}


class CopyReader:
    """Copies a batch's bytes."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        self._blocks: dict[int, tuple[Array, Array]] = {}

    def sample(self, num_rows: int) -> Batch:
        """The copied bytes."""
        num_bytes = self._spec.batch_bytes(num_rows)
        if num_bytes not in self._blocks:
            self._blocks[num_bytes] = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
        source, target = self._blocks[num_bytes]
        np.copyto(target, source)
        return target

    def close(self) -> None:
        """Frees the bytes."""
        self._blocks = {}
