"""A trajectory as arrays of env-major rows and pooled frames, in memory: what a segment holds, one trajectory at a time."""

import functools
import math
import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trajstore.errors import InvalidTrajectoryError, UnsupportedTypeError
from trajstore.layout import CURR_FRAME, Array, Field, Places, Schema, array_name, differing_rows, plan_pool
from trajstore.memory import TRAJECTORIES
from trajstore.threads import In, Out, parallel_map
from trajstore.trajectory import (
    FLAG_FIELDS,
    STORED_DTYPES,
    Json,
    Trajectory,
    dtype_name,
    flatten,
    from_object,
    from_stored,
    to_stored,
    unflatten,
    update_count,
)

_LARGE_BYTES = 1024 * 1024
"""From here on it pays to use memory again, and several threads."""
_REFERENCE_FIELDS = ("prev_logprobs", "rewards", "actions")


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a trajectory besides its arrays.

    Attributes:
        uuid: Its own, 32 hexadecimal digits.
        num_steps: T.
        num_envs: B.
        num_frames: Frames in the pool; 0 without one.
        max_episode_length, model_weights_id, model_update_count: As in `Trajectory`, the last one resolved.
    """

    uuid: str
    num_steps: int
    num_envs: int
    num_frames: int
    max_episode_length: int
    model_weights_id: str
    model_update_count: int

    @property
    def places(self) -> Places:
        """Where it lies in arrays that hold nothing else."""
        zero = np.zeros(1, np.int64)
        return Places(zero + self.num_steps, zero + self.num_envs, zero + self.num_frames, zero, zero, zero)


@dataclass(frozen=True, slots=True)
class Packed:
    """A trajectory's own copy, ready to be written and to be read from.

    Attributes:
        header: What is known of it.
        schema: Its fields.
        arrays: Array name -> rows [n, ...] of the stored dtype, contiguous.
        aside: Values kept beside the arrays, path -> JSON.
    """

    header: Header
    schema: Schema
    arrays: dict[str, Array]
    aside: dict[str, Json]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class Prepared:
    """A trajectory that was found good, but is not copied yet.

    Attributes:
        trajectory: The source.
        tensors: Its fields [T or more, B, ...] by path.
        aside: Its other values, as JSON.
        num_steps: T.
        num_envs: B.
    """

    trajectory: Trajectory
    tensors: dict[str, torch.Tensor]
    aside: dict[str, Json]
    num_steps: int
    num_envs: int

    def pack(self) -> Packed:
        """Copies it into env-major rows; the source is not referred to afterwards."""
        stored = {path: to_stored(tensor.contiguous()) for path, tensor in self.tensors.items()}
        frames, num_frames, pooled = _plan(self.tensors, stored, self.num_steps)
        arrays: dict[str, Array] = {CURR_FRAME: frames.reshape(-1)} if pooled else {}
        rows = tuple(
            (path, tensor.dtype, tuple(tensor.shape[2:]), tensor.shape[0] - self.num_steps) for path, tensor in self.tensors.items()
        )
        schema = _schema(rows, pooled)
        kept = [field for field in schema.fields if field.frame != 1]

        def copy(field: Field) -> Array:
            if field.frame is None:
                return _env_major(self.tensors[field.path])
            after = stored[field.path.replace("curr_obs/", "next_obs/", 1)]
            return _pool(stored[field.path], after, frames, num_frames)

        arrays |= zip([field.array for field in kept], _each(copy, kept, nbytes=self._nbytes), strict=True)
        return Packed(self._header(num_frames), schema, arrays, self.aside)

    @property
    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _header(self, num_frames: int) -> Header:
        return Header(
            uuid=uuids.uuid4().hex,
            num_steps=self.num_steps,
            num_envs=self.num_envs,
            num_frames=num_frames,
            max_episode_length=int(self.trajectory.max_episode_length),
            model_weights_id=str(self.trajectory.model_weights_id),
            model_update_count=update_count(self.trajectory),
        )


def prepare(source: object) -> Prepared:
    """Checks a trajectory, or an object with its attributes; nothing is copied but what is not on the CPU.

    Raises:
        InvalidTrajectoryError: The shapes do not fit [T, B, ...] with T, B >= 1, or a key is not a usable name.
        UnsupportedTypeError: A value can't be stored.
    """
    trajectory = from_object(source)
    _check_header(trajectory)
    tensors, aside = flatten(trajectory)
    num_steps, num_envs = find_steps_envs(tensors)
    for path, tensor in tensors.items():
        _check_shape(path, tensor, num_steps=num_steps, num_envs=num_envs)
    return Prepared(trajectory, tensors, aside, num_steps, num_envs)


def _check_header(trajectory: Trajectory) -> None:
    if not isinstance(trajectory.model_weights_id, str):
        raise UnsupportedTypeError(f"model_weights_id: expected a string, found {type(trajectory.model_weights_id).__name__}")
    for name in ("max_episode_length", "model_update_count"):
        value = getattr(trajectory, name)
        if value is None and name == "model_update_count":
            continue
        try:
            is_good = int(value) == value and abs(value) < 1 << 63
        except (TypeError, ValueError, OverflowError, RuntimeError):
            is_good = False
        if not is_good:
            raise InvalidTrajectoryError(f"{name}: expected a whole number of 64 bits, found {value!r}"[:200])


def unpack(header: Header, schema: Schema, arrays: Mapping[str, Array], aside: Mapping[str, Json]) -> Trajectory:
    """Inverse of packing; `arrays` holds nothing but this trajectory, and may lack arrays of fields outside `schema`."""
    num_envs, num_steps = header.num_envs, header.num_steps
    tensors = {}
    for field in schema.fields:
        rows = arrays[field.array]
        if field.frame is not None:
            rows = rows[arrays[CURR_FRAME] + field.frame]
        # [B * (T + extra), ...] -> [T + extra, B, ...]; copied by numpy, since torch's threads do not survive a fork
        env_major = rows.reshape(num_envs, num_steps + field.extra_rows, *field.row_shape)
        tensors[field.path] = from_stored(env_major.swapaxes(0, 1).copy(), field.dtype)
    trajectory = unflatten(tensors, aside)
    trajectory.max_episode_length = header.max_episode_length
    trajectory.model_weights_id = header.model_weights_id
    trajectory.model_update_count = header.model_update_count
    return trajectory


def array_shape(schema: Schema, array: str) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    """Stored dtype and row shape of an array."""
    if array == CURR_FRAME:
        return np.dtype("int32"), ()
    field = schema.by_array[array][0]
    return STORED_DTYPES[field.dtype], field.row_shape


def find_steps_envs(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """T and B: from `prev_logprobs`, else `rewards`, else `actions` (RLinf 0.3.0 knows the first two), else the first tensor."""
    path = next((path for path in (*_REFERENCE_FIELDS, *tensors) if path in tensors), None)
    if path is None:
        raise InvalidTrajectoryError("the trajectory holds no tensor [T, B, ...]; there is nothing to sample from it")
    num_steps, num_envs = tensors[path].shape[:2]
    if not num_steps or not num_envs:
        raise InvalidTrajectoryError(f"field {path!r}: T = {num_steps} and B = {num_envs}; both must be at least 1")
    return num_steps, num_envs


def reference_field(schema: Schema) -> Field:
    """The field that T and B were taken from."""
    path = next((path for path in _REFERENCE_FIELDS if path in schema.by_path), schema.fields[0].path)
    return schema.by_path[path]


def _check_shape(path: str, tensor: torch.Tensor, *, num_steps: int, num_envs: int) -> None:
    rows, envs = tensor.shape[:2]
    if rows < num_steps or envs != num_envs:
        raise InvalidTrajectoryError(
            f"field {path!r}: shape {list(tensor.shape)} does not fit T = {num_steps} steps of B = {num_envs} environments;"
            " expected [T or more, B, ...]"
        )
    extra = rows - num_steps
    if path in FLAG_FIELDS and extra and num_steps % extra:
        raise InvalidTrajectoryError(
            f"field {path!r}: {rows} rows are T = {num_steps} and {extra} more, one an epoch, but T is no multiple of {extra}"
        )


@functools.lru_cache(1024)
def _schema(rows: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...], pooled: frozenset[str]) -> Schema:
    """The schema of fields (path, dtype, row shape, extra rows), given the pooled keys. Cached: most trajectories are alike."""
    return Schema(tuple(_field(path, dtype, row_shape, extra, pooled) for path, dtype, row_shape, extra in rows))


def _field(path: str, dtype: torch.dtype, row_shape: tuple[int, ...], extra: int, pooled: frozenset[str]) -> Field:
    top, _, key = path.partition("/")
    is_pooled = key in pooled and top in ("curr_obs", "next_obs")
    return Field(
        path=path,
        dtype=dtype_name(dtype),
        row_shape=row_shape,
        extra_rows=extra,
        extra_first=extra > 0 and path in FLAG_FIELDS,
        array=array_name(f"obs/{key}" if is_pooled else path),
        frame=("curr_obs", "next_obs").index(top) if is_pooled else None,
    )


def _env_major(tensor: torch.Tensor) -> Array:
    """A copy of [T, B, ...] as rows [B * T, ...]."""
    name, row_shape = dtype_name(tensor.dtype), tensor.shape[2:]
    rows = _empty((tensor.shape[0] * tensor.shape[1], *row_shape), STORED_DTYPES[name])
    from_stored(rows, name).view(tensor.shape[1], tensor.shape[0], *row_shape).copy_(tensor.transpose(0, 1))
    return rows


def _empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Uninitialised memory; large blocks are used again when the trajectory before is written."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return np.empty(shape, dtype)
    return TRAJECTORIES.lend(nbytes)[:nbytes].view(dtype).reshape(shape)


def _plan(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Array], num_steps: int) -> tuple[Array, int, frozenset[str]]:
    """The pool's frames int32[B, T], their number, and the observation keys that are pooled."""
    keys = [key for top, _, key in (path.partition("/") for path in tensors) if top == "curr_obs" and _are_alike(tensors, key, num_steps)]
    if not keys:
        return np.zeros((0, 0), np.int32), 0, frozenset()

    def find(key: str) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        return _inserted(stored[f"curr_obs/{key}"], stored[f"next_obs/{key}"])

    inserted = dict(zip(keys, _each(find, keys, nbytes=sum(stored[f"curr_obs/{key}"].nbytes for key in keys)), strict=True))
    plan = inserted[max(inserted, key=lambda key: stored[f"curr_obs/{key}"].nbytes)]
    pooled = frozenset(key for key, where in inserted.items() if not (where & ~plan).any())
    return *plan_pool(plan), pooled


def _are_alike(tensors: Mapping[str, torch.Tensor], key: str, num_steps: int) -> bool:
    """Whether both observations have a key, with one dtype and shape and no extra rows."""
    curr, after = tensors[f"curr_obs/{key}"], tensors.get(f"next_obs/{key}")
    return after is not None and after.dtype == curr.dtype and after.shape == curr.shape and curr.shape[0] == num_steps


def _each(function: Callable[[In], Out], items: Sequence[In], *, nbytes: int) -> list[Out]:
    """`[function(item) for item in items]`, by several threads when there are many bytes to go through."""
    return parallel_map(function, items) if nbytes > _LARGE_BYTES else [function(item) for item in items]


def _inserted(curr: Array, after: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """bool[B, T]: after which steps the next observation is not the following current one. Both are [T, B, ...]."""
    inserted = np.ones(curr.shape[:2], np.bool_)
    if len(curr) > 1:
        inserted[:-1] = differing_rows(after[:-1], curr[1:])
    return np.ascontiguousarray(inserted.T)


def _pool(curr: Array, after: Array, frames: Array, num_frames: int) -> Array:
    """Frames [F, ...] from both observations [T, B, ...] and the plan int32[B, T]."""
    pool = _empty((num_frames, *curr.shape[2:]), curr.dtype)
    order = frames.T.reshape(-1)
    pool[order] = curr.reshape(len(order), *curr.shape[2:])
    missing = np.ones(num_frames, np.bool_)
    missing[order] = False
    after_rows = np.flatnonzero(missing[order + 1])
    pool[order[after_rows] + 1] = after.reshape(len(order), *after.shape[2:])[after_rows]
    return pool
