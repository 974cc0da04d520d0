"""Files as memory: no descriptors, and memory that lives as long as an array refers to it."""

import gc
import os
import resource
import sys
from pathlib import Path

import pytest
import torch

import trajstore
from trajstore.local_storage import LocalStorage
from trajstore.mapping import map_file
from trajstore.packing import prepare


def test_a_map_outlives_its_file_and_its_storage(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("x", b"abc" * 5000)
    part = storage.view("x")[3:6]
    storage.delete("x")
    del storage
    gc.collect()
    assert part.tobytes() == b"abc"
    assert not part.flags.writeable


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_map_goes_with_its_last_array(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(b"x" * 9000)
    with path.open("rb") as file:
        part = map_file(file.fileno(), 9000)[10:20]
    assert str(path) in Path("/proc/self/maps").read_text()
    assert len(part) == 10
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_an_empty_file_and_one_that_can_not_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert len(LocalStorage(tmp_path).view("empty")) == 0
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match=r"\[Errno"):
        map_file(descriptor, 10)
    os.close(descriptor)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_a_batch_over_more_files_than_there_may_be_descriptors(tmp_path: Path) -> None:
    row = torch.zeros(2, 1, 1)
    packed = prepare(trajstore.Trajectory(actions=row, extras={f"f{i}": row for i in range(9)})).pack()
    with trajstore.open(tmp_path) as store:
        with store.staging() as staging:
            for number in range(20):
                staging.add(number, packed)
                staging.write()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
        try:
            assert len(store.sampler().sample(40)["actions"]) == 40
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
