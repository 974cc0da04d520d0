"""The layout of diffusion_policy's ReplayBuffer: Zarr v2, one frame a chunk, episodes one after the other.

As there, an observation is stored once: the next one is the frame after it, and each episode ends in one frame more.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.episodes import Array
from benchmarks.files import sync_tree
from benchmarks.rivals.base import Batch, Mode, RivalBase
from benchmarks.specs import FieldSpec, WorkloadSpec, numpy_dtype
from benchmarks.workloads import TrajectoryData, concatenated_rows

CHUNK_BYTES = 64 << 10


class DiffusionPolicyZarr(RivalBase):
    """Blosc lz4 level 5 without shuffle, that code's default, read with zarr-python."""

    name = "diffusion-policy-zarr"
    modes = (Mode.UNCACHED,)
    requires = ("zarr", "numcodecs")

    def writer(self, root: Path, spec: WorkloadSpec) -> "FrameChunkWriter":
        """Makes the arrays, empty."""
        return FrameChunkWriter(root, spec)

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> "FrameChunkReader":
        """Opens the group."""
        del mode
        return FrameChunkReader(root, spec)


def _array_name(field: FieldSpec) -> str:
    """`curr_obs/states` and `next_obs/states` share `obs/states`."""
    side, _, key = field.path.partition("/")
    return f"obs/{key}" if side in ("curr_obs", "next_obs") else field.path


def _episodes(spec: WorkloadSpec) -> int:
    """Episodes of one environment in one trajectory."""
    return math.ceil(spec.num_steps / spec.episode_steps)


class FrameChunkWriter:
    """Appends to arrays."""

    def __init__(self, root: Path, spec: WorkloadSpec) -> None:
        import zarr
        from numcodecs import Blosc

        self._root, self._spec = root, spec
        group = zarr.open_group(root, mode="w", zarr_format=2)
        self._arrays: dict[str, Any] = {}
        for field in spec.fields:
            rows = 1 if field.is_image else max(1, CHUNK_BYTES // field.row_bytes)
            if (name := _array_name(field)) not in self._arrays:
                self._arrays[name] = group.create_array(
                    name,
                    shape=(0, *field.row_shape),
                    chunks=(rows, *field.row_shape),
                    dtype=numpy_dtype(field.dtype),
                    compressors=Blosc("lz4", 5, Blosc.NOSHUFFLE),
                )

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """Written when it returns, but not synced."""
        rows = concatenated_rows(batch)
        for field in self._spec.fields:
            name = _array_name(field)
            if not name.startswith("obs/"):
                self._arrays[name].append(rows[field.path])
            elif field.path.startswith("curr_obs/"):
                key = name.removeprefix("obs/")
                self._arrays[name].append(np.concatenate([self._frames(data, key) for data in batch]))

    def _frames(self, data: TrajectoryData, key: str) -> Array:
        """[B * (T + episodes), ...]: environment after environment, each episode with the frame that ends it."""
        steps, episode = self._spec.num_steps, self._spec.episode_steps
        following = data.fields[f"next_obs/{key}"]
        parts = []
        for start in range(0, steps, episode):
            stop = min(start + episode, steps)
            parts += [data.fields[f"curr_obs/{key}"][start:stop], following[stop - 1 : stop]]
        # [T + episodes, B, ...] -> [B, T + episodes, ...]
        frames = np.moveaxis(np.concatenate(parts), 1, 0)
        return frames.reshape(-1, *frames.shape[2:])

    def commit(self) -> None:
        """Syncs every chunk's file."""
        sync_tree(self._root)

    def close(self) -> None:
        """Nothing is held."""


class FrameChunkReader:
    """Random rows by orthogonal selection, each stored row read once."""

    def __init__(self, root: Path, spec: WorkloadSpec) -> None:
        import zarr

        group: Any = zarr.open_group(root, mode="r", zarr_format=2)
        self._arrays = {name: group[name] for name in {_array_name(field) for field in spec.fields}}
        self._spec, self._rng = spec, np.random.default_rng(spec.seed)

    def sample(self, num_rows: int) -> Batch:
        """A dict of arrays by path."""
        spec = self._spec
        rows = self._rng.integers(0, spec.num_samples, min(num_rows, spec.num_samples))
        trajectory, local = np.divmod(rows, spec.num_steps * spec.num_envs)
        step, env = np.divmod(local, spec.num_envs)
        frames_per_env = spec.num_steps + _episodes(spec)
        frames = (trajectory * spec.num_envs + env) * frames_per_env + step + step // spec.episode_steps
        batch: dict[str, Array] = {}
        for name, array in self._arrays.items():
            if name.startswith("obs/"):
                both = read_rows(array, np.concatenate([frames, frames + 1]))
                key = name.removeprefix("obs/")
                batch |= {f"curr_obs/{key}": both[: len(rows)], f"next_obs/{key}": both[len(rows) :]}
            else:
                batch[name] = read_rows(array, rows)
        return batch

    def close(self) -> None:
        """Nothing is held."""


def read_rows(array: Any, rows: Array) -> Array:
    """`array[rows]` of a zarr-python array, asking for each row once and in order."""
    unique, inverse = np.unique(rows, return_inverse=True)
    found: Array = array.oindex[unique][inverse]
    return found
