"""RLinf 0.3.0's own replay buffer, the reference: one `pt` file a trajectory, a cache of flattened trajectories."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import sync_tree
from benchmarks.rivals.base import Batch, Mode, RivalBase
from benchmarks.specs import WorkloadSpec
from benchmarks.workloads import TrajectoryData, nested_tensors


class RLinf(RivalBase):
    """`TrajectoryReplayBuffer` with `auto_save`; uncached it reads whole files for every batch."""

    name = "rlinf"
    modes = (Mode.CACHED, Mode.UNCACHED)
    requires = ("rlinf", "omegaconf")

    def writer(self, root: Path, spec: WorkloadSpec) -> "RLinfWriter":
        """Adds with the workload's cache, as a training run does."""
        return RLinfWriter(root, spec)

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "RLinfReader":
        """Loads the folder; in cached mode that decodes the cache's trajectories."""
        buffer = _buffer(root, spec, cached=mode is Mode.CACHED)
        buffer.load_checkpoint(str(root))
        return RLinfReader(buffer)


def _buffer(root: Path, spec: WorkloadSpec, *, cached: bool) -> Any:
    from rlinf.data import replay_buffer

    # Its own get_logger wants a Ray worker.
    quiet = logging.getLogger("benchmarks.rlinf")
    quiet.setLevel(logging.ERROR)
    replay_buffer.get_logger = lambda: quiet
    return replay_buffer.TrajectoryReplayBuffer(
        seed=spec.seed,
        enable_cache=cached,
        cache_size=spec.cache,
        sample_window_size=spec.window,
        auto_save=True,
        auto_save_path=str(root),
    )


class RLinfWriter:
    """Its threads write the files; it syncs none, so that is done here."""

    def __init__(self, root: Path, spec: WorkloadSpec) -> None:
        from rlinf.data.embodied_io_struct import Trajectory

        self._root, self._trajectory_type, self._steps = root, Trajectory, spec.num_steps
        self._buffer = _buffer(root, spec, cached=True)

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """Returns before the files are written."""
        self._buffer.add_trajectories([self._trajectory(data) for data in batch])

    def _trajectory(self, data: TrajectoryData) -> Any:
        return self._trajectory_type(max_episode_length=self._steps, model_weights_id=data.weights_id, **nested_tensors(data))

    def commit(self) -> None:
        """Waits for the threads, then syncs."""
        self._buffer.close(wait=True)
        sync_tree(self._root)

    def close(self) -> None:
        """Frees the cache."""
        self._buffer.clear_cache()


class RLinfReader:
    """A loaded buffer."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def sample(self, num_rows: int) -> Batch:
        """A dict of tensors."""
        return self._buffer.sample(num_chunks=num_rows)

    def save_checkpoint(self, path: Path) -> None:
        """Copies the files of the last sampled window: it must have sampled before."""
        self._buffer.sample(num_chunks=1)
        self._buffer.save_checkpoint(str(path))
        sync_tree(path)

    def load_checkpoint(self, path: Path) -> None:
        """Reads the index and the newest trajectories."""
        self._buffer.load_checkpoint(str(path))

    def close(self) -> None:
        """Stops the threads, frees the cache."""
        self._buffer.clear_cache()
