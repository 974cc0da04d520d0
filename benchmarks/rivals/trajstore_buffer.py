"""Ourselves: the drop-in buffer with its cache, and the engine's sampler without."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.base import Batch, Mode, Reader, RivalBase
from benchmarks.specs import WorkloadSpec
from benchmarks.workloads import TrajectoryData, nested_tensors

STORE_FOLDER = "store"


class TrajStore(RivalBase):
    """The settings of the reference's tutorial: saved as it is added, a cache, a window."""

    name = "trajstore"
    modes = (Mode.CACHED, Mode.UNCACHED)

    def unavailable(self) -> str | None:
        """Names what is missing, or None."""
        if importlib.util.find_spec("trajstore") is None:
            return "trajstore is not installed"
        import trajstore

        missing = [name for name in ("TrajectoryReplayBuffer", "Trajectory", "open") if not hasattr(trajstore, name)]
        return f"trajstore has no {', '.join(missing)}" if missing else None

    def writer(self, root: Path, spec: WorkloadSpec) -> "TrajStoreWriter":
        """Adds with the workload's cache, as a training run does."""
        return TrajStoreWriter(root, spec)

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> Reader:
        """Cached: a buffer that goes on with the store, as a resumed run does. Uncached: a sampler without cache."""
        if mode is Mode.CACHED:
            return BufferReader(_buffer(root / STORE_FOLDER, spec))
        import trajstore

        store = trajstore.open(str(root / STORE_FOLDER), mode="r")
        return SamplerReader(store, store.sampler(window=spec.window, seed=spec.seed, cache_size=0))


def _buffer(folder: Path, spec: WorkloadSpec) -> Any:
    import trajstore

    return trajstore.TrajectoryReplayBuffer(
        seed=spec.seed,
        enable_cache=True,
        cache_size=spec.cache,
        sample_window_size=spec.window,
        auto_save=True,
        auto_save_path=str(folder),
        trajectory_format="zarr",
    )


class TrajStoreWriter:
    """Adds to a buffer."""

    def __init__(self, root: Path, spec: WorkloadSpec) -> None:
        import trajstore

        self._trajectory_type, self._steps = trajstore.Trajectory, spec.num_steps
        self._buffer = _buffer(root / STORE_FOLDER, spec)

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """Returns when the trajectories are copied and queued."""
        self._buffer.add_trajectories([self._trajectory(data) for data in batch])

    def _trajectory(self, data: TrajectoryData) -> Any:
        return self._trajectory_type(max_episode_length=self._steps, model_weights_id=data.weights_id, **nested_tensors(data))

    def commit(self) -> None:
        """Flushes."""
        self._buffer.flush()

    def close(self) -> None:
        """Stops the threads, frees the cache."""
        self._buffer.close()
        self._buffer.clear_cache()


class BufferReader:
    """A loaded buffer."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def sample(self, num_rows: int) -> Batch:
        """A nested dict of tensors."""
        return self._buffer.sample(num_chunks=num_rows)

    def save_checkpoint(self, path: Path) -> None:
        """A snapshot by links."""
        self._buffer.save_checkpoint(str(path))

    def load_checkpoint(self, path: Path) -> None:
        """Takes the snapshot over and fills the cache."""
        self._buffer.load_checkpoint(load_path=str(path))

    def close(self) -> None:
        """Stops the threads, frees the cache."""
        self._buffer.close()
        self._buffer.clear_cache()


class SamplerReader:
    """A store opened to read."""

    def __init__(self, store: Any, sampler: Any) -> None:
        self._store, self._sampler = store, sampler

    def sample(self, num_rows: int) -> Batch:
        """A nested dict of tensors."""
        return self._sampler.sample(num_rows)

    def close(self) -> None:
        """Lets go of the maps."""
        self._store.close()
        del self._sampler, self._store
