"""HDF5 through h5py: one dataset a field, as robomimic keeps its demonstrations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.episodes import Array
from benchmarks.files import sync_tree
from benchmarks.rivals.base import Batch, Mode, RivalBase
from benchmarks.specs import WorkloadSpec, numpy_dtype
from benchmarks.workloads import TrajectoryData, concatenated_rows

FILE = "buffer.hdf5"
CHUNK_BYTES = 64 << 10
LARGE_ROW_BYTES = 4096


class HDF5(RivalBase):
    """Uncompressed, robomimic's default."""

    name = "h5py"
    modes = (Mode.UNCACHED,)
    requires = ("h5py",)
    compression: str | None = None

    def writer(self, root: Path, spec: WorkloadSpec) -> "HDF5Writer":
        """Makes the datasets, empty."""
        return HDF5Writer(root, spec, compression=self.compression)

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "HDF5Reader":
        """Opens the file."""
        del mode
        return HDF5Reader(root, spec)


class HDF5Gzip(HDF5):
    """gzip, the compression that every HDF5 library has."""

    name = "h5py-gzip"
    compression = "gzip"


class HDF5Writer:
    """Appends to resizable datasets; chunks of one frame, or of about 64 KiB of small rows."""

    def __init__(self, root: Path, spec: WorkloadSpec, *, compression: str | None) -> None:
        import h5py

        self._root = root
        self._file = h5py.File(root / FILE, "w")
        self._num_rows = 0
        for field in spec.fields:
            rows = max(1, CHUNK_BYTES // field.row_bytes)
            self._file.create_dataset(
                field.path,
                shape=(0, *field.row_shape),
                maxshape=(None, *field.row_shape),
                chunks=(rows, *field.row_shape),
                dtype=numpy_dtype(field.dtype),
                compression=compression,
            )

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """In the library's cache or the file when it returns."""
        rows = concatenated_rows(batch)
        start = self._num_rows
        self._num_rows = start + len(rows["rewards"])
        for path, values in rows.items():
            dataset = self._file[path]
            dataset.resize(self._num_rows, axis=0)
            dataset[start : self._num_rows] = values

    def commit(self) -> None:
        """Flushes, then syncs the file."""
        self._file.flush()
        sync_tree(self._root)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class HDF5Reader:
    """Large rows one by one into the batch, which is faster than a selection; small ones by one selection in order."""

    def __init__(self, root: Path, spec: WorkloadSpec) -> None:
        import h5py

        self._file = h5py.File(root / FILE, "r")
        self._datasets: dict[str, Any] = {field.path: self._file[field.path] for field in spec.fields}
        self._num_samples, self._rng = spec.num_samples, np.random.default_rng(spec.seed)

    def sample(self, num_rows: int) -> Batch:
        """A dict of arrays by path."""
        rows = self._rng.integers(0, self._num_samples, min(num_rows, self._num_samples))
        return {path: _read_rows(dataset, rows) for path, dataset in self._datasets.items()}

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _read_rows(dataset: Any, rows: Array) -> Array:
    row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
    if row_bytes < LARGE_ROW_BYTES:
        unique, inverse = np.unique(rows, return_inverse=True)
        small: Array = dataset[unique][inverse]
        return small
    batch: Array = np.empty((len(rows), *dataset.shape[1:]), dataset.dtype)
    for place, row in enumerate(rows):
        dataset.read_direct(batch, np.s_[int(row)], np.s_[place])
    return batch
