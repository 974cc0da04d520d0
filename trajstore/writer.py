"""The background thread that commits trajectories, and its bounded queue."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from trajstore.errors import ClosedError
from trajstore.memory import TRAJECTORIES
from trajstore.packing import Packed
from trajstore.threads import start_ahead, step_back

Batch: TypeAlias = Sequence[tuple[int, Packed]]
"""Trajectories (id, packed) of one schema."""
Encoded = TypeVar("Encoded")
"""What a batch is encoded to."""

AHEAD_BYTES = 16 * 1024 * 1024
"""A batch of so many raw bytes is encoded while the one before it is written; smaller ones wait, so that they can grow."""

IDLE_S = 5.0
"""The thread ends after so long without work; the next trajectory starts one."""


class Ahead(NamedTuple, Generic[Encoded]):
    """A batch that is encoded before its turn."""

    batch: Batch
    encoded: "Future[Encoded]"


class Writer(Generic[Encoded]):
    """Commits queued trajectories in order, in groups of one schema.

    A failed commit leaves its trajectories queued and readable. The failure is raised once, by the next call of `check`, `put` or `flush`;
    then the commit is tried again.

    Args:
        encode: Does the work on a batch that touches neither storage nor store.
        commit: Makes an encoded batch durable; called on the thread, in order.
        after_commit: What is to be done once it is; a failure is raised as one of `commit` is, but the batch is not tried again.
        lock: Guards the queue; shared with the owner, so that queue and index change together.
        segment_bytes: Raw bytes of a group; at least one trajectory is taken.
        queue_bytes: Raw bytes that the queue may hold before `put` waits.
    """

    def __init__(
        self,
        encode: Callable[[Batch], Encoded],
        *,
        commit: Callable[[Encoded], None],
        after_commit: Callable[[], None],
        lock: threading.RLock,
        segment_bytes: int,
        queue_bytes: int,
    ) -> None:
        self._encode = encode
        self._commit = commit
        self._after_commit = after_commit
        self._changed = threading.Condition(lock)
        self._segment_bytes = segment_bytes
        self._queue_bytes = queue_bytes
        self._queue: dict[int, Packed] = {}
        self._nbytes = 0
        self._ahead: Ahead[Encoded] | None = None
        self._failure: BaseException | None = None
        self._is_committing = False
        self._num_commits = 0
        self._is_paused = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raises what went wrong since the last call, if anything did, and lets the thread try again."""
        with self._changed:
            failure, self._failure = self._failure, None
            if failure is not None:
                self._changed.notify_all()
                raise failure

    def pending(self, trajectory_id: int) -> Packed:
        """A trajectory that is not committed yet; the owner's lock must be held."""
        return self._queue[trajectory_id]

    def put(self, packed: Packed, assign_id: Callable[[], int]) -> int:
        """Queues a trajectory, waiting for room; `assign_id` is called under the lock once there is."""
        with self._changed:
            while self._queue and self._nbytes + packed.nbytes > self._queue_bytes and not self._closed:
                self.check()
                self._start()
                self._changed.wait()
            self.check()
            if self._closed:
                raise ClosedError("the store is closed; nothing can be added")
            trajectory_id = assign_id()
            self._queue[trajectory_id] = packed
            self._nbytes += packed.nbytes
            self._start()
            self._changed.notify_all()
            return trajectory_id

    @property
    def is_empty(self) -> bool:
        """Whether all that was queued is durable."""
        return not self._queue

    def forget_thread(self, lock: threading.RLock) -> None:
        """In a forked child, which has neither the thread nor whoever holds the old lock: the queue can be read under a new one."""
        self._changed, self._thread, self._is_committing, self._ahead = threading.Condition(lock), None, False, None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trajstore-writer", daemon=True)
            self._thread.start()

    def discard(self, trajectory_ids: Iterable[int]) -> None:
        """Takes trajectories out of the queue; one that is being committed is found to be gone when it is placed."""
        with self._changed:
            self._drop(trajectory_ids)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the commit that runs; none begins before the end of this context. Adding goes on."""
        try:
            with self._changed:
                self._is_paused = True
                self.settle()
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def discard_all(self) -> None:
        """Empties the queue; while the writer is paused, so that ids may be given anew afterwards."""
        with self._changed:
            self._drop(list(self._queue))

    def settle(self) -> None:
        """Waits for the commit that runs, if one does; not for those that follow, which may never end."""
        with self._changed:
            number = self._num_commits
            while self._is_committing and self._num_commits == number:
                self._changed.wait()

    def flush(self) -> None:
        """Waits until all that was queued is durable; raises the failure if it can't be."""
        with self._changed:
            while self._queue:
                self.check()
                self._start()
                self._changed.wait()
            self.check()

    def stop(self) -> None:
        """Flushes and ends the thread, even when the flush fails; the next `put` starts one."""
        try:
            self.flush()
        finally:
            with self._changed:
                thread, self._thread = self._thread, None
                self._changed.notify_all()
            if thread is not None:
                thread.join()

    def close(self) -> None:
        """Stops for good: what is added from now on is refused."""
        with self._changed:
            self._closed = True
        self.stop()

    def _run(self) -> None:
        step_back()
        while self._commit_next():
            pass

    def _commit_next(self) -> bool:
        """Commits a batch once there is one; False when the thread is to end. What it holds is let go before the next wait."""
        with self._changed:
            if not self._wait_for_work():
                return False
            ahead, self._ahead = self._ahead, None
            if ahead is not None and not self._is_queued(ahead.batch):
                ahead = None
            batch = ahead.batch if ahead is not None else self._next_batch()
            self._is_committing = True
            self._num_commits += 1
        failure: BaseException | None = None
        try:
            encoded = ahead.encoded.result() if ahead is not None else self._encode(batch)
            self._encode_ahead(batch)
            self._commit(encoded)
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread by check
            failure = error
        with self._changed:
            self._is_committing = failure is None
            self._failure = failure
            self._ahead = self._ahead if failure is None else None  # the batch before it has to be tried again
            self._drop([] if failure else [trajectory_id for trajectory_id, _ in batch])
        if failure is None:
            self._finish()
        return True

    def _wait_for_work(self) -> bool:
        """Whether there is a batch; not if the thread was stopped, or idle for long, so that a store nobody refers to can go."""
        while self._thread is threading.current_thread():
            if self._queue and self._failure is None and not self._is_paused:
                return True
            if not self._changed.wait(IDLE_S) and not self._queue:
                self._thread = None
                TRAJECTORIES.release()
        return False

    def _finish(self) -> None:
        failure: BaseException | None = None
        try:
            self._after_commit()
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread by check
            failure = error
        with self._changed:
            self._is_committing = False
            self._failure = failure
            self._changed.notify_all()

    def _is_queued(self, batch: Batch) -> bool:
        """Whether all of a batch still waits; what was discarded must not be written, nor placed under an id that means another."""
        return all(self._queue.get(trajectory_id) is packed for trajectory_id, packed in batch)

    def _encode_ahead(self, before: Batch) -> None:
        """Begins to encode the batch that comes after another one, if it is large."""
        with self._changed:
            batch = self._next_batch(before)
            if sum(packed.nbytes for _, packed in batch) >= AHEAD_BYTES:
                encoded = start_ahead(self._encode, batch)
                self._ahead = Ahead(batch, encoded) if encoded is not None else None

    def _next_batch(self, before: Batch = ()) -> Batch:
        passed = {trajectory_id for trajectory_id, _ in before}
        batch: list[tuple[int, Packed]] = []
        nbytes = 0
        for trajectory_id, packed in self._queue.items():
            if trajectory_id in passed:
                continue
            nbytes += packed.nbytes
            if batch and (nbytes > self._segment_bytes or packed.schema != batch[0][1].schema):
                break
            batch.append((trajectory_id, packed))
        return batch

    def _drop(self, trajectory_ids: Iterable[int]) -> None:
        for trajectory_id in trajectory_ids:
            packed = self._queue.pop(trajectory_id, None)
            self._nbytes -= packed.nbytes if packed is not None else 0
        self._changed.notify_all()
