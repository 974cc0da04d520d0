"""TorchRL's `ReplayBuffer` over its two tensor storages: memory maps on disk, and plain RAM."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import sync_tree
from benchmarks.rivals.base import Batch, Mode, RivalBase
from benchmarks.specs import WorkloadSpec
from benchmarks.workloads import TrajectoryData, as_tensor, concatenated_rows


class TorchRLMemmap(RivalBase):
    """`LazyMemmapStorage`: uncompressed files, mapped."""

    name = "torchrl-memmap"
    modes = (Mode.UNCACHED,)
    requires = ("torchrl", "tensordict")

    def writer(self, root: Path, spec: WorkloadSpec) -> "TorchRLWriter":
        """The storage lies where `dumps` looks for it, so that durable means one copy only."""
        return TorchRLWriter(root, _buffer(spec, scratch=root / "storage"))

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "TorchRLReader":
        """Maps the files."""
        del mode
        buffer = _buffer(spec, scratch=root / "storage")
        buffer.loads(root)
        return TorchRLReader(buffer)


class TorchRLTensor(RivalBase):
    """`LazyTensorStorage`: everything in RAM; durable means dumped."""

    name = "torchrl-tensor"
    modes = (Mode.CACHED,)
    requires = ("torchrl", "tensordict")

    def writer(self, root: Path, spec: WorkloadSpec) -> "TorchRLWriter":
        """Adds to RAM."""
        return TorchRLWriter(root, _buffer(spec, scratch=None))

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "TorchRLReader":
        """Reads the dump into RAM."""
        del mode
        buffer = _buffer(spec, scratch=None)
        buffer.loads(root)
        return TorchRLReader(buffer)


def _buffer(spec: WorkloadSpec, *, scratch: Path | None) -> Any:
    import torchrl
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

    torchrl.logger.setLevel("ERROR")
    capacity = spec.num_samples
    storage = LazyTensorStorage(capacity) if scratch is None else LazyMemmapStorage(capacity, scratch_dir=scratch)
    return ReplayBuffer(storage=storage)


class TorchRLWriter:
    """Extends by flat rows."""

    def __init__(self, root: Path, buffer: Any) -> None:
        self._root, self._buffer = root, buffer

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """One `extend` for all."""
        from tensordict import TensorDict

        rows = concatenated_rows(batch)
        nested = {tuple(path.split("/")): as_tensor(path, values) for path, values in rows.items()}
        num_rows = len(rows["rewards"])
        self._buffer.extend(TensorDict(nested, batch_size=[num_rows]))

    def commit(self) -> None:
        """`dumps`, then syncs."""
        self._buffer.dumps(self._root)
        sync_tree(self._root)

    def close(self) -> None:
        """Frees the storage."""
        self._buffer.empty()


class TorchRLReader:
    """A loaded buffer."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def sample(self, num_rows: int) -> Batch:
        """A TensorDict."""
        return self._buffer.sample(min(num_rows, len(self._buffer)))

    def save_checkpoint(self, path: Path) -> None:
        """`dumps`, then syncs."""
        self._buffer.dumps(path)
        sync_tree(path)

    def load_checkpoint(self, path: Path) -> None:
        """`loads`: copies into the storage at hand."""
        self._buffer.loads(path)

    def close(self) -> None:
        """Drops the storage."""
        del self._buffer
