"""Decoded trajectories in RAM: one ring of rows a field, so that a cached batch is one `np.take` a field."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trajstore.index import PENDING, Selection
from trajstore.layout import CURR_FRAME, Array, Ints, Places, Schema, array_ranges
from trajstore.packing import array_shape
from trajstore.reader import Group, MemorySource, Source, read_ranges

Locate = Callable[[int], tuple[Source, Places]]
"""Row of a selection -> the source to read that trajectory from, and its place there."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """A length or position in a ring, counted in rows, environments and frames at once."""

    rows: int = 0
    envs: int = 0
    frames: int = 0

    def __add__(self, other: "_Extent") -> "_Extent":
        return _Extent(self.rows + other.rows, self.envs + other.envs, self.frames + other.frames)

    def __mul__(self, factor: int) -> "_Extent":
        return _Extent(self.rows * factor, self.envs * factor, self.frames * factor)

    def fits(self, limit: "_Extent") -> bool:
        return self.rows <= limit.rows and self.envs <= limit.envs and self.frames <= limit.frames

    def largest(self, other: "_Extent") -> "_Extent":
        return _Extent(max(self.rows, other.rows), max(self.envs, other.envs), max(self.frames, other.frames))

    def nbytes(self, schema: Schema) -> int:
        total = 0
        for name, length in self.lengths(schema).items():
            dtype, row_shape = array_shape(schema, name)
            total += length * dtype.itemsize * int(np.prod(row_shape))
        return total

    def lengths(self, schema: Schema) -> dict[str, int]:
        """Rows of each array that hold this much."""
        lengths = {CURR_FRAME: self.rows} if schema.pooled else {}
        for name, (field, *_) in schema.by_array.items():
            lengths[name] = self.frames if field.frame is not None else self.rows + field.extra_rows * self.envs
        return lengths


def _need(places: Places, row: int) -> _Extent:
    num_envs = int(places.num_envs[row])
    return _Extent(int(places.num_steps[row]) * num_envs, num_envs, int(places.num_frames[row]))


def _start(places: Places, row: int) -> _Extent:
    return _Extent(int(places.row_start[row]), int(places.env_start[row]), int(places.frame_start[row]))


class _Ring:
    """The ring of one schema. Trajectories are placed in order; the oldest make room."""

    def __init__(self, schema: Schema, capacity: _Extent) -> None:
        self.schema = schema
        self.slots: dict[int, tuple[_Extent, _Extent]] = {}  # id -> where it starts, how long it is; oldest first
        self._capacity = capacity
        self.source = MemorySource(schema, self._allocate(capacity))

    def _allocate(self, capacity: _Extent) -> dict[str, Array]:
        arrays = {}
        for name, length in capacity.lengths(self.schema).items():
            dtype, row_shape = array_shape(self.schema, name)
            arrays[name] = np.empty((length, *row_shape), dtype)
        return arrays

    def place(self, trajectory_id: int, need: _Extent) -> None:
        """Makes room for a trajectory."""
        start = self._free(need)
        while start is None:
            self._grow(need)
            start = self._free(need)
        self.slots[trajectory_id] = (start, need)

    def _free(self, need: _Extent) -> _Extent | None:
        if not self.slots:
            return _Extent() if need.fits(self._capacity) else None
        oldest = next(iter(self.slots.values()))[0]
        newest, length = next(reversed(self.slots.values()))
        head = newest + length
        if oldest.rows >= head.rows:  # wrapped: free up to the oldest
            return head if (head + need).fits(oldest) else None
        if (head + need).fits(self._capacity):
            return head
        return _Extent() if need.fits(oldest) else None

    def _grow(self, need: _Extent) -> None:
        """Moves all slots to the start of rings twice as long."""
        self._capacity = self._capacity * 2 + need
        arrays = self._allocate(self._capacity)
        head = _Extent()
        for trajectory_id, (start, length) in self.slots.items():
            for name, old in self.source.arrays.items():
                first, stop = (extent.lengths(self.schema)[name] for extent in (start, start + length))
                target = head.lengths(self.schema)[name]
                arrays[name][target : target + stop - first] = old[first:stop]
            self.slots[trajectory_id] = (head, length)
            head = head + length
        self.source = MemorySource(self.schema, arrays)


class Cache:
    """The newest trajectories of a selection, decoded. Not thread-safe: the sampler that owns it guards it.

    Args:
        max_trajectories: How many are kept.
        max_bytes: Bytes they may take together; None: any.

    Attributes:
        holds_all: Whether one ring holds all that the last `update` was about.
    """

    def __init__(self, *, max_trajectories: int, max_bytes: int | None = None) -> None:
        self._max_trajectories = max_trajectories
        self._max_bytes = max_bytes
        self._rings: dict[Schema, _Ring] = {}
        self._epoch = -1
        self.clear()

    def clear(self) -> None:
        """Frees all memory."""
        self._rings = {}
        self.holds_all = False
        self._cached = np.zeros(0, np.bool_)
        self._ring_of = np.zeros(0, np.int64)
        self._places: Places | None = None

    def __len__(self) -> int:
        return sum(len(ring.slots) for ring in self._rings.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the rings."""
        return sum(array.nbytes for ring in self._rings.values() for array in ring.source.arrays.values())

    def update(self, selection: Selection, *, locate: Locate) -> None:
        """Makes the cache hold the newest trajectories of a selection."""
        if selection.epoch != self._epoch:
            self.clear()
            self._epoch = selection.epoch
        first = self._first_wanted(selection)
        ids = selection.ids.tolist()
        self._forget(set(ids[first:]))
        try:
            for run in self._runs(selection, self._place(selection, first)):
                self._load(selection, run, locate)
        except BaseException:
            self.clear()  # room that was made may not have been filled
            raise
        self._note_places(selection, first)

    def _first_wanted(self, selection: Selection) -> int:
        first = max(0, len(selection) - self._max_trajectories)
        if self._max_bytes is None:
            return first
        room = self._max_bytes
        for row in range(len(selection) - 1, first - 1, -1):
            room -= _need(selection.places, row).nbytes(selection.known_schemas[selection.schemas[row]])
            if room < 0:
                return row + 1
        return first

    def _forget(self, wanted: set[int]) -> None:
        for schema, ring in list(self._rings.items()):
            for trajectory_id in [known for known in ring.slots if known not in wanted]:
                del ring.slots[trajectory_id]
            if not ring.slots and len(self._rings) > 1:
                del self._rings[schema]

    def _ring(self, selection: Selection, row: int, *, count: int) -> _Ring:
        schema = selection.known_schemas[selection.schemas[row]]
        ring = self._rings.get(schema)
        if ring is None:
            # untouched memory costs nothing, so a ring starts at what it may need
            expected = min(self._max_trajectories, max(2 * count, 16)) if self._max_bytes is None else count
            ring = self._rings[schema] = _Ring(schema, _need(selection.places, row) * expected)
        return ring

    def _place(self, selection: Selection, first: int) -> list[int]:
        """Makes room for the rows from `first` on that are not cached; returns them."""
        missing = []
        ids = selection.ids.tolist()
        for row in range(first, len(ids)):
            ring = self._ring(selection, row, count=len(ids) - first)
            if ids[row] not in ring.slots:
                ring.place(ids[row], _need(selection.places, row))
                missing.append(row)
        return missing

    def _runs(self, selection: Selection, rows: Sequence[int]) -> list[list[int]]:
        """Rows of a selection in groups that follow one another both in their segment and in the ring, to be read at once."""
        runs: list[list[int]] = []
        for row in rows:
            if runs and runs[-1][-1] == row - 1 and self._follows(selection, row):
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    def _follows(self, selection: Selection, row: int) -> bool:
        """Whether a row of a selection lies right behind the one before it."""
        before = row - 1
        schema = selection.known_schemas[selection.schemas[row]]
        if selection.segments[row] == PENDING or selection.segments[row] != selection.segments[before]:
            return False
        if selection.schemas[row] != selection.schemas[before]:
            return False
        start, length = self._rings[schema].slots[int(selection.ids[before])]
        is_next = _start(selection.places, before) + _need(selection.places, before) == _start(selection.places, row)
        return is_next and start + length == self._rings[schema].slots[int(selection.ids[row])][0]

    def _load(self, selection: Selection, rows: Sequence[int], locate: Locate) -> None:
        """Reads trajectories that follow one another into the ring."""
        source, first = locate(rows[0])
        ring = self._rings[source.schema]
        start = ring.slots[int(selection.ids[rows[0]])][0].lengths(ring.schema)
        last = first if len(rows) == 1 else selection.places[rows[-1] : rows[-1] + 1]
        stops = array_ranges(ring.schema, last)
        ranges = {name: (begin, stops[name][1]) for name, (begin, _) in array_ranges(ring.schema, first).items()}
        out = {name: ring.source.arrays[name][start[name] : start[name] + stop - begin] for name, (begin, stop) in ranges.items()}
        read_ranges(source, ranges, out=out)

    def _note_places(self, selection: Selection, first: int) -> None:
        """Where the selection's trajectories are in the rings, aligned with its rows."""
        self._cached = np.arange(len(selection)) >= first
        self._order = list(self._rings.values())
        ring_numbers = {schema: number for number, schema in enumerate(self._rings)}
        by_schema = np.array([ring_numbers.get(schema, 0) for schema in selection.known_schemas], np.int64)
        self._ring_of = by_schema[selection.schemas] if len(selection) else np.zeros(0, np.int64)
        starts = np.zeros((3, len(selection)), np.int64)
        for number, ring in enumerate(self._order):
            rows = np.flatnonzero(self._cached & (self._ring_of == number))
            if not len(rows):
                continue
            found = (ring.slots[trajectory_id][0] for trajectory_id in selection.ids[rows].tolist())
            starts[:, rows] = np.array([(start.rows, start.envs, start.frames) for start in found]).T
        own = selection.places
        self._places = Places(own.num_steps, own.num_envs, own.num_frames, *starts)
        self.holds_all = len(self._order) == 1 and bool(self._cached.all())
        self._is_uniform = selection.is_uniform

    def groups(self, which: Ints, *, steps: Ints, envs: Ints) -> tuple[list[Group], Ints | None]:
        """Serves draws that are cached.

        Args:
            which: int64[n], rows of the selection last given to `update`.
            steps: int64[n].
            envs: int64[n].

        Returns:
            Groups over the cached draws, and the draws that are not cached (None: there are none).
        """
        if self._places is None:
            return [], np.arange(len(which))
        if self.holds_all:
            places = self._places.uniform(which) if self._is_uniform else self._places[which]
            return [Group(self._order[0].source, None, places, steps, envs)], None
        cached = self._cached[which]
        groups = []
        for number, ring in enumerate(self._order):
            draws = np.flatnonzero(cached & (self._ring_of[which] == number))
            if len(draws):
                groups.append(Group(ring.source, draws, self._places[which[draws]], steps[draws], envs[draws]))
        rest = np.flatnonzero(~cached)
        return groups, rest if len(rest) else None
