"""Checkpoints: what is saved comes back, a failure leaves what was there, and no file is trusted."""

import contextlib
import errno
import io
import json
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ALL_DTYPES, assert_same, assert_same_trajectory, make, random_tensor

import trajstore
from trajstore import (
    ClosedError,
    CorruptionError,
    InvalidRequestError,
    InvalidTrajectoryError,
    NotAStoreError,
    StorageError,
    StoreNotFoundError,
    Trajectory,
    TrajectoryReplayBuffer,
    TrajStoreError,
    UnsafeFileError,
)
from trajstore.index import read_generation
from trajstore.local_storage import LocalStorage

FORMS = pytest.mark.parametrize("form", ["pt", "pkl", "zarr"])
FILE_FORMS = pytest.mark.parametrize("form", ["pt", "pkl"])
PLACES = pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
INDEX = "trajectory_index.json"
NewBuffer = Callable[..., TrajectoryReplayBuffer]


@pytest.fixture
def new(tmp_path: Path) -> Iterator[NewBuffer]:
    """Makes buffers, which are closed at the end; those on disk have `own_0`, `own_1`, ... for their stores."""
    made: list[TrajectoryReplayBuffer] = []

    def build(*, on_disk: bool = False, **options: Any) -> TrajectoryReplayBuffer:
        if on_disk:
            options |= {"auto_save": True, "auto_save_path": tmp_path / f"own_{len(made)}"}
        made.append(TrajectoryReplayBuffer(**options))
        return made[-1]

    yield build
    for buffer in made:
        buffer.close()


def several() -> list[Trajectory]:
    """Trajectories that differ in T and B, but can be in one batch."""
    sizes = [(6, 3), (4, 1), (1, 2), (8, 2)]
    return [make(steps=steps, envs=envs, seed=seed, weights=f"w_{seed}") for seed, (steps, envs) in enumerate(sizes)]


def few(seed: int) -> Trajectory:
    """A trajectory of few fields, which makes few files of a store."""
    full = make(seed=seed, steps=seed + 1)
    return Trajectory(actions=full.actions, curr_obs={"states": full.curr_obs["states"]}, max_episode_length=seed)


def contents(buffer: TrajectoryReplayBuffer) -> dict[str, Any]:
    """All trajectories of a buffer, and what its index says of them."""
    ids = buffer._trajectory_id_list
    read = [vars(buffer._load_trajectory(trajectory_id)) for trajectory_id in ids]
    return {"ids": ids, "index": dict(buffer._trajectory_index), "trajectories": read, "counts": [len(buffer), buffer.total_samples]}


def state(buffer: TrajectoryReplayBuffer) -> dict[str, Any]:
    """All of a buffer that a failed load must leave as it was."""
    ready = [buffer.is_ready(count) for count in range(9)]
    sampling = [buffer.seed, buffer.random_generator.get_state()]
    return {**contents(buffer), "ready": ready, "sampling": sampling, "format": buffer.trajectory_format}


def draws(buffer: TrajectoryReplayBuffer) -> list[Any]:
    return [buffer.sample(count) for count in (9, 1, 40)]


@contextlib.contextmanager
def left_as_it_was(buffer: TrajectoryReplayBuffer) -> Iterator[None]:
    before = state(buffer)
    yield
    assert_same(before, state(buffer))


def on_the_disk(folder: Path) -> list[Any]:
    """What a store directory holds, read anew; nothing else may lie in it."""
    with trajstore.open(folder, mode="r") as store:
        assert store.verify() == []
        segments = set(store.select(store.ids).segments.tolist())
        assert {int(path.name) for path in (folder / "segments").iterdir() if path.is_dir()} == segments
        return [vars(store.read(trajectory_id)) for trajectory_id in store.ids]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file, in place or by what `change` returns."""
    document = json.loads(path.read_bytes())
    changed = change(document)
    path.write_text(json.dumps(document if changed is None else changed))


# ---- what is saved comes back


@FORMS
@PLACES
@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
def test_all_of_a_buffer_comes_back(new: NewBuffer, tmp_path: Path, form: str, on_disk: bool, to_disk: bool) -> None:
    saved = new(on_disk=on_disk, seed=3, trajectory_format=form)
    saved.add_trajectories(several())
    saved.sample(5)
    saved.save_checkpoint(tmp_path / "checkpoint")
    loaded = new(on_disk=to_disk, seed=4, cache_size=2)
    loaded.add_trajectories([make(seed=9)])
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert_same(state(saved), state(loaded))
    assert_same(draws(saved), draws(loaded))
    for buffer in (saved, loaded):
        buffer.add_trajectories([make(seed=8)])
    assert saved._trajectory_id_list == loaded._trajectory_id_list == [0, 1, 2, 3, 4]
    assert_same(draws(saved), draws(loaded))


@FORMS
def test_loading_twice_gives_the_same(new: NewBuffer, tmp_path: Path, form: str) -> None:
    buffer = new(trajectory_format=form)
    buffer.add_trajectories(several())
    buffer.save_checkpoint(tmp_path / "checkpoint")
    expected, batches = state(buffer), draws(buffer)
    for _ in range(2):
        buffer.load_checkpoint(tmp_path / "checkpoint")
        assert_same(expected, state(buffer))
        assert_same(batches, draws(buffer))


@FORMS
@PLACES
@pytest.mark.parametrize("has_sampled", [False, True])
def test_every_live_trajectory_is_saved(new: NewBuffer, tmp_path: Path, form: str, on_disk: bool, has_sampled: bool) -> None:
    buffer = new(on_disk=on_disk, sample_window_size=2, trajectory_format=form)
    buffer.add_trajectories(several())
    if has_sampled:
        buffer.sample(3)
    buffer.save_checkpoint(tmp_path / "checkpoint")
    loaded = new(sample_window_size=0)
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert loaded._trajectory_id_list == ([0, 1, 2, 3] if on_disk else [2, 3])
    assert_same(contents(buffer), contents(loaded))


@FORMS
def test_an_empty_buffer_and_one_with_gaps_come_back(new: NewBuffer, tmp_path: Path, form: str) -> None:
    buffer = new(trajectory_format=form)
    buffer.save_checkpoint(tmp_path / "checkpoint")
    buffer.add_trajectories(several())
    buffer.store.delete([0, 3])
    buffer.save_checkpoint(tmp_path / "gaps")
    loaded = new(on_disk=True)
    loaded.load_checkpoint(tmp_path / "gaps")
    assert loaded._trajectory_id_list == [1, 2]
    assert_same(contents(buffer), contents(loaded))
    loaded.add_trajectories([make()])
    assert loaded._trajectory_id_list == [1, 2, 4]
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert loaded._trajectory_id_list == []
    assert not loaded.is_ready(1)


@FORMS
def test_a_closed_buffer_can_be_saved_but_not_loaded_into(new: NewBuffer, tmp_path: Path, form: str) -> None:
    buffer = new(on_disk=True, trajectory_format=form)
    buffer.add_trajectories(several())
    buffer.close()
    buffer.save_checkpoint(tmp_path / "checkpoint")
    loaded = new()
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert_same(state(buffer), state(loaded))
    with left_as_it_was(buffer), pytest.raises(ClosedError):
        buffer.load_checkpoint(tmp_path / "checkpoint")


VALUES = {
    "text": "lift the cube, ü",
    "number": 3,
    "large": -(2**70),
    "float": 0.1,
    "infinite": float("-inf"),
    "nan": float("nan"),
    "none": None,
    "true": True,
    "complex": 1 - 2j,
    "bytes": b"\0\xff",
    "no bytes": b"",
    "empty": [],
    "nothing": {},
    "pair": (1, (2.5,)),
    "texts": ["a", ["b", None]],
    "in a list": [{1: "one", None: (2,)}],
    "scalar": torch.tensor(5),
    "line": torch.arange(4),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "rows": torch.zeros(6, 3, 2),
    "inner": {"deep": {"er": "x"}},
}


@FORMS
def test_values_of_every_kind_come_back(new: NewBuffer, tmp_path: Path, form: str) -> None:
    arrays = {"point": np.array(2.5), "row": np.arange(3), "rows": np.ones((6, 3, 2), np.int16)}
    trajectory = make()
    trajectory.curr_obs |= VALUES
    trajectory.extras = {**VALUES, "arrays": arrays}
    buffer = new(trajectory_format=form)
    buffer.add_trajectories([trajectory])
    buffer.save_checkpoint(tmp_path / "checkpoint")
    loaded = new()
    loaded.load_checkpoint(tmp_path / "checkpoint")
    trajectory.extras["arrays"] = {key: torch.from_numpy(array) for key, array in arrays.items()}
    assert_same_trajectory(trajectory, loaded._load_trajectory(0))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@FORMS
def test_every_dtype_comes_back(new: NewBuffer, tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(0)
    fields = {str(dtype): random_tensor((3, 2, 4), dtype, rng) for dtype in ALL_DTYPES}
    lines = {f"line {dtype}": random_tensor((5,), dtype, rng) for dtype in ALL_DTYPES}
    buffer = new(trajectory_format=form)
    buffer.add_trajectories([Trajectory(actions=torch.zeros(3, 2, 1), curr_obs=fields | lines)])
    buffer.save_checkpoint(tmp_path / "checkpoint")
    loaded = new()
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert_same(fields | lines, loaded._load_trajectory(0).curr_obs, ordered=False)


# ---- names

WEIGHTS = [
    ("f643-1_12", None, "f643-1_12"),
    ("f643-1_12", torch.full((2, 2, 1), 5), "f643-1_12"),
    ("f643-1", torch.tensor([3.0, 8.0, 2.0, 1.0]).reshape(2, 2, 1), "f643-1_8"),
    ("f643-1", np.full((2, 2, 1), 4, np.int64), "f643-1_4"),
    ("f643-1", torch.full((2, 2, 1), 6, dtype=torch.uint16), "f643-1_6"),
    ("f643-1", torch.full((2, 2, 1), float("nan")), "f643-1_0"),
    ("f643-1", None, "f643-1_0"),
    ("", None, "_0"),
    ("..", None, ".._0"),
    ("of/a/team_3", None, "of%2Fa%2Fteam_3"),
    ("../../out_1", None, "..%2F..%2Fout_1"),
    ("/etc/x", None, "%2Fetc%2Fx_0"),
]


@FILE_FORMS
@pytest.mark.parametrize(("weights", "versions", "name"), WEIGHTS)
def test_files_are_named_by_id_weights_and_update_count(
    new: NewBuffer, tmp_path: Path, form: str, weights: str, versions: Any, name: str
) -> None:
    buffer = new(trajectory_format=form)
    buffer.add_trajectories([make(), Trajectory(actions=torch.zeros(2, 2, 1), model_weights_id=weights, versions=versions)])
    buffer.save_checkpoint(tmp_path / "at" / "checkpoint")
    files = {f"trajectory_0_w_7.{form}", f"trajectory_1_{name}.{form}", "metadata.json", INDEX}
    assert {path.name for path in (tmp_path / "at" / "checkpoint").iterdir()} == files
    assert [path.name for path in (tmp_path / "at").iterdir()] == ["checkpoint"]
    loaded = new()
    loaded.load_checkpoint(tmp_path / "at" / "checkpoint")
    assert loaded._load_trajectory(1).model_weights_id == weights
    assert loaded._load_trajectory(1).model_update_count == int(name.rpartition("_")[2])


def test_a_count_that_is_given_wins(new: NewBuffer, tmp_path: Path) -> None:
    buffer = new()
    buffer.add_trajectories([Trajectory(actions=torch.zeros(2, 2, 1), model_weights_id="w_3", model_update_count=9)])
    buffer.save_checkpoint(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "trajectory_0_w_9.pt").exists()


@pytest.mark.parametrize("weights", ["w_" + "9" * 19, "w_" + "9" * 5000], ids=["too large for 64 bits", "too long for int"])
def test_digits_that_are_no_count_are_part_of_the_name(new: NewBuffer, weights: str) -> None:
    buffer = new()
    buffer.add_trajectories([make(), make(weights=weights)])
    assert buffer._load_trajectory(1).model_weights_id == weights
    assert buffer._load_trajectory(1).model_update_count == 0 or buffer._load_trajectory(1).versions is not None


def rename_to_the_reference(folder: Path, form: str) -> None:
    for trajectory_id in range(4):
        (folder / f"trajectory_{trajectory_id}_w_{trajectory_id}.{form}").rename(
            folder / f"trajectory_{trajectory_id}_plain-{trajectory_id}.{form}"
        )

    def rename(document: Any) -> None:
        for trajectory_id, info in document["trajectory_index"].items():
            info["model_weights_id"] = f"plain-{trajectory_id}"

    edit(folder / INDEX, rename)


def older_key(folder: Path, form: str) -> None:
    def rename(document: Any) -> None:
        document["storage_format"] = document.pop("trajectory_format")

    edit(folder / "metadata.json", rename)


OTHERS_FOLDERS: dict[str, Callable[[Path, str], Any]] = {
    "names of the reference": rename_to_the_reference,
    "older key": older_key,
    "misspelt index": lambda folder, form: (folder / INDEX).rename(folder / "trajector_index.json"),
    "no uuids": lambda folder, form: edit(folder / INDEX, lambda d: [info.pop("uuid") for info in d["trajectory_index"].values()] and None),
    "no counter": lambda folder, form: edit(folder / "metadata.json", lambda d: d.pop("trajectory_counter") and None),
}


@FILE_FORMS
@pytest.mark.parametrize("change", OTHERS_FOLDERS.values(), ids=OTHERS_FOLDERS)
def test_folders_of_other_writers_are_read(new: NewBuffer, tmp_path: Path, form: str, change: Callable[[Path, str], Any]) -> None:
    buffer = new(trajectory_format=form, seed=7)
    buffer.add_trajectories(several())
    buffer.save_checkpoint(tmp_path / "checkpoint")
    change(tmp_path / "checkpoint", form)
    loaded = new()
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert_same(contents(buffer)["trajectories"], contents(loaded)["trajectories"])
    assert (loaded.trajectory_format, loaded.seed) == (form, 7)
    assert_same(draws(buffer), draws(loaded))


def test_the_order_of_the_index_is_the_order_of_the_window(new: NewBuffer, tmp_path: Path) -> None:
    buffer = new()
    buffer.add_trajectories(several())
    buffer.save_checkpoint(tmp_path / "checkpoint")
    edit(tmp_path / "checkpoint" / INDEX, lambda document: document.update(trajectory_id_list=[2, 3, 0, 1]))
    loaded = new(sample_window_size=1)
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert loaded._trajectory_id_list == [1]
    assert_same_trajectory(several()[1], loaded._load_trajectory(1))


def test_without_a_form_the_buffers_own_is_taken(new: NewBuffer, tmp_path: Path) -> None:
    buffer = new(trajectory_format="pkl")
    buffer.add_trajectories(several())
    buffer.save_checkpoint(tmp_path / "checkpoint")
    edit(tmp_path / "checkpoint" / "metadata.json", lambda document: document.pop("trajectory_format") and None)
    loaded = new(trajectory_format="pkl")
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert_same(contents(buffer), contents(loaded))


# ---- the store itself


@FORMS
def test_after_loading_the_store_on_disk_holds_the_checkpoint_alone(new: NewBuffer, tmp_path: Path, form: str) -> None:
    saved = new(trajectory_format=form)
    saved.add_trajectories(several())
    saved.save_checkpoint(tmp_path / "checkpoint")
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store")
    buffer.add_trajectories([make(seed=7), make(seed=8, image=40)])
    buffer.flush()
    buffer.add_trajectories([make(seed=9)])
    buffer.load_checkpoint(tmp_path / "checkpoint")
    assert_same(contents(saved)["trajectories"], on_the_disk(tmp_path / "store"))
    buffer.close()
    assert_same(contents(saved)["trajectories"], on_the_disk(tmp_path / "store"))


@FORMS
def test_a_limit_keeps_the_newest_of_a_checkpoint(new: NewBuffer, tmp_path: Path, form: str) -> None:
    saved = new(trajectory_format=form)
    saved.add_trajectories(several())
    saved.save_checkpoint(tmp_path / "checkpoint")
    loaded = new(on_disk=True, max_trajectories=2)
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert loaded._trajectory_id_list == [2, 3]
    assert loaded.is_ready(4)
    assert_same(contents(saved)["trajectories"][2:], on_the_disk(Path(loaded.auto_save_path)))


def test_a_store_is_loaded_while_another_buffer_writes_it(new: NewBuffer) -> None:
    writer = new(on_disk=True)
    writer.add_trajectories(several())
    writer.flush()
    loaded = new(seed=5)
    loaded.load_checkpoint(writer.auto_save_path)
    assert_same(contents(writer), contents(loaded))
    assert loaded.seed == 5


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_buffer_that_loads_its_own_store_keeps_it_all(new: NewBuffer, is_flushed: bool) -> None:
    buffer = new(on_disk=True)
    buffer.add_trajectories(several())
    buffer.flush()
    buffer.add_trajectories([make(seed=seed) for seed in range(5, 9)])
    if is_flushed:
        buffer.flush()
    expected = contents(buffer)
    buffer.load_checkpoint(buffer.auto_save_path)
    assert_same(expected, contents(buffer))
    draws(buffer)
    assert_same(expected["trajectories"], on_the_disk(Path(buffer.auto_save_path)))


@FORMS
@pytest.mark.parametrize("where", ["own_0", "link", "own_0/../own_0", "own_0/inside", "own_0/segments", "."])
def test_a_checkpoint_does_not_go_into_or_over_the_buffers_own_store(new: NewBuffer, tmp_path: Path, form: str, where: str) -> None:
    buffer = new(on_disk=True, trajectory_format=form)
    (tmp_path / "link").symlink_to("own_0")
    buffer.add_trajectories(several())
    buffer.flush()
    before = sorted(tmp_path.rglob("*"))
    with left_as_it_was(buffer), pytest.raises(InvalidRequestError, match="own store"):
        buffer.save_checkpoint(tmp_path / where)
    assert sorted(tmp_path.rglob("*")) == before


@FORMS
def test_files_of_others_stay_when_a_checkpoint_is_replaced(new: NewBuffer, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "checkpoint"
    others = {"notes.txt": "a", "trajectory_notes.pt": "b", "sub/deep/er": "c", ".hidden": "d"}
    for name, text in others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link").symlink_to("nowhere")
    for earlier in ("pt", "pkl", "zarr"):
        buffer = new(trajectory_format=earlier)
        buffer.add_trajectories([make(seed=1, weights="older_1"), *several()])
        buffer.save_checkpoint(folder)
        last = new(trajectory_format=form)
        last.add_trajectories(several())
        last.save_checkpoint(folder)
        last.save_checkpoint(tmp_path / "fresh")
        ours = {path.relative_to(tmp_path / "fresh") for path in (tmp_path / "fresh").rglob("*")}
        found = {path.relative_to(folder) for path in folder.rglob("*")}
        assert {str(path) for path in found - ours} == {*others, "sub", "sub/deep", "link"}
        assert found >= ours
        assert {name: (folder / name).read_text() for name in others} == others
        loaded = new()
        loaded.load_checkpoint(folder)
        assert_same(state(last), state(loaded))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "fresh"}


def test_a_link_to_a_directory_is_written_through(new: NewBuffer, tmp_path: Path) -> None:
    (tmp_path / "step_9").mkdir()
    (tmp_path / "latest").symlink_to("step_9")
    buffer = new()
    buffer.add_trajectories(several())
    buffer.save_checkpoint(tmp_path / "latest")
    assert {path.name for path in tmp_path.iterdir()} == {"step_9", "latest"}
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "step_9" / "metadata.json").exists()


def test_a_checkpoint_can_be_saved_to_the_working_directory(new: NewBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "at").mkdir()
    monkeypatch.chdir(tmp_path / "at")
    buffer = new()
    buffer.add_trajectories(several())
    buffer.save_checkpoint(".")
    assert Path("metadata.json").exists()
    loaded = new()
    loaded.load_checkpoint(".")
    assert_same(state(buffer), state(loaded))


def test_a_checkpoint_does_not_go_where_a_file_is(new: NewBuffer, tmp_path: Path) -> None:
    buffer = new()
    buffer.add_trajectories(several())
    (tmp_path / "file").write_text("x")
    with left_as_it_was(buffer), pytest.raises(NotAStoreError, match="is a file"):
        buffer.save_checkpoint(tmp_path / "file")
    with left_as_it_was(buffer), pytest.raises(StorageError, match="below"):
        buffer.save_checkpoint(tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- the disk fails


CHANGES: dict[str, Callable[..., bool]] = {
    **{f"os.{name}": lambda *args: True for name in ("fsync", "link", "rename", "replace")},
    "os.mkdir": lambda path, *args: not Path(path).exists(),
    **{f"{module}.open": lambda path, mode="r", *args: "w" in mode for module in ("io", "builtins")},
}
"""Functions, and which of their calls change something."""


class FullDisk:
    """Of the calls that change the disk so many succeed; then one fails, or all from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, calls: int, lasting: bool) -> None:
        self.left = calls
        self.has_failed = False
        self.lasting = lasting
        for name, changes in CHANGES.items():
            module, _, function = name.partition(".")
            monkeypatch.setattr(name, self.limited(getattr(sys.modules[module], function), changes))

    def limited(self, call: Callable[..., Any], changes: Callable[..., bool]) -> Callable[..., Any]:
        def limited(*args: Any, **kwargs: Any) -> Any:
            if changes(*args):
                self.left -= 1
                if self.left == -1 or (self.lasting and self.left < 0):
                    self.has_failed = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return limited


def fails_at_each_call(
    monkeypatch: pytest.MonkeyPatch, attempt: Callable[[], None], check: Callable[[bool], None], *, lasting: bool
) -> int:
    """Runs `attempt` with the disk failing at its first call, its second, ... until none fails. Returns how many did."""
    for calls in range(1000):
        with monkeypatch.context() as patch:
            disk = FullDisk(patch, calls=calls, lasting=lasting)
            try:
                attempt()
            except StorageError:
                is_refused = True
            else:
                is_refused = False
        check(is_refused)
        if not disk.has_failed:
            return calls
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize("form", ["pt", "zarr"])
@pytest.mark.parametrize(("can_exchange", "lasting"), [(True, True), (True, False), (False, False)])
def test_a_failed_save_leaves_the_earlier_checkpoint(
    new: NewBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, can_exchange: bool, lasting: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: None)
    folder = tmp_path / "checkpoint"
    earlier, buffer = new(seed=1, trajectory_format="pt"), new(seed=2, trajectory_format=form)
    earlier.add_trajectories([few(1), few(2)])
    buffer.add_trajectories([few(3)])
    buffer.flush()
    loaded = new()

    def reset() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        earlier.save_checkpoint(folder)
        (folder / "notes.txt").write_text("mine")

    def check(is_refused: bool) -> None:
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
        assert (folder / "notes.txt").read_text() == "mine"
        loaded.load_checkpoint(folder)
        expected = earlier if is_refused and loaded.seed == 1 else buffer
        assert_same(state(expected), state(loaded))
        reset()

    reset()
    assert fails_at_each_call(monkeypatch, lambda: buffer.save_checkpoint(folder), check, lasting=lasting) > 8


@FORMS
def test_all_of_a_checkpoint_is_synced_before_it_counts(new: NewBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (fsync(descriptor), synced.append(os.fstat(descriptor).st_ino)))
    (tmp_path / "checkpoint" / "mine" / "deeper").mkdir(parents=True)
    buffer = new(on_disk=True, trajectory_format=form)
    buffer.add_trajectories(several())
    buffer.save_checkpoint(tmp_path / "checkpoint")
    parts = [tmp_path / "checkpoint", *(tmp_path / "checkpoint").rglob("*")]
    assert [path for path in parts if path.stat().st_ino not in synced and path.name != ".lock"] == []
    assert synced[-1] == tmp_path.stat().st_ino


@FORMS
def test_a_save_beyond_a_size_limit_leaves_the_earlier_checkpoint(new: NewBuffer, tmp_path: Path, form: str) -> None:
    earlier, buffer = new(seed=1), new(seed=2, trajectory_format=form)
    earlier.add_trajectories(several()[:2])
    earlier.save_checkpoint(tmp_path / "checkpoint")
    buffer.add_trajectories([make(image=40)])
    buffer.flush()
    loaded = new()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 50, 500) if form == "zarr" else (0, 500, 5000, 50_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with left_as_it_was(buffer), pytest.raises(StorageError, match="checkpoint"):
                buffer.save_checkpoint(tmp_path / "checkpoint")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
        loaded.load_checkpoint(tmp_path / "checkpoint")
        assert_same(state(earlier), state(loaded))


@pytest.mark.parametrize("form", ["pt", "zarr"])
@pytest.mark.parametrize("lasting", [True, False])
def test_a_failed_load_leaves_buffer_and_store(
    new: NewBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, lasting: bool
) -> None:
    saved = new(seed=1, trajectory_format=form)
    saved.add_trajectories([few(1), few(2)])
    saved.save_checkpoint(tmp_path / "checkpoint")
    buffer = TrajectoryReplayBuffer(seed=2, auto_save=True, auto_save_path=tmp_path / "store")
    buffer.add_trajectories([few(3)])
    buffer.sample(3)
    buffer.flush()
    before = state(buffer)
    write = LocalStorage.write

    def write_elsewhere(storage: LocalStorage, key: str, *parts: bytes) -> None:
        assert not key.startswith(f"index/{read_generation(storage)}/"), "the index that readers see is written over"
        write(storage, key, *parts)

    monkeypatch.setattr(LocalStorage, "write", write_elsewhere)

    def check(is_refused: bool) -> None:
        expected = before if is_refused else state(saved)
        assert_same(expected, state(buffer))
        with trajstore.open(tmp_path / "store", mode="r") as reader:  # which may see the one or the other, but whole
            assert reader.verify() == []
            assert [reader.info(i).max_episode_length for i in reader.ids] in ([3], [1, 2])
        buffer.store.delete([])  # publishes the index, now that the disk works
        assert_same(expected["trajectories"], on_the_disk(tmp_path / "store"))

    assert fails_at_each_call(monkeypatch, lambda: buffer.load_checkpoint(tmp_path / "checkpoint"), check, lasting=lasting) > 8
    buffer.close()


# ---- bad input


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def busy(request: pytest.FixtureRequest, new: NewBuffer) -> TrajectoryReplayBuffer:
    """A buffer with contents, a seed and a generator that a failed load must leave."""
    buffer = new(on_disk=request.param, seed=77, trajectory_format="zarr")
    buffer.add_trajectories([make(seed=20, weights="own_1"), make(seed=21, steps=2)])
    buffer.sample(4)
    buffer.flush()
    return buffer


@pytest.fixture
def checkpoint(new: NewBuffer, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a checkpoint of some trajectories in a form."""

    def write(form: str) -> Path:
        buffer = new(trajectory_format=form, seed=5)
        buffer.add_trajectories(several())
        buffer.save_checkpoint(tmp_path / "checkpoint")
        return tmp_path / "checkpoint"

    return write


def becomes(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def is_gone(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def is_a_folder(name: str) -> Callable[[Path], Any]:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def says(name: str, **values: Any) -> Callable[[Path], Any]:
    return lambda folder: edit(folder / name, lambda document: document.update(values))


def index_says(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: edit(folder / INDEX, lambda document: document["trajectory_index"]["1"].update(values))


def has_id(trajectory_id: int) -> Callable[[Path], Any]:
    """The second trajectory gets another id."""

    def change(folder: Path) -> None:
        (folder / "trajectory_1_w_1.pt").rename(folder / f"trajectory_{trajectory_id}_w_1.pt")

        def renumber(document: Any) -> None:
            document["trajectory_index"][str(trajectory_id)] = document["trajectory_index"].pop("1")
            document["trajectory_id_list"][1] = trajectory_id

        edit(folder / INDEX, renumber)

    return change


def holds(**values: Any) -> Callable[[Path], Any]:
    """The second trajectory's file has other values."""

    def change(folder: Path) -> None:
        path = folder / "trajectory_1_w_1.pt"
        torch.save(torch.load(path, weights_only=True) | values, path)

    return change


META = "metadata.json"
BROKEN: dict[str, tuple[Callable[[Path], Any], type[TrajStoreError], str]] = {
    "no metadata": (is_gone(META), StoreNotFoundError, META),
    "no index": (is_gone(INDEX), StoreNotFoundError, INDEX),
    "no file": (is_gone("trajectory_1_w_1.pt"), StoreNotFoundError, "trajectory 1"),
    "a folder for a file": (is_a_folder("trajectory_1_w_1.pt"), StoreNotFoundError, "trajectory 1"),
    "a folder for metadata": (is_a_folder(META), StorageError, META),
    "a folder for the index": (is_a_folder(INDEX), StorageError, INDEX),
    **{
        f"{name} is {text[:9]!r}": (becomes(name, text), CorruptionError, name)
        for name in (META, INDEX)
        for text in ("", "{", "[]", "5", '"x"', "null", '{"a":' * 3000, "\0")
    },
    "a form nobody knows": (says(META, trajectory_format="npz"), CorruptionError, "npz"),
    "a form that is a list": (says(META, trajectory_format=[]), CorruptionError, META),
    "a form that is not there": (says(META, trajectory_format="pkl"), StoreNotFoundError, "trajectory 0"),
    "a store that is not there": (says(META, trajectory_format="zarr"), StoreNotFoundError, "zarr"),
    "a seed of text": (says(META, seed="x"), CorruptionError, META),
    "a seed too large": (says(META, seed=10**30), CorruptionError, META),
    "a seed without end": (says(META, seed=float("inf")), CorruptionError, META),
    "a counter of text": (says(META, trajectory_counter="x"), CorruptionError, META),
    "a counter too large": (says(META, trajectory_counter=2**63), CorruptionError, META),
    "a counter without end": (says(META, trajectory_counter=float("inf")), CorruptionError, META),
    "a generator of text": (says(META, generator_state="!!"), CorruptionError, META),
    "a generator too short": (says(META, generator_state="AAAA"), CorruptionError, META),
    "no entries": (lambda folder: edit(folder / INDEX, lambda d: d.pop("trajectory_index") and None), CorruptionError, INDEX),
    "an id without entry": (says(INDEX, trajectory_id_list=[0, 9]), CorruptionError, INDEX),
    "an id twice": (says(INDEX, trajectory_id_list=[0, 0]), CorruptionError, "twice"),
    "an id of text": (says(INDEX, trajectory_id_list=["x"]), CorruptionError, INDEX),
    "an id below zero": (has_id(-3), CorruptionError, INDEX),
    "an id too large": (has_id(2**63 - 1), CorruptionError, INDEX),
    "an id far too large": (has_id(2**70), CorruptionError, INDEX),
    "weights elsewhere": (index_says(model_weights_id="x/../../own_1"), StoreNotFoundError, "trajectory 1"),
    "weights too long": (index_says(model_weights_id="x" * 300), StoreNotFoundError, "trajectory 1"),
    "weights of no text": (index_says(model_weights_id="\ud800"), StoreNotFoundError, "trajectory 1"),
    "weights of many digits": (index_says(model_weights_id="w_" + "9" * 5000), StoreNotFoundError, "trajectory 1"),
    "a length of text": (holds(max_episode_length="x"), TrajStoreError, "trajectory_1_w_1.pt"),
    "a length too large": (holds(max_episode_length=2**63), TrajStoreError, "trajectory_1_w_1.pt"),
    "a count of text": (holds(model_update_count="x"), TrajStoreError, "trajectory_1_w_1.pt"),
    "a count too large": (holds(model_update_count=2**63), TrajStoreError, "trajectory_1_w_1.pt"),
    "weights that are a number": (holds(model_weights_id=5), TrajStoreError, "trajectory_1_w_1.pt"),
    "extras that are a number": (holds(extras=5), TrajStoreError, "trajectory_1_w_1.pt"),
    "observations that are a list": (holds(curr_obs=[1]), TrajStoreError, "trajectory_1_w_1.pt"),
    "too few steps": (holds(actions=torch.zeros(3, 1, 2)), InvalidTrajectoryError, "trajectory_1_w_1.pt"),
    "a field with a slash": (holds(**{"a/b": torch.zeros(4, 1)}), InvalidTrajectoryError, "trajectory_1_w_1.pt"),
}


@pytest.mark.parametrize(("spoil", "kind", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_refused_and_the_buffer_left(
    busy: TrajectoryReplayBuffer,
    checkpoint: Callable[[str], Path],
    spoil: Callable[[Path], Any],
    kind: type[TrajStoreError],
    message: str,
) -> None:
    folder = checkpoint("pt")
    spoil(folder)
    with left_as_it_was(busy), pytest.raises(kind, match=message):
        busy.load_checkpoint(folder)
    if busy.auto_save_path is not None:
        assert_same(contents(busy)["trajectories"], on_the_disk(Path(busy.auto_save_path)))


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (5, 2), (0, 0), (0, -1)])
@FORMS
def test_wrong_ranks_are_refused_and_the_buffer_left(
    busy: TrajectoryReplayBuffer, checkpoint: Callable[[str], Path], form: str, rank: int, size: int
) -> None:
    folder = checkpoint(form)
    with left_as_it_was(busy), pytest.raises(InvalidRequestError, match=f"local_rank={rank} with world_size={size}"):
        busy.load_checkpoint(folder, is_distributed=True, local_rank=rank, world_size=size)


@FORMS
def test_ranks_share_a_checkpoint(new: NewBuffer, checkpoint: Callable[[str], Path], form: str) -> None:
    folder = checkpoint(form)
    buffer = new()
    for size, shares in ((1, [[0, 1, 2, 3]]), (3, [[0, 1], [2], [3]]), (5, [[0], [1], [2], [3], []])):
        for rank, share in enumerate(shares):
            buffer.load_checkpoint(folder, is_distributed=True, local_rank=rank, world_size=size)
            assert buffer._trajectory_id_list == share
            for trajectory_id in share:
                assert_same_trajectory(several()[trajectory_id], buffer._load_trajectory(trajectory_id))


def test_folders_that_are_no_checkpoints_are_refused(busy: TrajectoryReplayBuffer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "ranks" / "rank_0").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    for name, kind in {"empty": StoreNotFoundError, "absent": StoreNotFoundError, "file": TrajStoreError, "ranks": NotAStoreError}.items():
        with left_as_it_was(busy), pytest.raises(kind, match=name):
            busy.load_checkpoint(tmp_path / name)


def test_a_store_with_a_changed_byte_is_refused(busy: TrajectoryReplayBuffer, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("zarr")
    for document in (folder / "zarr.json", folder / "index" / "zarr.json"):
        whole = document.read_bytes()
        document.write_bytes(whole[:-9])
        with left_as_it_was(busy), pytest.raises(TrajStoreError):
            busy.load_checkpoint(folder)
        document.write_bytes(whole)
    busy.load_checkpoint(folder)


def small(form: str, folder: Path) -> tuple[Path, bytes]:
    """A checkpoint of one small trajectory; its file, and what is in it."""
    with TrajectoryReplayBuffer(trajectory_format=form) as buffer:
        fields = {"curr_obs": {"states": torch.zeros(2, 2, 3), "task": ["a", 1.5, None, (2,)]}, "versions": torch.ones(2, 2, 1).bfloat16()}
        buffer.add_trajectories([Trajectory(actions=torch.ones(2, 2, 1), model_weights_id="w_1", **fields)])
        buffer.save_checkpoint(folder)
    path = folder / f"trajectory_0_w_1.{form}"
    return path, path.read_bytes()


@FILE_FORMS
def test_a_file_cut_short_is_refused_at_every_length(busy: TrajectoryReplayBuffer, tmp_path: Path, form: str) -> None:
    path, whole = small(form, tmp_path / "checkpoint")
    lengths = {*range(8), *np.linspace(8, len(whole) - 1, 40).astype(int).tolist()}
    with left_as_it_was(busy):
        for length in sorted(lengths):
            path.write_bytes(whole[:length])
            with pytest.raises(CorruptionError, match=path.name):
                busy.load_checkpoint(path.parent)
    path.write_bytes(whole)
    busy.load_checkpoint(path.parent)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:TypedStorage is deprecated")
@FILE_FORMS
def test_a_file_with_changed_bytes_loads_or_is_refused(new: NewBuffer, tmp_path: Path, form: str) -> None:
    path, whole = small(form, tmp_path / "checkpoint")
    buffer = new()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            buffer.load_checkpoint(path.parent)
        except TrajStoreError:
            refused += 1
    assert refused > 40


class RunsCode:
    """What a hostile file holds: unpickling it touches a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


class Smuggles:
    """A tensor's storage whose bytes are a file of their own."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.data,)


class Calls:
    """Calls anything with anything."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def saved_by_torch(value: Any, **options: Any) -> bytes:
    with io.BytesIO() as file:
        torch.save(value, file, **options)
        return file.getvalue()


HOSTILE: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "pkl": ("pkl", lambda target: pickle.dumps({"actions": RunsCode(target)}), "system"),
    "older pkl": ("pkl", lambda target: pickle.dumps({"actions": RunsCode(target)}, protocol=0), "system"),
    "pkl of eval": ("pkl", lambda target: pickle.dumps(Calls(eval, f"open({str(target)!r}, 'w')")), r"builtins\.eval"),
    "pkl of getattr": ("pkl", lambda target: pickle.dumps(Calls(getattr, 1, "real")), r"builtins\.getattr"),
    "pkl of torch.load": ("pkl", lambda target: pickle.dumps(Calls(torch.load, str(target))), r"torch\.serialization\.load"),
    "storage in a pkl": ("pkl", lambda target: pickle.dumps({"actions": Smuggles(saved_by_torch(RunsCode(target)))}), "system"),
    "older storage in a pkl": (
        "pkl",
        lambda target: pickle.dumps(Smuggles(saved_by_torch(RunsCode(target), _use_new_zipfile_serialization=False))),
        "system",
    ),
    "pt": ("pt", lambda target: saved_by_torch({"actions": RunsCode(target)}), "system"),
    "older pt": ("pt", lambda target: saved_by_torch({"actions": RunsCode(target)}, _use_new_zipfile_serialization=False), "system"),
    "pkl of a class": ("pkl", lambda target: pickle.dumps({"actions": Fraction(1, 2)}), r"fractions\.Fraction"),
    "pt of a class": ("pt", lambda target: saved_by_torch({"actions": Fraction(1, 2)}), r"fractions\.Fraction"),
    "pickle named pt": ("pt", lambda target: pickle.dumps(RunsCode(target), protocol=2), "system"),
}


@pytest.mark.parametrize(("form", "attack", "name"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_by_the_name_of_what_it_calls(
    busy: TrajectoryReplayBuffer, tmp_path: Path, form: str, attack: Callable[[Path], bytes], name: str
) -> None:
    path, _ = small(form, tmp_path / "checkpoint")
    path.write_bytes(attack(tmp_path / "harm"))
    with left_as_it_was(busy), pytest.raises(UnsafeFileError, match=name) as caught:
        busy.load_checkpoint(path.parent)
    assert path.name in str(caught.value)
    assert "weights_only" not in str(caught.value)  # torch's advice to load it all the same
    assert not (tmp_path / "harm").exists()


MALFORMED = {
    "a length beyond memory": b"\x80\x04\x8e" + b"\xff" * 8,
    "a frame beyond memory": b"\x80\x04\x95" + b"\xff" * 8,
    "no pickle": b"hello",
    "a number": pickle.dumps(5),
    "a dict of numbers": pickle.dumps({1: 2}),
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00xQ.",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_pkl_is_refused(busy: TrajectoryReplayBuffer, tmp_path: Path, data: bytes) -> None:
    path, _ = small("pkl", tmp_path / "checkpoint")
    path.write_bytes(data)
    with left_as_it_was(busy), pytest.raises(CorruptionError, match=path.name):
        busy.load_checkpoint(path.parent)


def test_a_pkl_can_not_change_the_functions_it_calls(busy: TrajectoryReplayBuffer, tmp_path: Path) -> None:
    path, _ = small("pkl", tmp_path / "checkpoint")
    sets_attribute = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x07\x00\x00\x00changed\x88s\x86b."
    path.write_bytes(sets_attribute)
    with left_as_it_was(busy), pytest.raises(TrajStoreError, match=path.name):
        busy.load_checkpoint(path.parent)
    assert not hasattr(torch._utils._rebuild_tensor_v2, "changed")


def test_a_tensor_larger_than_its_storage_is_refused(busy: TrajectoryReplayBuffer, tmp_path: Path) -> None:
    path, _ = small("pkl", tmp_path / "checkpoint")
    function, (storage, *_) = torch.ones(2).__reduce_ex__(2)
    path.write_bytes(pickle.dumps({"actions": Calls(function, storage, 0, (50, 40, 1), (40, 1, 1), False, {})}))
    with left_as_it_was(busy), pytest.raises(CorruptionError, match=path.name):
        busy.load_checkpoint(path.parent)


@FILE_FORMS
def test_a_plain_file_of_another_tool_is_taken(new: NewBuffer, tmp_path: Path, form: str) -> None:
    path, _ = small(form, tmp_path / "checkpoint")
    values = {"rewards": torch.ones(2, 2, 1), "mine": {"x": torch.zeros(2, 2, 4), "set": "kept"}, "actions": None}
    path.write_bytes(saved_by_torch(values) if form == "pt" else pickle.dumps(values, protocol=2))
    edit(path.parent / INDEX, lambda document: document["trajectory_index"]["0"].update(max_episode_length=33))
    buffer = new()
    buffer.load_checkpoint(path.parent)
    read = buffer._load_trajectory(0)
    assert_same(read.extras, {"mine": values["mine"]})
    assert (read.max_episode_length, read.model_weights_id, read.actions) == (33, "w_1", None)
