"""cpprb 11: a replay buffer in C++, everything in RAM. State only: it is what such users pick for speed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import sync_tree
from benchmarks.rivals.base import Batch, Mode, RivalBase
from benchmarks.specs import WorkloadSpec, numpy_dtype
from benchmarks.workloads import TrajectoryData, concatenated_rows

DUMP = "transitions.npz"


class CppRB(RivalBase):
    """`cpprb.ReplayBuffer`; durable means `save_transitions`."""

    name = "cpprb"
    modes = (Mode.CACHED,)
    requires = ("cpprb",)

    def unsuited(self, spec: WorkloadSpec) -> str | None:
        """Images are left to the others."""
        return "state only" if spec.cameras else None

    def writer(self, root: Path, spec: WorkloadSpec) -> "CppRBWriter":
        """Adds to RAM."""
        return CppRBWriter(root, _buffer(spec))

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "CppRBReader":
        """Reads the dump into RAM."""
        del mode
        buffer = _buffer(spec)
        buffer.load_transitions(str(root / DUMP))
        return CppRBReader(buffer, spec)


def _buffer(spec: WorkloadSpec) -> Any:
    from cpprb import ReplayBuffer

    fields = {field.path: {"shape": field.row_shape, "dtype": numpy_dtype(field.dtype)} for field in spec.fields}
    return ReplayBuffer(spec.num_samples, fields)


class CppRBWriter:
    """Adds flat rows."""

    def __init__(self, root: Path, buffer: Any) -> None:
        self._root, self._buffer = root, buffer

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """One `add` for all."""
        self._buffer.add(**concatenated_rows(batch))

    def commit(self) -> None:
        """Writes the npz and syncs it."""
        self._buffer.save_transitions(str(self._root / DUMP))
        sync_tree(self._root)

    def close(self) -> None:
        """Frees the rows."""
        self._buffer.clear()


class CppRBReader:
    """A loaded buffer."""

    def __init__(self, buffer: Any, spec: WorkloadSpec) -> None:
        self._buffer, self._num_samples = buffer, spec.num_samples

    def sample(self, num_rows: int) -> Batch:
        """A dict of arrays."""
        return self._buffer.sample(min(num_rows, self._num_samples))

    def save_checkpoint(self, path: Path) -> None:
        """Writes the npz and syncs it."""
        self._buffer.save_transitions(str(path / DUMP))
        sync_tree(path)

    def load_checkpoint(self, path: Path) -> None:
        """Replaces the rows."""
        self._buffer.clear()
        self._buffer.load_transitions(str(path / DUMP))

    def close(self) -> None:
        """Frees the rows."""
        self._buffer.clear()
