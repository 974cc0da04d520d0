"""The store: reading and writing, one writer and many readers, on any storage."""

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from zarr.abc.store import Store

from trajstore.errors import (
    ClosedError,
    CorruptionError,
    InvalidRequestError,
    ReadOnlyError,
    StoreExistsError,
    StoreNotFoundError,
)
from trajstore.index import INDEX, Index, publish
from trajstore.layout import Ints
from trajstore.packing import Packed, prepare
from trajstore.place import create, erase, is_store, open_storage
from trajstore.segment import EncodedSegment, delete_segment, encode_segment, write_segment
from trajstore.staging import Staging, worth_compacting
from trajstore.storage import Storage
from trajstore.verify import Fault, find_faults
from trajstore.view import StoreView
from trajstore.writer import Writer

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 128 * 1024 * 1024
QUEUE_BYTES = 1024 * 1024 * 1024
PUBLISH_INTERVAL_S = 5.0
"""The index is published at most this often while trajectories are added; opening reads the segments that it lacks."""
Mode = Literal["r", "r+", "a", "w", "w-"]

_open_stores: "weakref.WeakSet[TrajectoryStore]" = weakref.WeakSet()


def open(  # noqa: A001  named as zarr.open
    place: "str | os.PathLike[str] | Store | Storage",
    mode: Mode = "a",
    *,
    segment_bytes: int = SEGMENT_BYTES,
    queue_bytes: int = QUEUE_BYTES,
    max_trajectories: int | None = None,
) -> "TrajectoryStore":
    """Opens or creates a store.

    Args:
        place: A directory, or any Zarr store.
        mode: As in Zarr. "r": read, must exist. "r+": read and write, must exist. "a": read and write, created if absent. "w": created,
            a store that is there is deleted. "w-": created, must not exist.
        segment_bytes: Raw bytes that are written as one segment when more are queued.
        queue_bytes: Raw bytes that may wait to be written before adding waits.
        max_trajectories: Keep at most this many; older ones are deleted as new ones come. None: keep all.

    Raises:
        StoreNotFoundError: There is no store, and the mode creates none.
        StoreExistsError: There is one, and mode is "w-".
        NotAStoreError: The place is a file, or a directory with other contents.
        FormatVersionError: A newer version of the library wrote it.
        LockedError: Another writer has it.
    """
    if mode not in ("r", "r+", "a", "w", "w-"):
        raise InvalidRequestError(f"mode={mode!r}: expected one of 'r', 'r+', 'a', 'w', 'w-'")
    storage = open_storage(place)
    exists = is_store(storage)
    if not exists and mode in ("r", "r+"):
        raise StoreNotFoundError(f"no store or zarr checkpoint at {storage.location}, and mode={mode!r} creates none")
    if exists and mode == "w-":
        raise StoreExistsError(f"there is a store at {storage.location} already; mode='a' opens it")
    if mode == "r":
        return TrajectoryStore(storage, read_only=True)
    make = functools.partial(
        TrajectoryStore,
        storage,
        read_only=False,
        segment_bytes=segment_bytes,
        queue_bytes=queue_bytes,
        max_trajectories=max_trajectories,
    )
    storage.lock()
    try:
        return _open_for_writing(storage, make, exists=exists, overwrite=mode == "w")
    except BaseException:
        storage.unlock()
        raise


def _open_for_writing(storage: Storage, make: "Callable[[], TrajectoryStore]", *, exists: bool, overwrite: bool) -> "TrajectoryStore":
    """The store, by `make`, of a storage that is locked; `overwrite`: empty, whatever was there."""
    if not exists:
        create(storage)
    try:
        store = make()
    except CorruptionError:
        if not overwrite:
            raise
        erase(storage)
        create(storage)
        store = make()
    if overwrite:
        store.clear()  # segment numbers go on, so that readers do not take new ones for old ones
        storage.delete("metadata.json")
    return store


class TrajectoryStore(StoreView):
    """Trajectories in compressed chunks. Thread-safe; one writer, any number of readers. `trajstore.open` makes one.

    In a forked child a store can be read, but not written.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        read_only: bool,
        segment_bytes: int = SEGMENT_BYTES,
        queue_bytes: int = QUEUE_BYTES,
        max_trajectories: int | None = None,
    ) -> None:
        super().__init__(storage)
        self.read_only = read_only
        self._segment_bytes = segment_bytes
        self._max_trajectories = max_trajectories
        self._publishing = threading.Lock()
        self._changing = threading.RLock()  # held by what changes more than the newest end: staging, deletion, compaction
        self._writing: set[int] = set()
        self._committed = set(np.unique(self._index.column("segment")).tolist())
        self._is_published = True
        self._published_at = time.monotonic()
        self._closed = self._is_unlocked = False
        self._pid = os.getpid()
        self._writer = Writer(
            functools.partial(encode_segment, recover=True),
            commit=self._commit,
            after_commit=self._settle,
            lock=self._lock,
            segment_bytes=segment_bytes,
            queue_bytes=queue_bytes,
        )
        if not read_only:
            self._remove_leftovers()
            self._limit()
        _open_stores.add(self)

    # ---- adding

    def append(self, trajectory: object) -> int:
        """Adds one trajectory; see `extend`. Returns its id."""
        return self.extend([trajectory])[0]

    def extend(self, trajectories: Iterable[object]) -> list[int]:
        """Adds trajectories, or objects with their attributes. Each is copied once; `flush` returns when they are durable.

        They can be read and sampled at once. None is added if one is not acceptable.

        Returns:
            Their ids.

        Raises:
            InvalidTrajectoryError, UnsupportedTypeError: One can't be stored.
            StorageError: An earlier one could not be written; it stays queued, and writing is tried again.
        """
        self.check_writable()
        return [self._put(prepared.pack()) for prepared in [prepare(trajectory) for trajectory in trajectories]]

    def _put(self, packed: Packed) -> int:
        return self._writer.put(packed, lambda: self._assign(packed))

    def _assign(self, packed: Packed) -> int:
        trajectory_id = self._index.append(packed.header, packed.schema)
        self._version += 1
        self._limit()
        return trajectory_id

    def _limit(self) -> None:
        """Takes the oldest out of the index beyond `max_trajectories`; files go with the next publication."""
        surplus = len(self._index) - self._max_trajectories if self._max_trajectories is not None else 0
        if surplus > 0:
            self._remove(np.arange(surplus))

    def _remove(self, positions: Ints) -> None:
        self._writer.discard(self._index.column("id")[positions].tolist())
        self._index.remove(positions)
        self._is_published = False
        self._version += 1

    def _commit(self, encoded: EncodedSegment) -> None:
        """Makes a batch durable; runs on the writer's thread."""
        with self._lock:
            number = self._take_number()
            self._writing.add(number)
        try:
            info = write_segment(self.storage, number, encoded)
        except BaseException:
            with contextlib.suppress(OSError):
                delete_segment(self.storage, number)
            with self._lock:
                self._writing.discard(number)
            raise
        with self._lock:
            self._committed.add(number)
            gone = self._index.place(info.entries, segment=number)
            self._is_published = self._is_published and not gone  # what was deleted meanwhile must not come back on recovery
            self._writing.discard(number)
            self._version += 1

    def _settle(self) -> None:
        """Publishes the index if it is due; runs on the writer's thread after a commit."""
        if not self._is_published or time.monotonic() - self._published_at > PUBLISH_INTERVAL_S:
            self._publish()

    def _take_number(self) -> int:
        with self._lock:
            number = self._index.next_segment
            self._index.next_segment = number + 1
            return number

    def _publish(self) -> None:
        """Publishes the index, then deletes segments of which nothing lives."""
        with self._publishing:
            with self._lock:
                # segments that are being written are found by their numbers later, so these bound what the index knows
                index = self._index.committed(next_segment=min(self._writing, default=self._index.next_segment))
                generation = self._generation + 1
                self._is_published = True
            try:
                publish(self.storage, index, generation=generation)
            except BaseException:
                self._is_published = False
                self._generation = generation  # it may be the current one already, so it is not written again
                raise
            with self._lock:
                self._generation = generation
                self._published_at = time.monotonic()
                dead = self._committed - set(np.unique(index.column("segment")).tolist())
                dead -= set(np.unique(self._index.column("segment")).tolist())
                self._committed -= dead
                for number in dead:
                    self._segments.pop(number, None)
            self._delete_segments(dead)

    def _delete_segments(self, numbers: set[int]) -> None:
        """Deletes segments that no index lists. What can't be deleted now is tried again with the next publication."""
        for number in sorted(numbers):
            try:
                delete_segment(self.storage, number)
            except OSError as error:
                logger.warning("segment %d is not needed any more, but can't be deleted now: %s", number, error)
                with self._lock:
                    self._committed.add(number)

    def flush(self) -> None:
        """Returns when all that was added is durable.

        Raises:
            StorageError: Something could not be written. It stays queued; calling again tries again.
            ClosedError: Something could not be written when the store was closed; others may write to it now.
        """
        if self._is_unlocked and not self._writer.is_empty:
            raise ClosedError(f"store {self.storage.location} was closed before all that was added could be written")
        if self._owns_writer():
            self._writer.flush()

    def close(self) -> None:
        """Flushes, publishes the index and lets other writers in. Reading goes on working; adding raises `ClosedError`."""
        was_open, self._closed = not self._closed, True
        if not was_open or not self._owns_writer():
            return
        with self._changing:
            try:
                self._writer.close()
                self._publish()
            finally:
                self._is_unlocked = True
                self.storage.unlock()

    def __enter__(self) -> "TrajectoryStore":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def next_id(self) -> int:
        """The id that the next trajectory gets."""
        return self._index.next_id

    def stop_writer(self) -> None:
        """Flushes and ends the background thread, which starts again when something is added."""
        if self._owns_writer():
            self._writer.stop()

    def raise_failure(self) -> None:
        """Raises what went wrong in the background since the last call, if anything did."""
        self._writer.check()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._writer.forget_thread(self._lock)
        self._publishing, self._changing = threading.Lock(), threading.RLock()

    def _owns_writer(self) -> bool:
        return not self.read_only and os.getpid() == self._pid

    def check_writable(self) -> None:
        """Raises why the store can't be written, or what went wrong in the background since the last call."""
        if self.read_only:
            raise ReadOnlyError(f"store {self.storage.location} was opened with mode='r'; open it with 'r+' or 'a'")
        if os.getpid() != self._pid:
            raise ReadOnlyError(f"store {self.storage.location} belongs to process {self._pid}; a forked child may only read it")
        if self._closed:
            raise ClosedError(f"store {self.storage.location} is closed; open it again to write")
        self._writer.check()

    # ---- reading what is not written yet

    def _pending(self, trajectory_id: int, epoch: int) -> Packed:
        with self._lock:
            try:
                if epoch == self._epoch:
                    return self._writer.pending(trajectory_id)
                raise KeyError(trajectory_id)
            except KeyError:
                raise FileNotFoundError(f"trajectory {trajectory_id} was committed or deleted meanwhile") from None

    def refresh(self) -> None:
        """Sees what a writer in another process has committed or deleted since. A writer knows already."""
        if not self._owns_writer():
            super().refresh()

    # ---- deleting, linking, tidying

    def delete(self, trajectory_ids: Sequence[int]) -> None:
        """Deletes trajectories; segments of which none lives are removed from the disk.

        Raises:
            TrajectoryNotFoundError: One is not in the store; none is deleted then.
        """
        with self._changing:
            self.check_writable()
            with self._lock:
                self._remove(self._index.find(trajectory_ids))
            self._writer.settle()
            self._publish()

    def keep_last(self, count: int) -> None:
        """Deletes all but the newest trajectories."""
        if count < 0:
            raise InvalidRequestError(f"keep_last({count}): expected 0 or more")
        with self._changing:
            surplus = self.ids[: max(0, len(self) - count)]
            if surplus:
                self.delete(surplus)

    def clear(self) -> None:
        """Deletes everything; ids start at 0 again."""
        with self.staging(replace_contents=True):
            pass

    def link_from(self, other: StoreView, *, ids: Sequence[int] | None = None) -> list[int]:
        """Takes trajectories of another store over without decoding them, by hard links where both are on one file system.

        Args:
            other: The store to take from; what it has queued is flushed first.
            ids: Which, in the order in which they are to be added; None: all.

        Returns:
            Their new ids.

        Raises:
            TrajectoryNotFoundError: One is not in the other store; none is taken then.
            InvalidRequestError: An id is named twice.
        """
        with self.staging() as staging:
            wanted = other.ids if ids is None else list(ids)
            if len(set(wanted)) != len(wanted):
                raise InvalidRequestError(f"ids={wanted}: a trajectory is named twice")
            with self._lock:
                new_ids = list(range(self._index.next_id, self._index.next_id + len(wanted)))
                self._index.next_id += len(wanted)
            staging.link_all(other, dict(zip(wanted, new_ids, strict=True)))
        return new_ids

    @contextlib.contextmanager
    def staging(self, *, replace_contents: bool = False, next_id: int = 0) -> Iterator[Staging]:
        """What is staged in this context is added at its end, in order and all at once; nothing is if it fails.

        Args:
            replace_contents: What the store holds now goes in the same instant.
            next_id: The id that the next trajectory gets at the least.
        """
        with self._changing:
            self.check_writable()
            staging = Staging(self.storage, self._take_number, self._segment_bytes)
            try:
                yield staging
                staging.write()
            except BaseException:
                staging.abandon()
                raise
            with self._writer.paused():  # a commit would publish what may have to be taken back, or be placed under a new id
                before = self._adopt(staging, replace_contents=replace_contents, next_id=next_id)
                try:
                    self._publish()
                except BaseException:
                    self._take_back(staging, before if replace_contents else None)
                    raise

    def _adopt(self, staging: Staging, *, replace_contents: bool, next_id: int) -> Index:
        """Puts what was staged into the index, in memory; returns the index before."""
        with self._lock:
            if replace_contents:
                self._writer.discard_all()
            before = self._index
            if replace_contents:
                self._index = Index()
                self._index.next_segment = before.next_segment
                self._epoch += 1
            for row in staging.ordered_rows():
                self._index.extend([row.entry], segment=row.segment, schema=row.schema)
            self._index.next_id = max(self._index.next_id, next_id)
            self._limit()
            self._committed.update(staging.numbers)
            self._version += 1
            return before

    def _take_back(self, staging: Staging, before: Index | None) -> None:
        """Undoes what could not be published; `before`: what it had replaced."""
        with self._lock:
            if before is None:
                staged = [row.entry.trajectory_id for row in staging.rows]
                self._remove(np.flatnonzero(np.isin(self._index.column("id"), staged)))
            else:
                self._writer.discard_all()  # what was added since has ids that mean others again
                self._index = before.committed(next_segment=self._index.next_segment)
                self._epoch += 1
                self._version += 1
        with contextlib.suppress(OSError):
            self._publish()  # the disk may know of it already

    def compact(self) -> int:
        """Joins small segments, and drops what is dead from segments that are mostly dead.

        Returns:
            How many segments were replaced.
        """
        self.flush()
        with self._changing:
            self.check_writable()
            selection = self.newest(0)
            chosen = worth_compacting(self, selection, segment_bytes=self._segment_bytes)
            staging = Staging(self.storage, self._take_number, self._segment_bytes)
            try:
                for row in chosen.tolist():
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, by the limit; else reading it says so
                        staging.add(int(selection.ids[row]), self.packed(selection, row))
                staging.write()
            except BaseException:
                staging.abandon()
                raise
            with self._lock:
                for number in staging.numbers:
                    self._index.place([row.entry for row in staging.rows if row.segment == number], segment=number)
                self._committed.update(staging.numbers)
                self._version += 1
            self._publish()
            return len(np.unique(selection.segments[chosen]))

    def verify(self, *, quick: bool = False) -> list[Fault]:
        """Compares what is stored with its checksums; `quick` compares sizes and indexes only. Returns what is wrong."""
        self.flush()
        return list(find_faults(self, quick=quick))

    def _remove_leftovers(self) -> None:
        """Removes what a killed writer left: segments and index generations that nothing lists, temporary files."""
        for number in sorted(set(self._segment_numbers()) - self._committed):
            delete_segment(self.storage, number)
            self._index.next_segment = max(self._index.next_segment, number + 1)
        for name in self.storage.list(INDEX):
            if name not in ("zarr.json", str(self._generation)):
                self.storage.delete(f"{INDEX}/{name}")
        for name in self.storage.list(""):
            if name.endswith(".tmp"):
                self.storage.delete(name)


@atexit.register
def _close_all() -> None:
    """Writes what is queued when the interpreter ends."""
    for store in list(_open_stores):
        try:
            store.close()
        except Exception:
            logger.exception("%r could not be written at the end", store)
