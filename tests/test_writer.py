"""The background writer: nothing is lost, nothing is silent, nothing grows without bound."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_same_trajectory, make

import trajstore
from trajstore.packing import prepare
from trajstore.storage import MemoryStorage


class Disk(MemoryStorage):
    """Memory that can be full, and slow."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, key: str, *parts: bytes) -> None:
        self.may_write.wait()
        if self.is_full:
            raise trajstore.StorageError(28, f"can't write {key!r}: No space left on device")
        super().write(key, *parts)

    replace = write


@pytest.fixture(params=["ahead", "in turn"], autouse=True)
def encoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of these tests are too small to be encoded ahead, unless the limit goes."""
    if request.param == "ahead":
        monkeypatch.setattr("trajstore.writer.AHEAD_BYTES", 1)


def append_until_it_fails(store: trajstore.TrajectoryStore) -> None:
    for _ in range(1000):
        store.append(make(seed=2))
        time.sleep(0.01)


def test_a_full_disk_is_told_and_nothing_is_lost() -> None:
    disk = Disk()
    with trajstore.open(disk) as store:
        store.append(make(seed=0))
        store.flush()
        disk.is_full = True
        store.append(make(seed=1))
        with pytest.raises(trajstore.StorageError, match="No space left"):
            store.flush()
        assert_same_trajectory(make(seed=1), store.read(1))
        assert len(store.sampler().sample(36)["actions"]) == 36
        with pytest.raises(OSError, match="No space left"):
            append_until_it_fails(store)
        disk.is_full = False
        store.flush()
        count = len(store)
        assert store.verify() == []
    with trajstore.open(disk, mode="r") as store:
        assert len(store) == count
        assert_same_trajectory(make(seed=1), store.read(1))


def test_every_method_of_the_buffer_raises_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = trajstore.TrajectoryReplayBuffer()
    buffer.add_trajectories([make()])
    buffer.flush()
    calls = [
        lambda: buffer.sample(2),
        buffer.get_stats,
        lambda: buffer.is_ready(1),
        buffer.flush,
        lambda: buffer.add_trajectories([make()]),
        buffer.clear,
        buffer.clear_cache,
        lambda: buffer.save_checkpoint("/nowhere/at/all"),
    ]
    for call in calls:
        monkeypatch.setattr("trajstore.store.write_segment", lambda *_, **__: 1 / 0)
        buffer.add_trajectories([make()])
        deadline = time.monotonic() + 20
        while buffer.store._writer._failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(ZeroDivisionError):
            call()
        monkeypatch.undo()
        buffer.flush()
    buffer.close()


def test_the_queue_is_bounded() -> None:
    disk = Disk()
    one = prepare(make()).pack().nbytes
    with trajstore.open(disk, queue_bytes=3 * one) as store:
        disk.may_write.clear()
        done = threading.Event()
        thread = threading.Thread(target=lambda: (store.extend([make()] * 8), done.set()))
        thread.start()
        assert not done.wait(0.5)
        assert len(store) == 3
        disk.may_write.set()
        assert done.wait(20)
        thread.join()
        assert len(store) == 8


def test_a_trajectory_larger_than_the_queue_is_taken() -> None:
    with trajstore.open(MemoryStorage(), queue_bytes=1) as store:
        store.extend([make(seed=1), make(seed=2)])
        assert_same_trajectory(make(seed=2), store.read(1))


def test_trajectories_that_wait_together_become_one_segment() -> None:
    disk = Disk()
    with trajstore.open(disk) as store:
        disk.may_write.clear()
        store.extend([make(seed=seed) for seed in range(5)] + [make(seed=9, image=6)])
        disk.may_write.set()
        store.flush()
        numbers = store.newest(0).segments.tolist()
    assert numbers[0] <= 1
    assert len(set(numbers)) <= (4 if trajstore.writer.AHEAD_BYTES == 1 else 3)  # the first is taken alone, and one more if ahead
    assert numbers[-1] != numbers[-2]


def test_batches_are_committed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    encoded: list[list[int]] = []
    all_are_queued = threading.Event()
    real = trajstore.store.encode_segment

    def encode(batch: Any, **kwargs: Any) -> Any:
        assert all_are_queued.wait(20)
        encoded.append([trajectory_id for trajectory_id, _ in batch])
        return real(batch, **kwargs)

    monkeypatch.setattr("trajstore.store.encode_segment", encode)
    with trajstore.open(disk, segment_bytes=1) as store:
        disk.may_write.clear()
        store.extend([make(seed=seed) for seed in range(4)])
        all_are_queued.set()
        deadline = time.monotonic() + 20
        while len(encoded) < (2 if trajstore.writer.AHEAD_BYTES == 1 else 1):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        disk.is_full = True
        disk.may_write.set()
        with pytest.raises(trajstore.StorageError):
            store.flush()
        disk.may_write.clear()
        disk.is_full = False
        threading.Timer(0.2, disk.may_write.set).start()
        store.delete([1, 3])  # of which one may be encoded already
        store.append(make(seed=4))
        store.flush()
        assert store.ids == [0, 2, 4]
        assert store.newest(0).segments.tolist() == sorted(store.newest(0).segments.tolist())
        for trajectory_id in store.ids:
            assert_same_trajectory(make(seed=trajectory_id), store.read(trajectory_id))
    with trajstore.open(disk, mode="r") as store:
        assert store.ids == [0, 2, 4]
        assert sorted(store._segment_numbers()) == sorted(set(store.newest(0).segments.tolist()))


def test_closing(tmp_path: Path) -> None:
    store = trajstore.open(tmp_path / "s")
    store.append(make())
    store.close()
    store.close()
    assert_same_trajectory(make(), store.read(0))
    assert len(store.sampler(cache_size=1).sample(3)["actions"]) == 3
    with pytest.raises(trajstore.ClosedError, match="open it again"):
        store.append(make())
    with pytest.raises(RuntimeError):
        store.delete([0])
    trajstore.open(tmp_path / "s").close()


def test_closing_on_a_full_disk_says_so_and_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = trajstore.open(tmp_path / "s")
    monkeypatch.setattr("trajstore.store.write_segment", lambda *_, **__: 1 / 0)
    store.append(make())
    with pytest.raises(ZeroDivisionError):
        store.close()
    monkeypatch.undo()
    with trajstore.open(tmp_path / "s") as store:
        assert len(store) == 0
        assert [path.name for path in (tmp_path / "s" / "segments").iterdir()] == ["zarr.json"]


def test_clearing_while_a_commit_runs(tmp_path: Path) -> None:
    disk = Disk()
    with trajstore.open(disk) as store:
        disk.may_write.clear()
        store.append(make(seed=1))
        time.sleep(0.05)
        threading.Timer(0.2, disk.may_write.set).start()
        store.clear()
        assert store.append(make(seed=2)) == 0
        store.flush()
        assert_same_trajectory(make(seed=2), store.read(0))
    with trajstore.open(disk, mode="r") as store:
        assert store.ids == [0]
        assert_same_trajectory(make(seed=2), store.read(0))


def test_deleting_what_is_being_committed() -> None:
    disk = Disk()
    with trajstore.open(disk) as store:
        disk.may_write.clear()
        store.extend([make(seed=1), make(seed=2)])
        time.sleep(0.05)
        threading.Timer(0.2, disk.may_write.set).start()
        store.delete([0])
        store.flush()
        assert store.ids == [1]
    with trajstore.open(disk, mode="r") as store:
        assert store.ids == [1]


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import trajstore
from conftest import make
store = trajstore.open({path!r})
{work}
"""


def run_child(path: Path, work: str, **options: Any) -> subprocess.Popen[str]:
    code = CHILD.format(tests=str(Path(__file__).parent), path=str(path), work=work)
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True, **options)


def test_what_was_added_is_written_when_the_interpreter_ends(tmp_path: Path) -> None:
    child = run_child(tmp_path / "s", "store.extend([make(seed=seed, image=60, steps=40) for seed in range(5)])")
    assert child.wait(60) == 0
    child.communicate()
    with trajstore.open(tmp_path / "s") as store:
        assert len(store) == 5
        assert_same_trajectory(make(seed=4, image=60, steps=40), store.read(4))


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.1])
def test_what_flush_acknowledged_survives_a_kill(tmp_path: Path, delay_s: float) -> None:
    work = """
for seed in range(10000):
    store.append(make(seed=seed))
    if seed % 3 == 2:
        store.flush()
        print(seed, flush=True)
"""
    child = run_child(tmp_path / "s", work)
    assert child.stdout is not None
    first = child.stdout.readline()
    time.sleep(delay_s)
    os.kill(child.pid, signal.SIGKILL)
    acknowledged = int((child.stdout.read().split() or [first])[-1])
    child.wait()
    child.stdout.close()
    with trajstore.open(tmp_path / "s", mode="r") as store:
        ids = store.ids
        assert ids == list(range(len(ids)))
        assert len(ids) > acknowledged
        for trajectory_id in ids:
            assert_same_trajectory(make(seed=trajectory_id), store.read(trajectory_id))
    with trajstore.open(tmp_path / "s") as store:
        assert store.ids == ids
        assert store.append(make()) == len(ids)
        on_disk = {path.name for path in (tmp_path / "s" / "segments").iterdir() if path.is_dir()}
        store.flush()
        assert {int(name) for name in on_disk} <= set(store.newest(0).segments.tolist())
        assert not list((tmp_path / "s").rglob("*.tmp"))


def test_a_forked_child_reads_and_may_not_write(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        expected = make(seed=1, image=60, steps=30)
        store.append(expected)
        store.flush()
        store.append(make(seed=2, image=60, steps=30))
        store.sampler().sample(50)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert_same_trajectory(expected, store.read(0))
                store.sampler(seed=1).sample(64)
                try:
                    store.append(expected)
                except trajstore.ReadOnlyError:
                    store.close()
                    status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(trajstore.LockedError):
            trajstore.open(tmp_path / "s")
        store.append(make(seed=3))
    assert len(trajstore.open(tmp_path / "s", mode="r")) == 3
