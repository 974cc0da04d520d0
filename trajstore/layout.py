"""Where things lie: pure arithmetic between samples, steps, rows and frames. The names and rules are those of FORMAT.md."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from trajstore.errors import CorruptionError

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""int64[n]"""
Array: TypeAlias = np.ndarray[Any, Any]

CURR_FRAME = "curr_frame"
"""The array that maps rows to frames: int32[rows]."""


class Rows:
    """Arrays [n, ...] of one dtype and row shape, n >= 1 each, contiguous: read as one along the first axis, without joining them."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(len(part) for part in parts)]
        self.dtype: np.dtype[Any] = parts[0].dtype
        self.row_shape: tuple[int, ...] = parts[0].shape[1:]
        self.row_bytes: int = prod(self.row_shape) * self.dtype.itemsize
        self.nbytes: int = len(self) * self.row_bytes

    def __len__(self) -> int:
        return self._starts[-1]

    def chunk(self, start: int, count: int) -> Array:
        """Rows `[start, start + count)`, contiguous, zeros behind the last one. Only what crosses a border is copied."""
        number = bisect_right(self._starts, start) - 1
        first = start - self._starts[number]
        found = self._parts[number][first : first + count]
        if len(found) == count:
            return found
        full = np.zeros((count, *self.row_shape), self.dtype)
        filled = 0
        for part in (found, *self._parts[number + 1 :]):
            taken = part[: count - filled]
            full[filled : filled + len(taken)] = taken
            filled += len(taken)
        return full


@dataclass(frozen=True, slots=True)
class Field:
    """A field as all trajectories of a segment have it.

    Attributes:
        path: Keys joined by `/`.
        dtype: torch's name of the dtype.
        row_shape: Shape of a row, without T and B.
        extra_rows: Rows beyond T.
        extra_first: True where each epoch begins with its extra row (flags), False where they come last.
        array: Name of the array that holds it.
        frame: None: the array holds rows. 0 or 1: it is the pool, and the row's frame or the one after it is meant.
    """

    path: str
    dtype: str
    row_shape: tuple[int, ...]
    extra_rows: int
    extra_first: bool
    array: str
    frame: int | None = None

    @property
    def row(self) -> tuple[str, tuple[int, ...]]:
        """What must agree for two trajectories to be in one batch: dtype and row shape."""
        return self.dtype, self.row_shape

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.row_shape)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Field":
        return cls(**{**value, "row_shape": tuple(value["row_shape"])})


@dataclass(frozen=True)
class Schema:
    """The fields of a trajectory, in the order of a batch's keys. Equal schemas may share a segment."""

    fields: tuple[Field, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.fields)

    @cached_property
    def by_path(self) -> dict[str, Field]:
        return {field.path: field for field in self.fields}

    @cached_property
    def by_array(self) -> dict[str, tuple[Field, ...]]:
        """Array name -> the fields in it: one, or the two observations of a pool."""
        arrays: dict[str, tuple[Field, ...]] = {}
        for field in self.fields:
            arrays[field.array] = (*arrays.get(field.array, ()), field)
        return arrays

    @cached_property
    def pooled(self) -> bool:
        return any(field.frame is not None for field in self.fields)

    def to_json(self) -> list[dict[str, Any]]:
        return [field.to_json() for field in self.fields]

    @classmethod
    def from_json(cls, value: list[Mapping[str, Any]]) -> "Schema":
        try:
            return cls(tuple(Field.from_json(field) for field in value))
        except (TypeError, KeyError) as error:
            raise CorruptionError(f"a schema does not parse: {error}") from error


@dataclass(frozen=True, slots=True)
class Places:
    """Where trajectories begin in a set of arrays. All int64[n], or int64[1] to stand for every draw.

    Attributes:
        num_steps: T.
        num_envs: B.
        num_frames: Frames in the pool; 0 without one.
        row_start: Rows (steps times environments) before it.
        env_start: Environments before it.
        frame_start: Frames before it.
    """

    num_steps: Ints
    num_envs: Ints
    num_frames: Ints
    row_start: Ints
    env_start: Ints
    frame_start: Ints

    def __getitem__(self, selection: Any) -> "Places":
        return Places(
            num_steps=self.num_steps[selection],
            num_envs=self.num_envs[selection],
            num_frames=self.num_frames[selection],
            row_start=self.row_start[selection],
            env_start=self.env_start[selection],
            frame_start=self.frame_start[selection],
        )

    def uniform(self, selection: Ints) -> "Places":
        """As `self[selection]` where all have the same numbers of steps and environments; frames are not counted."""
        row_start, env_start, frame_start = (start.take(selection) for start in (self.row_start, self.env_start, self.frame_start))
        return Places(self.num_steps[:1], self.num_envs[:1], self.num_frames[:1], row_start, env_start, frame_start)


def array_name(path: str) -> str:
    """Field path -> array name: each key percent-encoded, so that none is special to a file system or to Zarr."""
    keys = [quote(key, safe="") for key in path.split("/")]
    return "/".join(_plain_key(key) for key in keys)


def _plain_key(key: str) -> str:
    if key == "zarr.json":
        return "zarr%2Ejson"
    key = key.replace("~", "%7E")
    return "%5F%5F" + key[2:] if key.startswith("__") else key


def rows_of(field: Field, places: Places, *, steps: Ints, envs: Ints) -> Ints:
    """The stored row of each (step, environment) in a field that is not pooled, without its extra rows. int64[n]."""
    extra = field.extra_rows
    if not extra:
        return places.row_start + envs * places.num_steps + steps
    if field.extra_first:
        steps = steps + steps // (places.num_steps // extra) + 1
    return places.row_start + extra * places.env_start + envs * (places.num_steps + extra) + steps


def array_ranges(schema: Schema, places: Places) -> dict[str, tuple[int, int]]:
    """`[start, stop)` of one trajectory (places of length 1) in each array, extra rows and all."""
    rows, row_start = int(places.num_steps[0] * places.num_envs[0]), int(places.row_start[0])
    frame_start = int(places.frame_start[0])
    ranges = {CURR_FRAME: (row_start, row_start + rows)} if schema.pooled else {}
    for array, (field, *_) in schema.by_array.items():
        start = row_start + field.extra_rows * int(places.env_start[0])
        ranges[array] = (start, start + rows + field.extra_rows * int(places.num_envs[0]))
        if field.frame is not None:
            ranges[array] = (frame_start, frame_start + int(places.num_frames[0]))
    return ranges


def plan_pool(inserted: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], int]:
    """Frames in time order, given after which steps an observation is inserted.

    Args:
        inserted: bool[B, T], True where `next_obs[t]` is not `curr_obs[t + 1]`; the last step always.

    Returns:
        int32[B, T], the frame of each current observation (the next one's is the frame after it), and the number of frames.
    """
    num_envs, num_steps = inserted.shape
    before = np.arange(num_envs * num_steps).reshape(num_envs, num_steps)
    before[:, :] += np.cumsum(inserted).reshape(inserted.shape) - inserted
    return before.astype(np.int32), int(inserted.size + np.count_nonzero(inserted))


def differing_rows(left: Array, right: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows differ in any bit. Both are [m, n, ...] of one dtype with rows contiguous; returns bool[m, n]."""
    shape = left.shape[:2]
    row_bytes = left[0, 0].nbytes
    if row_bytes == 0:
        return np.zeros(shape, np.bool_)
    word = np.dtype(f"u{next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)}")
    # [m, n, ...] -> [m, n, words]
    left_words, right_words = (rows.reshape(*shape, -1).view(word) for rows in (left, right))
    return np.stack([(a != b).any(axis=-1) for a, b in zip(left_words, right_words, strict=True)])
