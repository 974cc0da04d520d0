"""zarr-python and TensorStore on the arrays of a trajstore store: the same bytes, read by others."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.episodes import Array
from benchmarks.rivals.base import Batch, Mode, RivalBase, Writer
from benchmarks.rivals.store_rows import ArrayRead, StoreRows
from benchmarks.rivals.trajstore_buffer import STORE_FOLDER
from benchmarks.specs import WorkloadSpec

ReadAll = Callable[[Sequence[ArrayRead]], list[Array]]
"""Reads -> the rows of each, [len(rows), ...]."""


class StoreReaderRival(RivalBase):
    """Reads what the rival `trajstore` wrote; writes nothing."""

    modes = (Mode.UNCACHED,)
    store_of = "trajstore"

    def writer(self, root: Path, spec: WorkloadSpec) -> Writer:
        """Refused."""
        raise NotImplementedError(f"{self.name} reads the store that trajstore writes")


class ZarrPython(StoreReaderRival):
    """zarr-python, orthogonal selections, its defaults."""

    name = "zarr-python"
    requires = ("zarr",)

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "StoreReader":
        """Opens every array."""
        del mode
        import zarr

        rows = StoreRows(root / STORE_FOLDER)
        arrays: dict[Path, Any] = {path: zarr.open_array(path, mode="r") for path in rows.arrays()}
        return StoreReader(rows, lambda reads: [arrays[read.array].oindex[read.rows] for read in reads], seed=spec.seed)


class TensorStore(StoreReaderRival):
    """TensorStore, orthogonal selections, all reads of a batch in flight at once."""

    name = "tensorstore"
    requires = ("tensorstore", "zarr")

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "StoreReader":
        """Opens every array; decoded chunks are not cached."""
        del mode
        import tensorstore as ts

        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        rows = StoreRows(root / STORE_FOLDER)
        opened = {path: ts.open(_spec_of(path), open=True, read=True, context=context) for path in rows.arrays()}
        arrays = {path: future.result() for path, future in opened.items()}

        def read_all(reads: Sequence[ArrayRead]) -> list[Array]:
            futures = [arrays[read.array].oindex[read.rows].read() for read in reads]
            return [future.result() for future in futures]

        return StoreReader(rows, read_all, seed=spec.seed)


def _spec_of(array: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{array}/"}}


class StoreReader:
    """Draws samples, plans the reads, puts the rows in their places."""

    def __init__(self, rows: StoreRows, read_all: ReadAll, *, seed: int) -> None:
        self._rows, self._read_all = rows, read_all
        self._shapes = rows.row_shapes()
        self._rng = np.random.default_rng(seed)

    def sample(self, num_rows: int) -> Batch:
        """A dict of arrays by path."""
        num_samples = self._rows.num_samples
        return self.gather(self._rng.integers(0, num_samples, min(num_rows, num_samples)))

    def gather(self, samples: Array) -> dict[str, Array]:
        """The transitions `samples`, int64[n], as arrays [n, ...] by path."""
        batch: dict[str, Array] = {path: np.empty((len(samples), *shape), dtype) for path, (shape, dtype) in self._shapes.items()}
        reads = self._rows.plan(samples)
        for read, values in zip(reads, self._read_all(reads), strict=True):
            for path, places, rows in read.targets:
                batch[path][places] = values[rows]
        return batch

    def close(self) -> None:
        """Drops the arrays."""
        self._read_all = lambda reads: []
