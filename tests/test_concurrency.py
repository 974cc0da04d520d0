"""What happens beside what: adding, committing, clearing, linking, compacting, deleting, reading, forking. Each case once went wrong."""

import gc
import os
import resource
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_same_trajectory, make

import trajstore
from trajstore import Trajectory
from trajstore.local_storage import LocalStorage
from trajstore.storage import MemoryStorage


class Disk(MemoryStorage):
    """Memory that can be held up, and refuse some keys."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.may_write.set()
        self.refused = "nothing"
        self.undeletable = "nothing"

    def write(self, key: str, *parts: bytes) -> None:
        self.may_write.wait()
        if key.startswith(self.refused):
            raise trajstore.StorageError(28, f"can't write {key}")
        super().write(key, *parts)

    replace = write

    def delete(self, prefix: str) -> None:
        if prefix == self.undeletable:
            raise trajstore.StorageError(39, "Directory not empty")
        super().delete(prefix)

    def killed(self) -> MemoryStorage:
        """What is there if the process is killed now."""
        after = MemoryStorage()
        after.objects = dict(self.objects)
        return after


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def started(work: Callable[[], Any], entered: threading.Event) -> threading.Thread:
    """A thread that does the work and has come to where it waits."""
    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(20)
    return thread


@pytest.fixture(autouse=True)
def encode_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small batches are."""
    monkeypatch.setattr("trajstore.writer.AHEAD_BYTES", 1)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def paused(monkeypatch: pytest.MonkeyPatch, target: str) -> tuple[threading.Event, threading.Event]:
    """Makes a function wait once it is entered: (it was entered, it may go on)."""
    module, _, name = target.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    entered, may_go = threading.Event(), threading.Event()

    def wait(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        assert may_go.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(target, wait)
    return entered, may_go


def test_a_batch_whose_index_can_not_be_written_is_not_written_twice(disk: Disk) -> None:
    with trajstore.open(disk) as store:
        store.append(make(seed=0))
        store.flush()
        store._is_published = False
        disk.refused = "index/"
        store.append(make(seed=1))
        with pytest.raises(trajstore.StorageError, match="can't write index"):
            wait_for(lambda: bool(store.flush()))
        store.flush()
        assert sorted(store.newest(0).segments.tolist()) == [0, 1]
        assert trajstore.open(disk.killed(), mode="r").ids == [0, 1]
        disk.refused = "nothing"


def test_what_is_added_while_a_clear_waits_is_cleared_or_new(disk: Disk) -> None:
    with trajstore.open(disk) as store:
        disk.may_write.clear()
        store.append(make(seed=0))
        wait_for(lambda: store._writer._is_committing)
        clearing = threading.Thread(target=store.clear)
        clearing.start()
        time.sleep(0.1)
        store.append(make(seed=1))
        disk.may_write.set()
        clearing.join()
        assert store.ids == []
        assert store.append(make(seed=2)) == 0
        assert_same_trajectory(make(seed=2), store.read(0))
        store.flush()
        assert_same_trajectory(make(seed=2), store.read(0))


def test_a_selection_from_before_a_clear_does_not_find_what_has_its_id_now(disk: Disk) -> None:
    with trajstore.open(disk) as store:
        disk.may_write.clear()
        store.append(make(seed=0))
        before = store.newest(0)
        threading.Timer(0.1, disk.may_write.set).start()
        store.clear()
        disk.may_write.clear()
        store.append(make(seed=1, steps=3))
        with pytest.raises(FileNotFoundError):
            store.groups(before, np.array([0]), steps=np.array([5]), envs=np.array([2]))
        disk.may_write.set()


def test_a_lost_shard_is_told_however_busy_the_store_is(disk: Disk) -> None:
    with trajstore.open(disk) as store:
        store.append(make(seed=0))
        store.flush()
        sampler = store.sampler()
        store._segments.clear()
        disk.delete("segments/0")
        stop = threading.Event()

        def change() -> None:
            while not stop.is_set():
                store._version += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for read in (lambda: store.read(0), lambda: store.gather([0], [0], [0]), lambda: sampler.sample(2)):
                with pytest.raises(trajstore.CorruptionError, match="is gone"):
                    read()
        finally:
            stop.set()
            thread.join()


def test_a_segment_that_can_not_be_deleted_is_deleted_later(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    with trajstore.open(disk) as store:
        for seed in range(2):
            store.append(make(seed=seed))
            store.flush()
        disk.undeletable = "segments/1"
        store.clear()
        assert store.ids == []
        assert "can't be deleted now" in caplog.text
        disk.undeletable = "nothing"
    assert not [key for key in disk.objects if key.startswith("segments/1/")]


def test_an_error_while_the_cache_makes_room_leaves_no_rows_that_were_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    added = [make(seed=0, steps=4), make(seed=1, steps=4), make(seed=2, steps=400)]
    with trajstore.open(MemoryStorage()) as store:
        store.append(added[0])
        cached = store.sampler(cache_size=50)
        cached.sample(4)
        store.extend(added[1:])
        with monkeypatch.context() as patch:
            patch.setattr("trajstore.cache._Ring._grow", lambda *_: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                cached.sample(4)
        known = {row.numpy().tobytes() for t in added for row in t.curr_obs["states"].reshape(-1, 4)}
        for _ in range(3):
            assert {row.numpy().tobytes() for row in cached.sample(300)["curr_obs"]["states"]} <= known


def test_linking_beside_a_clear_gives_no_id_twice(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with trajstore.open(MemoryStorage()) as source, trajstore.open(disk) as store:
        source.append(make(seed=9))
        store.extend([make(seed=0), make(seed=1)])
        store.flush()
        entered, may_go = paused(monkeypatch, "trajstore.staging.link_segment")
        linking = started(lambda: store.link_from(source), entered)
        clearing = threading.Thread(target=lambda: (store.clear(), store.extend([make(seed=seed) for seed in range(4)])))
        clearing.start()
        time.sleep(0.1)
        may_go.set()
        linking.join()
        clearing.join()
        assert store.ids == [0, 1, 2, 3]
    assert trajstore.open(disk, mode="r").ids == [0, 1, 2, 3]


def test_compacting_beside_a_clear_moves_nothing_of_another(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with trajstore.open(disk) as store:
        for seed in range(2):
            store.append(make(seed=seed))
            store.flush()
        entered, may_go = paused(monkeypatch, "trajstore.staging.write_segment")
        compacting = started(store.compact, entered)
        clearing = threading.Thread(target=lambda: (store.clear(), store.extend([make(seed=5), make(seed=6)])))
        clearing.start()
        time.sleep(0.1)
        may_go.set()
        compacting.join()
        clearing.join()
        store.flush()
        assert_same_trajectory(make(seed=5), store.read(0))
        assert_same_trajectory(make(seed=6), store.read(1))


def test_compacting_beside_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trajstore.open(tmp_path / "s", max_trajectories=3, segment_bytes=200_000) as store:
        for seed in range(3):
            store.append(make(seed=seed))
            store.flush()
        entered, may_go = paused(monkeypatch, "trajstore.store.worth_compacting")
        compacting = started(store.compact, entered)
        store.append(make(seed=3))
        store.flush()
        may_go.set()
        compacting.join()
        assert store.ids == [1, 2, 3]
        for seed in store.ids:
            assert_same_trajectory(make(seed=seed), store.read(seed))


def test_a_deleted_trajectory_does_not_come_back_after_a_kill(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with trajstore.open(disk) as store:
        store.append(make(seed=0))
        store.flush()
        real = trajstore.store.write_segment
        written = threading.Event()

        def write(*args: Any, **kwargs: Any) -> Any:
            info = real(*args, **kwargs)
            written.set()
            time.sleep(0.3)  # durable, but the store does not know it yet
            return info

        monkeypatch.setattr("trajstore.store.write_segment", write)
        trajectory_id = store.append(make(seed=1))
        assert written.wait(20)
        store.delete([trajectory_id])
        assert trajstore.open(disk.killed(), mode="r").ids == [0]


def test_draws_are_made_anew_when_ids_have_new_meanings() -> None:
    storage = MemoryStorage()
    with trajstore.open(storage) as writer:
        writer.append(make(seed=0, steps=12))
        writer.flush()
        reader = trajstore.open(storage, mode="r")
        sampler = reader.sampler()
        writer.clear()
        writer.append(make(seed=1, steps=3))
        writer.flush()
        assert len(sampler.sample(30)["actions"]) == 9


def test_a_trajectory_is_linked_once() -> None:
    with trajstore.open(MemoryStorage()) as source, trajstore.open(MemoryStorage()) as store:
        source.append(make())
        with pytest.raises(trajstore.InvalidRequestError, match="named twice"):
            store.link_from(source, ids=[0, 0])
        assert len(store) == 0


def test_the_remains_of_an_erased_store_do_not_come_back() -> None:
    storage = MemoryStorage()
    with trajstore.open(storage) as store:
        store.append(make())
    storage.delete("zarr.json")
    storage.delete("index")
    with trajstore.open(storage) as store:
        assert store.ids == []
        assert store.append(make(seed=1)) == 0


def test_a_folder_called_index_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "mine.txt").write_text("x")
    with pytest.raises(trajstore.NotAStoreError, match=r"index/mine\.txt"):
        trajstore.open(tmp_path)
    assert (tmp_path / "index" / "mine.txt").exists()


def test_what_could_never_be_written_is_refused_at_once() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    names: Any = torch.zeros(2, 1, 1)
    for _ in range(60):
        names = {"b" * 80: names}
    with trajstore.open(MemoryStorage()) as store:
        for extras, message in (({"x": deep}, "more than 50 deep"), (names, "nested too deeply")):
            with pytest.raises(trajstore.InvalidTrajectoryError, match=message):
                store.append(Trajectory(actions=torch.zeros(2, 1, 1), extras=extras))
        store.append(make())
        store.flush()


def test_a_store_nobody_refers_to_goes_with_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.writer.IDLE_S", 0.01)
    store = trajstore.open(MemoryStorage())
    store.append(make())
    store.flush()
    dropped = weakref.ref(store)
    del store
    wait_for(lambda: gc.collect() >= 0 and dropped() is None)


def test_an_idle_thread_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.writer.IDLE_S", 0.01)
    with trajstore.open(MemoryStorage()) as store:
        for seed in range(3):
            store.append(make(seed=seed))
            wait_for(lambda: store._writer._thread is None)
        assert store.newest(0).segments.tolist() == [0, 1, 2]


def test_two_threads_that_add_are_both_counted() -> None:
    with trajstore.TrajectoryReplayBuffer() as buffer:
        threads = [threading.Thread(target=lambda: [buffer.add_trajectories([make()]) for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (buffer.size, buffer.is_ready(80)) == (80, True)


def fork_and(action: Callable[[], object]) -> int:
    """The exit code of a forked child that does this; 99 if it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    for _ in range(2000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 99


def test_a_child_forked_while_locks_are_held_reads(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.append(make(seed=0))
        store.flush()
        sampler = store.sampler(cache_size=2)
        sampler.sample(3)
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with store._lock, sampler._lock, store.storage._mutex:
                held.set()
                done.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(20)
        code = fork_and(lambda: (store.read(0), sampler.sample(3), len(store)))
        done.set()
        thread.join()
        assert code == 0


def test_a_child_follows_a_parent_that_moves_things(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        for seed in range(2):
            store.append(make(seed=seed))
            store.flush()
        store._segments.clear()
        store.storage._maps.clear()
        readable, writable = os.pipe()

        def child() -> None:
            os.read(readable, 1)
            store.sampler().sample(4)

        threading.Timer(0.2, lambda: (store.compact(), os.write(writable, b"x"))).start()
        assert fork_and(child) == 0


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * used + 128, limits[1]))
    try:
        with trajstore.open(tmp_path / "s", segment_bytes=1) as store:
            store.extend([make(seed=seed) for seed in range(20)])
            store.flush()
            for seed in store.ids:
                assert_same_trajectory(make(seed=seed), store.read(seed))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_reader_of_a_store_that_another_takes_the_place_of(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.append(make(seed=0))
    reader = trajstore.open(tmp_path / "s", mode="r")
    sampler = reader.sampler(cache_size=1)
    sampler.sample(3)
    reader.read(0)
    shutil.rmtree(tmp_path / "s")
    with trajstore.open(tmp_path / "s") as store:
        store.append(make(seed=1))
    reader.refresh()
    assert_same_trajectory(make(seed=1), reader.read(0))
    rows = {row.numpy().tobytes() for row in make(seed=1).actions.reshape(-1, 2)}
    assert {row.numpy().tobytes() for row in sampler.sample(18)["actions"]} <= rows


def test_a_selection_of_one_does_not_change_with_the_table() -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.append(make(seed=0))
        before = store.newest(0)
        segments = before.segments.copy()
        store.flush()
        assert before.segments.tolist() == segments.tolist()


def test_a_segment_that_was_committed_twice_counts_once(disk: Disk) -> None:
    with trajstore.open(disk) as store:
        store.append(make(seed=0))
        store.flush()
        twice = {key.replace("segments/0/", "segments/1/"): data for key, data in disk.objects.items() if key.startswith("segments/0/")}
        after = disk.killed()
    after.objects |= twice
    with trajstore.open(after) as store:
        assert store.ids == [0]
        assert_same_trajectory(make(seed=0), store.read(0))


def test_linking_from_a_store_that_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trajstore.open(tmp_path / "a") as source, trajstore.open(tmp_path / "b") as target:
        for seed in range(3):
            source.append(make(seed=seed))
            source.flush()
        entered, may_go = paused(monkeypatch, "trajstore.staging.link_segment")
        linking = started(lambda: target.link_from(source), entered)
        source.compact()
        may_go.set()
        linking.join()
        assert target.ids == [0, 1, 2]
        for seed in range(3):
            assert_same_trajectory(make(seed=seed), target.read(seed))


def test_folders_made_while_others_are_synced_are_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    synced: list[Path] = []

    def sync(folder: Path) -> None:
        if not synced:
            storage.write("late/x", b"1")
        synced.append(folder)

    monkeypatch.setattr("trajstore.local_storage.sync_folder", sync)
    storage.write("early/x", b"1")
    storage.replace("doc", b"1")
    storage.replace("doc", b"2")
    assert tmp_path / "late" in synced


def test_a_link_to_what_is_gone_says_so(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with pytest.raises(FileNotFoundError):
        storage.link("a/b", storage, "gone")


def test_a_reader_of_a_store_that_is_removed_and_made_anew(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "store") as writer:
        writer.append(make(seed=0))
    with trajstore.open(tmp_path / "store", mode="r") as reader:
        reader.read(0)
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(trajstore.StoreNotFoundError, match="is gone"):
            reader.refresh()
        with trajstore.open(tmp_path / "store") as writer:
            writer.append(make(seed=1))
        reader.refresh()
        assert_same_trajectory(make(seed=1), reader.read(0))


def test_what_is_added_while_a_clear_fails_does_not_take_the_place_of_what_comes_back() -> None:
    reached, goes_on = threading.Event(), threading.Event()

    class Full(MemoryStorage):
        is_full = False

        def write(self, key: str, *parts: bytes) -> None:
            if self.is_full and key.startswith("index/") and not goes_on.is_set():
                reached.set()
                assert goes_on.wait(20)
                raise trajstore.StorageError(28, "No space left on device")
            super().write(key, *parts)

    disk = Full()
    with trajstore.open(disk) as store:
        store.append(make(seed=0))
        store.flush()
        disk.is_full = True
        failed: list[BaseException] = []

        def clear() -> None:
            try:
                store.clear()
            except trajstore.StorageError as error:
                failed.append(error)

        thread = threading.Thread(target=clear)
        thread.start()
        assert reached.wait(20)
        held, commit = threading.Event(), store._writer._commit

        def commit_later(batch: Any) -> None:
            assert held.wait(20)
            commit(batch)

        store._writer._commit = commit_later
        store.append(make(seed=7))
        goes_on.set()
        thread.join()
        held.set()
        store.flush()
        assert failed
        assert_same_trajectory(make(seed=0), store.read(0))


def test_deleting_and_clearing_end_beside_a_thread_that_never_stops_adding(tmp_path: Path) -> None:
    with trajstore.open(tmp_path, segment_bytes=1) as store:
        store.append(make())
        ended = threading.Event()

        def add() -> None:
            while not ended.is_set():
                store.append(make(steps=1))

        thread = threading.Thread(target=add)
        thread.start()
        try:
            done = threading.Event()
            threading.Thread(target=lambda: (store.delete([0]), store.clear(), done.set()), daemon=True).start()
            assert done.wait(60)
        finally:
            ended.set()
            thread.join()


def test_a_store_that_was_not_written_to_the_end_does_not_write_after_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise trajstore.StorageError(28, "No space left on device")

    disk = MemoryStorage()
    store = trajstore.open(disk)
    monkeypatch.setattr("trajstore.store.write_segment", refuse)
    store.append(make())
    with pytest.raises(trajstore.StorageError):
        store.close()
    monkeypatch.undo()
    before = dict(disk.objects)
    with pytest.raises(trajstore.ClosedError, match="before all that was added"):
        store.flush()
    assert disk.objects == before


def test_opening_anew_what_is_broken_keeps_the_limit_and_creating_keeps_the_files_of_others(tmp_path: Path) -> None:
    disk = MemoryStorage()
    trajstore.open(disk).close()
    disk.objects["index/zarr.json"] = b"{}"
    with trajstore.open(disk, mode="w", max_trajectories=1) as store:
        store.extend([make(), make()])
        assert store.ids == [1]
    (tmp_path / "metadata.json").write_text("mine")
    trajstore.open(tmp_path).close()
    assert (tmp_path / "metadata.json").read_text() == "mine"
