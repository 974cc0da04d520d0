"""One store on every kind of storage, and what a directory promises."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import zarr
from conftest import assert_same, assert_same_trajectory, make
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ZipStore

import trajstore
from trajstore.local_storage import LocalStorage
from trajstore.place import open_storage
from trajstore.storage import ByteRange, MemoryStorage
from trajstore.zarr_storage import ZarrStorage


@pytest.fixture(params=["local", "memory", "zarr memory", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "fsspec":
        pytest.importorskip("fsspec")
        yield FsspecStore.from_url(f"memory://{tmp_path.name}/store")
        return
    yield {"local": tmp_path / "store", "memory": MemoryStorage(), "zarr memory": MemoryStore()}[request.param]


@pytest.mark.filterwarnings("ignore::UserWarning:zarr.storage._fsspec")  # fsspec's memory is not asynchronous
def test_a_store_on_every_storage(place: Any) -> None:
    added = [make(seed=seed, image=40) for seed in range(3)]
    with trajstore.open(place) as store:
        store.extend(added)
        store.flush()
        expected = store.sampler(seed=1).sample(30)
        store.delete([0])
        assert store.compact() in (0, 1, 2)
    with trajstore.open(place, mode="r") as store:
        assert store.ids == [1, 2]
        assert_same_trajectory(added[2], store.read(2))
        assert store.verify() == []
        assert_same(store.sampler(seed=2).sample(9), store.sampler(seed=2, cache_size=2).sample(9))
    with trajstore.open(MemoryStorage()) as other:
        other.extend(added)
        assert_same(other.sampler(seed=1).sample(30), expected)
    with trajstore.open(place, mode="w") as store:
        assert len(store) == 0


def test_a_store_in_a_zip(tmp_path: Path) -> None:
    added = [make(seed=seed, image=40) for seed in range(3)]
    with trajstore.open(tmp_path / "s") as store:
        store.extend(added)
    (tmp_path / "s" / ".lock").unlink()
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "s")
    with trajstore.open(ZipStore(archive, mode="r"), mode="r") as store:
        for trajectory_id, trajectory in enumerate(added):
            assert_same_trajectory(trajectory, store.read(trajectory_id))
        with trajstore.open(tmp_path / "s", mode="r") as local:
            assert_same(store.sampler(seed=4).sample(40), local.sampler(seed=4).sample(40))


def test_a_zip_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(trajstore.StorageError, match="can only be read there"):
        trajstore.open(ZipStore(tmp_path / "x.zip", mode="w"))


class CountingStore(MemoryStore):
    """Notes what is read."""

    reads: list[tuple[str, Any]]

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        self.reads.append((key, byte_range))
        return await super().get(key, prototype, byte_range)


def test_a_remote_batch_reads_only_the_chunks_it_needs() -> None:
    remote = CountingStore()
    remote.reads = []
    with trajstore.open(remote) as store:
        store.append(make(image=60, steps=20, envs=4))
        store.flush()
        sampler = store.sampler()
        sampler.sample(2)
        remote.reads.clear()
        sampler.sample(2, fields=["curr_obs/main_images"])
    assert 1 <= len(remote.reads) <= 2
    assert all(byte_range is not None for _, byte_range in remote.reads)


def test_a_zarr_local_store_goes_the_fast_way(tmp_path: Path) -> None:
    assert isinstance(open_storage(LocalStore(tmp_path)), LocalStorage)
    assert isinstance(open_storage(MemoryStore()), ZarrStorage)
    with trajstore.open(str(tmp_path / "s")) as store:
        store.append(make())
    group = zarr.open_group(tmp_path / "s" / "segments" / "0", mode="r")
    assert group["actions"].shape == (18, 2)


@pytest.fixture(params=[MemoryStorage, lambda: ZarrStorage(MemoryStore()), None], ids=["memory", "zarr", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param() if request.param else LocalStorage(tmp_path / "root")


def test_verbs(storage: Any) -> None:
    assert list(storage.list("")) == []
    storage.write("a/b/c", b"0123456789")
    storage.write("a/d", b"")
    storage.replace("a/b/c", b"abcdefghij")
    assert storage.read("a/b/c") == b"abcdefghij"
    assert (storage.size("a/b/c"), storage.size("a/d")) == (10, 0)
    assert sorted(storage.list("a")) == ["b", "d"]
    assert list(storage.list("a/none")) == []
    ranges = [ByteRange("a/b/c", 2, 3), ByteRange("a/b/c", 0, 1), ByteRange("a/b/c", 8, 9)]
    assert [bytes(found) for found in storage.fetch(ranges)] == [b"cde", b"a", b"ij"]
    storage.link("x/y", storage, "a/b/c")
    storage.delete("a")
    storage.delete("a")
    assert storage.read("x/y") == b"abcdefghij"
    for missing in (lambda: storage.read("a/d"), lambda: storage.size("a/d"), lambda: storage.fetch([ByteRange("a/d", 0, 1)])):
        with pytest.raises(FileNotFoundError):
            missing()


def test_replace_waits_until_all_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    storage = LocalStorage(tmp_path / "root")
    monkeypatch.setattr("trajstore.local_storage.sync_folder", lambda folder: events.append(f"folder {folder.name}"))
    monkeypatch.setattr(
        "trajstore.local_storage._write_synced", lambda path, parts: (events.append(path.name), path.write_bytes(b"".join(parts)))
    )
    storage.write("s/a/x", b"1")
    storage.replace("s/doc", b"2")
    assert events[0] == "x"
    assert set(events[1:-2]) == {"folder s", "folder a", "folder root", f"folder {tmp_path.name}"}
    assert events[-2:] == [".doc.tmp", "folder s"]


def test_what_the_system_writes_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: write(descriptor, [b"".join(parts)[:1000]]))
    parts = [bytes([number % 251]) * (number % 13) for number in range(3000)]
    storage = LocalStorage(tmp_path)
    storage.write("x", *parts)
    storage.write("empty")
    monkeypatch.undo()
    storage.write("y", *parts)
    assert storage.read("x") == storage.read("y") == b"".join(parts)
    assert storage.read("empty") == b""


def test_files_on_another_file_system_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    source, target = LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")
    source.write("x", b"1")
    monkeypatch.setattr("os.link", refuse)
    target.link("y", source, "x")
    assert target.read("y") == b"1"


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    added = [make(seed=seed, image=40) for seed in range(4)]
    failures: list[BaseException] = []

    def read(store: Any, seed: int) -> None:
        try:
            for _ in range(10):
                assert_same(store.sampler(seed=seed).sample(20), expected[seed])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    with trajstore.open(tmp_path / "s", segment_bytes=1) as store:
        store.extend(added)
        expected = [store.sampler(seed=seed).sample(20) for seed in range(4)]
        threads = [threading.Thread(target=read, args=(store, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
