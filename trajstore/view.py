"""Reading a store: its index, its trajectories, its transitions. What `TrajectoryStore` adds is writing."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from trajstore.errors import CorruptionError, InvalidRequestError
from trajstore.gather import gather, resolve_fields
from trajstore.index import PENDING, Index, Selection, TrajectoryInfo, as_integers, read_generation, read_index
from trajstore.layout import Field, Ints, Places
from trajstore.local_storage import LocalStorage
from trajstore.packing import Header, Packed, unpack
from trajstore.place import read_uuid
from trajstore.reader import Group, MemorySource, SegmentSource, Source, empty_arrays, read_arrays
from trajstore.sampler import MAX_ATTEMPTS, Sampler
from trajstore.segment import SEGMENTS, Segment
from trajstore.storage import Storage
from trajstore.trajectory import Json, Trajectory

MAX_OPEN_SEGMENTS = 4096
_views: "weakref.WeakSet[StoreView]" = weakref.WeakSet()
T = TypeVar("T")


class IndexView(Mapping[int, TrajectoryInfo]):
    """Trajectory id -> what the index knows of it, oldest first; follows the store it was taken from."""

    def __init__(self, view: "StoreView") -> None:
        self._view = view

    def __getitem__(self, trajectory_id: int) -> TrajectoryInfo:
        return self._view.info(trajectory_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._view.ids)

    def __len__(self) -> int:
        return len(self._view)


class StoreView:
    """A store as its readers see it. Thread-safe.

    Attributes:
        storage: The place it is kept in.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._lock = threading.RLock()
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._index, self._generation = Index(), -1
        self._version = 0
        self._epoch = 0
        self._uuid = ""
        self._load_index()
        _views.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process, such as a `DataLoader` worker that is spawned, opens the store anew, for reading."""
        if not isinstance(self.storage, LocalStorage):
            raise InvalidRequestError(f"{self!r} is not a local directory; open it in the process that reads it")
        self.flush()
        return _reopen, (self.storage,)

    def _after_fork(self) -> None:
        """A forked child has no thread that would give the lock back."""
        self._lock = threading.RLock()
        self.storage.after_fork()

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.storage.location}: {len(self)} trajectories, {self.num_samples} samples>"

    @property
    def num_samples(self) -> int:
        """Transitions in all trajectories: the sum of T * B."""
        with self._lock:
            return self._index.num_samples

    @property
    def ids(self) -> list[int]:
        """Trajectory ids, oldest first."""
        with self._lock:
            ids: list[int] = self._index.column("id").tolist()
            return ids

    @property
    def index(self) -> "IndexView":
        """Trajectory id -> `TrajectoryInfo`, oldest first; follows the store."""
        return IndexView(self)

    def info(self, trajectory_id: int) -> TrajectoryInfo:
        """What the index knows of a trajectory; `TrajectoryNotFoundError` if it is not in the store."""
        with self._lock:
            return self._index.info(int(self._index.find([trajectory_id])[0]))

    @property
    def fields(self) -> dict[str, Field]:
        """Field path -> dtype and row shape, as the newest trajectory that has it has it."""
        with self._lock:
            numbers = np.unique(self._index.column("schema")[::-1], return_index=True)
            newest_first = numbers[0][np.argsort(numbers[1])]
            fields: dict[str, Field] = {}
            for number in newest_first:
                fields = {**self._index.schemas[number].by_path, **fields}
            return fields

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the shards of all segments that hold live trajectories."""
        with self._lock:
            numbers = np.unique(self._index.column("segment"))
        return sum(self.segment(int(number)).info.file_bytes for number in numbers if number != PENDING)

    @property
    def version(self) -> int:
        """Changes whenever a trajectory is added, moved or deleted."""
        return self._version

    @property
    def epoch(self) -> int:
        """Changes when the contents were replaced, so that ids have new meanings."""
        return self._epoch

    def read(self, trajectory_id: int, *, fields: Sequence[str] | None = None) -> Trajectory:
        """A trajectory exactly as it was added, or some fields of it.

        Args:
            trajectory_id: Its id.
            fields: Paths such as `actions` or `curr_obs/main_images`, or parents such as `curr_obs`.

        Raises:
            TrajectoryNotFoundError: It is not in the store.
            FieldNotFoundError: It has no such field.
            CorruptionError: Its bytes are not those that were written.
        """
        return self._retrying(lambda: self._read(trajectory_id, fields))

    def _read(self, trajectory_id: int, fields: Sequence[str] | None) -> Trajectory:
        selection = self.select([trajectory_id])
        source, places = self.locate(selection, 0)
        schema = resolve_fields(selection.ids, selection.schemas, selection.known_schemas, fields=fields)
        arrays = empty_arrays(schema, places)
        read_arrays(source, places, out=arrays)
        header, aside = self._described(selection, 0)
        if fields is not None:
            aside = {path: value for path, value in aside.items() if any(path == f or path.startswith(f"{f}/") for f in fields)}
        return unpack(header, schema, arrays, aside)

    def packed(self, selection: Selection, row: int) -> Packed:
        """One trajectory of a selection as it is stored."""
        source, places = self.locate(selection, row)
        arrays = empty_arrays(source.schema, places)
        read_arrays(source, places, out=arrays)
        header, aside = self._described(selection, row)
        return Packed(header, source.schema, arrays, aside)

    def _described(self, selection: Selection, row: int) -> tuple[Header, dict[str, Json]]:
        number, trajectory_id = int(selection.segments[row]), int(selection.ids[row])
        described = self._pending(trajectory_id, selection.epoch) if number == PENDING else self.segment(number).entry(trajectory_id)
        return described.header, described.aside

    def gather(self, trajectory_ids: Any, steps: Any, envs: Any, *, fields: Sequence[str] | str | None = None) -> dict[str, Any]:
        """Transitions by trajectory, step and environment: the primitive under every sampler.

        Args:
            trajectory_ids: Integers [n].
            steps: Integers [n].
            envs: Integers [n].
            fields: As in `Sampler.sample`.

        Returns:
            Nested dict of tensors [n, ...].

        Raises:
            InvalidRequestError: Lengths differ, or a step or environment is not in its trajectory.
            TrajectoryNotFoundError, SchemaMismatchError, FieldNotFoundError, CorruptionError: As they say.
        """
        given = {"trajectory_ids": trajectory_ids, "steps": steps, "envs": envs}
        ids, steps, envs = (as_integers(name, values) for name, values in given.items())
        if not len(ids) == len(steps) == len(envs):
            raise InvalidRequestError(f"{len(ids)} trajectory ids, {len(steps)} steps and {len(envs)} environments: they must be as many")
        return self._retrying(lambda: self._gather(ids, steps, envs, fields))

    def _gather(self, ids: Ints, steps: Ints, envs: Ints, fields: Sequence[str] | str | None) -> dict[str, Any]:
        wanted, which = np.unique(ids, return_inverse=True)
        if not len(wanted):
            raise InvalidRequestError("no transitions asked for")
        selection = self.select(wanted)
        places = selection.places[which]
        bad = (steps < 0) | (steps >= places.num_steps) | (envs < 0) | (envs >= places.num_envs)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise InvalidRequestError(
                f"step {steps[at]} of environment {envs[at]} is not in trajectory {ids[at]}, which has"
                f" {places.num_steps[at]} steps of {places.num_envs[at]} environments"
            )
        resolved = resolve_fields(selection.ids, selection.schemas, selection.known_schemas, fields=fields)
        groups = self.groups(selection, which, steps=steps, envs=envs)
        return gather(groups, resolved, len(ids))

    def _retrying(self, read: Callable[[], T]) -> T:
        """Calls `read`, again if a trajectory was moved meanwhile."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            version = self._version
            try:
                return read()
            except FileNotFoundError as error:
                if not self.moved(version) or attempt == MAX_ATTEMPTS:
                    raise CorruptionError(f"{self.storage.location}: an object of the store is gone: {error}") from error
        raise AssertionError("the last attempt returns or raises")

    def sampler(self, *, window: int = 0, seed: int | None = 0, cache_size: int = 0, cache_bytes: int | None = None) -> Sampler:
        """Draws uniformly from the newest trajectories; see `Sampler`."""
        return Sampler(self, window=window, seed=seed, cache_size=cache_size, cache_bytes=cache_bytes)

    def select(self, trajectory_ids: Sequence[int] | Ints) -> Selection:
        """These trajectories as a selection, in this order; `TrajectoryNotFoundError` if one is not in the store."""
        with self._lock:
            return self._index.select(self._index.find(trajectory_ids), epoch=self._epoch)

    def newest(self, count: int) -> Selection:
        """The newest trajectories as a selection, oldest first; 0: all."""
        with self._lock:
            return self._index.select(slice(-count if count else None, None), epoch=self._epoch)

    def locate(self, selection: Selection, row: int) -> tuple[Source, Places]:
        """The source that holds a trajectory of a selection, and its place there."""
        number = int(selection.segments[row])
        if number != PENDING:
            return SegmentSource(self.segment(number)), selection.places[row : row + 1]
        packed = self._pending(int(selection.ids[row]), selection.epoch)
        return MemorySource(packed.schema, packed.arrays), packed.header.places

    def groups(self, selection: Selection, which: Ints, *, steps: Ints, envs: Ints) -> list[Group]:
        """The sources that serve draws of (row of the selection, step, environment)."""
        # trajectories in memory are sources of their own, numbered below zero
        holders = np.where(selection.segments == PENDING, -1 - np.arange(len(selection)), selection.segments)[which]
        order = np.argsort(holders, kind="stable")
        starts = np.flatnonzero(np.diff(holders[order], prepend=holders[order[0]] - 1))
        groups = []
        for draws in np.split(order, starts[1:]):
            source, places = self.locate(selection, int(which[draws[0]]))
            if isinstance(source, SegmentSource):
                places = selection.places[which[draws]]
            groups.append(Group(source, draws if len(starts) > 1 else None, places, steps[draws], envs[draws]))
        return groups

    def _pending(self, trajectory_id: int, epoch: int) -> Packed:  # noqa: ARG002  a writer's store has some
        """A trajectory that is in memory; `FileNotFoundError` if it is not, or no longer."""
        raise FileNotFoundError(f"trajectory {trajectory_id} is in no segment")

    def segment(self, number: int) -> Segment:
        """An open segment."""
        with self._lock:
            segment = self._segments.get(number)
            if segment is not None:
                self._segments.move_to_end(number)
                return segment
        segment = Segment(self.storage, number)
        with self._lock:
            self._segments[number] = segment
            if len(self._segments) > MAX_OPEN_SEGMENTS:
                self._segments.popitem(last=False)
        return segment

    def flush(self) -> None:
        """Returns when all that was added is durable; a reader adds nothing."""

    def refresh(self) -> None:
        """Sees what a writer in another process has committed or deleted since."""
        self._load_index()

    def moved(self, version: int) -> bool:
        """Called when an object was not found: whether the index has changed since `version`, which explains it."""
        self.refresh()
        return self._version != version

    def _load_index(self) -> None:
        while True:
            uuid = read_uuid(self.storage)
            if uuid != self._uuid:  # another store took the place of the one that was here
                self.storage.forget()
                with self._lock:
                    self._segments.clear()
                self._uuid = uuid
            index, generation = read_index(self.storage)
            self._recover(index)
            if generation == read_generation(self.storage) and uuid == read_uuid(self.storage):
                break
        with self._lock:
            self._version += not np.array_equal(index.committed_rows(), self._index.committed_rows())
            self._epoch += index.renames(self._index)
            self._index, self._generation = index, generation

    def _recover(self, index: Index) -> None:
        """Adds the segments that were committed since the index was published."""
        known = set(np.unique(index.column("segment")).tolist())
        for number in sorted(self._segment_numbers()):
            if number < index.next_segment or number in known:
                continue
            try:
                segment = self.segment(number)
            except FileNotFoundError:
                continue  # not committed
            if segment.info.recover:
                index.recover(segment.info, segment=number)
            index.next_segment = number + 1

    def _segment_numbers(self) -> Iterator[int]:
        return (int(name) for name in self.storage.list(SEGMENTS) if name.isascii() and name.isdigit())


def _reopen(storage: LocalStorage) -> StoreView:
    return StoreView(storage)


def _after_fork() -> None:
    for view in list(_views):
        view._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
