"""The data of a workload, made piece by piece: episodes chained into trajectories [T, B, ...]."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.episodes import Array, EpisodeSource
from benchmarks.specs import FLAG_PATHS, FieldSpec, WorkloadSpec

WEIGHTS_UUID = "6f1d0c52-8f0e-5c43-9a55-3a4d6c1b2e70"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryData:
    """One trajectory as plain arrays.

    Attributes:
        number: Its place in the workload.
        weights_id: `{uuid}_{update count}`, as RLinf 0.3.0 names policy weights.
        fields: path -> [T + extra rows, B, ...]; bfloat16 as uint16 bits.
    """

    number: int
    weights_id: str
    fields: dict[str, Array]


def trajectories(spec: WorkloadSpec, source: EpisodeSource) -> Iterator[list[TrajectoryData]]:
    """Yields lists of `spec.add_size` trajectories; only one list is in memory at a time."""
    for start in range(0, spec.num_trajectories, spec.add_size):
        count = min(spec.add_size, spec.num_trajectories - start)
        yield _make(spec, source, start=start, count=count)


def _make(spec: WorkloadSpec, source: EpisodeSource, *, start: int, count: int) -> list[TrajectoryData]:
    chained = math.ceil(spec.num_steps / min(spec.episode_steps, spec.num_steps))
    slots = spec.num_envs * chained
    episodes = source.episodes(range(start * slots, (start + count) * slots))
    columns = {field.path: _columns(spec, field, episodes[field.path], count=count) for field in spec.fields}
    return [
        TrajectoryData(
            number=start + position,
            weights_id=f"{WEIGHTS_UUID}_{start + position}",
            fields={path: values[position] for path, values in columns.items()},
        )
        for position in range(count)
    ]


def _columns(spec: WorkloadSpec, field: FieldSpec, values: Array, *, count: int) -> Array:
    """[slots, episode_steps, ...] -> [count, T + extra rows, B, ...]."""
    # [count * B * chained, E, ...] -> [count, B, chained * E, ...] -> [count, B, T, ...] -> [count, T, B, ...]
    episode_steps = min(spec.episode_steps, spec.num_steps)
    values = values[:, :episode_steps]
    steps = values.reshape(count, spec.num_envs, -1, *values.shape[2:])[:, :, : spec.num_steps]
    rows = np.moveaxis(steps, 1, 2)
    if not field.extra_rows:
        return np.ascontiguousarray(rows)
    first = np.zeros((count, field.extra_rows, *rows.shape[2:]), dtype=rows.dtype)
    return np.concatenate([first, rows], axis=1)


def flat_rows(trajectory: TrajectoryData) -> dict[str, Array]:
    """Path -> [T * B, ...], time-major as in a batch; the flags' row before the first step is dropped."""
    found = {}
    for path, values in trajectory.fields.items():
        steps = values[1:] if path in FLAG_PATHS else values
        found[path] = steps.reshape(-1, *steps.shape[2:])
    return found


def concatenated_rows(batch: Sequence[TrajectoryData]) -> dict[str, Array]:
    """`flat_rows` of several trajectories, one after the other."""
    flats = [flat_rows(trajectory) for trajectory in batch]
    return {path: np.concatenate([flat[path] for flat in flats]) if len(flats) > 1 else flats[0][path] for path in flats[0]}


def nested_tensors(trajectory: TrajectoryData) -> dict[str, Any]:
    """Field name -> tensor, or dict of tensors, sharing the arrays' memory; bfloat16 where it belongs."""
    found: dict[str, Any] = {}
    for path, values in trajectory.fields.items():
        tensor = as_tensor(path, values)
        name, _, key = path.partition("/")
        if key:
            found.setdefault(name, {})[key] = tensor
        else:
            found[name] = tensor
    return found


def as_tensor(path: str, values: Array) -> torch.Tensor:
    """The same memory as a tensor; `model_hidden` is bfloat16."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if path.endswith("model_hidden") else tensor
