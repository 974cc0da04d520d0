"""The store against plain indexing of what was put in: round trips, gathers, samples, deletion, links, compaction, reopening."""

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from conftest import ALL_DTYPES, assert_same, assert_same_trajectory, make, random_tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajstore
from trajstore import Trajectory
from trajstore.reader import SegmentSource, Take, run
from trajstore.storage import MemoryStorage

KEYS = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda key: key.strip(".")
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9) | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@st.composite
def trajectories(draw: Any) -> Trajectory:
    """Any tree of tensors [T or more, B, ...] and plain values."""
    steps, envs = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def tensor(extra: int) -> torch.Tensor:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        values = random_tensor((steps + extra, envs, *shape), draw(st.sampled_from(ALL_DTYPES)), rng)
        return values.repeat_interleave(2, 0)[::2] if draw(st.booleans()) else values  # not contiguous

    def tree(depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in draw(st.lists(KEYS, max_size=3, unique=True)):
            kind = draw(st.sampled_from(["rows", "more", "small", "plain", "dict"] if depth else ["rows", "plain"]))
            small = random_tensor(tuple(draw(st.lists(st.integers(0, 3), max_size=1))), torch.int16, rng)
            found[key] = (
                tree(depth - 1)
                if kind == "dict"
                else draw(PLAIN)
                if kind == "plain"
                else small
                if kind == "small"
                else tensor(draw(st.integers(0, 3)) if kind == "more" else 0)
            )
        return found

    curr = tree(2)
    after = tree(1) | {key: value for key, value in curr.items() if draw(st.booleans())}
    return Trajectory(actions=random_tensor((steps, envs, 2), torch.float32, rng), curr_obs=curr, next_obs=after, extras=tree(2))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_read_gives_back_what_was_added(added: list[Trajectory]) -> None:
    storage = MemoryStorage()
    with trajstore.open(storage, queue_bytes=1) as store:
        ids = store.extend(added)
        for trajectory_id, trajectory in zip(ids, added, strict=True):
            assert_same_trajectory(trajectory, store.read(trajectory_id))
        store.flush()
        for trajectory_id, trajectory in zip(ids, added, strict=True):
            assert_same_trajectory(trajectory, store.read(trajectory_id))
        assert store.verify() == []
    with trajstore.open(storage, mode="r") as store:
        for trajectory_id, trajectory in zip(ids, added, strict=True):
            assert_same_trajectory(trajectory, store.read(trajectory_id))


def row(trajectory: Trajectory, path: str, step: int, env: int) -> torch.Tensor:
    """A row of a batch by indexing the original."""
    value: Any = trajectory
    for key in path.split("/"):
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    extra = len(value) - len(trajectory.actions)
    if extra and path in ("dones", "terminations", "truncations"):
        step += step // (len(trajectory.actions) // extra) + 1
    return value[step, env]


def flat(batch: dict[str, Any], parent: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for key, value in batch.items():
        found |= flat(value, f"{parent}{key}/") if isinstance(value, dict) else {f"{parent}{key}": value}
    return found


@pytest.fixture
def some() -> list[Trajectory]:
    """Small rows, large rows in chunks of one and of several, an odd number of everything."""
    rng = np.random.default_rng(0)
    found = [make(seed=seed, steps=steps, envs=envs) for seed, (steps, envs) in enumerate([(6, 3), (12, 1), (1, 5), (4, 2)])]
    for trajectory in found:
        steps, envs = trajectory.actions.shape[:2]
        still = random_tensor((1, envs, 50, 40, 3), torch.uint8, rng).expand(steps, -1, -1, -1, -1)
        for obs in (trajectory.curr_obs, trajectory.next_obs):
            obs["noise"] = random_tensor((steps, envs, 70, 70), torch.uint8, rng)
            obs["still"] = still
    return found


@pytest.fixture(params=["pending", "committed", "many segments", "memory", "reopened"])
def stored(request: pytest.FixtureRequest, tmp_path: Path, some: list[Trajectory], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of `some`, in each state that trajectories can be in."""
    may_write = threading.Event()
    write = trajstore.store.write_segment
    monkeypatch.setattr("trajstore.store.write_segment", lambda *args, **kwargs: may_write.wait() and write(*args, **kwargs))
    if request.param != "pending":
        may_write.set()
    place = MemoryStorage() if request.param == "memory" else tmp_path / "store"
    store = trajstore.open(place, segment_bytes=1 if request.param == "many segments" else 10**9)
    store.extend(some)
    if request.param != "pending":
        store.flush()
    if request.param == "reopened":
        store.close()
        store = trajstore.open(place, mode="r")
    yield store
    may_write.set()
    store.close()


def test_gather_equals_indexing(stored: trajstore.TrajectoryStore, some: list[Trajectory]) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 7, 200):
        which = rng.integers(0, len(some), count)
        steps = rng.integers(0, [len(some[i].actions) for i in which])
        envs = rng.integers(0, [some[i].actions.shape[1] for i in which])
        batch = flat(stored.gather(which, steps, envs))
        assert "curr_obs/noise" in batch
        assert "next_obs/still" in batch
        for path, found in batch.items():
            expected = torch.stack([row(some[i], path, t, b) for i, t, b in zip(which, steps, envs, strict=True)])
            assert_same(found, expected, path)


@pytest.mark.parametrize("cache", [{}, {"cache_size": 2}, {"cache_size": 9}, {"cache_size": 9, "cache_bytes": 90_000}])
def test_samples_do_not_depend_on_where_trajectories_are(
    stored: trajstore.TrajectoryStore, some: list[Trajectory], cache: dict[str, int]
) -> None:
    sampler = stored.sampler(window=3, seed=5, **cache)
    generator = torch.Generator().manual_seed(5)
    ends = np.cumsum([t.actions.shape[0] * t.actions.shape[1] for t in some[1:]])
    for count in (5, 20):
        numbers = torch.randint(0, int(ends[-1]), (count,), generator=generator).tolist()
        batch = flat(sampler.sample(count))
        for path, found in batch.items():
            rows = []
            for number in numbers:
                which = int(np.searchsorted(ends, number, side="right"))
                local = number - (int(ends[which - 1]) if which else 0)
                trajectory = some[1 + which]
                rows.append(row(trajectory, path, *divmod(local, trajectory.actions.shape[1])))
            assert_same(found, torch.stack(rows), path)


def test_fast_reads_equal_reads_by_zarr(tmp_path: Path, some: list[Trajectory]) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.extend(some)
        store.flush()
        for number in {int(n) for n in store.newest(0).segments}:
            segment = store.segment(number)
            for name, array in segment.info.arrays.items():
                plain = zarr.open_array(tmp_path / "s" / "segments" / str(number) / name, mode="r")
                rows = np.random.default_rng(2).integers(0, array.rows, 50)
                out = np.empty((50, *array.row_shape), array.dtype)
                run(SegmentSource(segment).take([Take(name, rows, out, None)]))
                np.testing.assert_array_equal(out.view(np.uint8), plain[:][rows].view(np.uint8), err_msg=name)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_how_work_is_cut_changes_nothing(some: list[Trajectory], monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("TRAJSTORE_THREADS", threads)
    for limit in ("PIECE_BYTES", "SCRATCH_BYTES", "LARGE_ROW_BYTES"):
        monkeypatch.setattr(f"trajstore.reader.{limit}", 100)
    monkeypatch.setattr("trajstore.gather.POOLED_BATCH_BYTES", 0)
    with trajstore.open(MemoryStorage()) as store:
        store.extend(some)
        store.flush()
        assert_same_trajectory(some[1], store.read(1))
        expected = store.sampler(seed=3).sample(20)
        for cache_size in (2, 4):
            assert_same(store.sampler(seed=3, cache_size=cache_size).sample(20), expected)
        monkeypatch.undo()
        assert_same(store.sampler(seed=3).sample(20), expected)


def test_a_cached_window_is_the_same_before_and_after_its_table() -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.extend([make(seed=seed, steps=6 + seed % 2) for seed in range(4)])
        cached, plain = store.sampler(seed=3, cache_size=4), store.sampler(seed=3)
        for step in range(40):
            if step == 20:
                store.append(make(seed=9))
                store.delete([0])
            assert_same(cached.sample(5), plain.sample(5))


def test_fields_and_parents_of_fields(stored: trajstore.TrajectoryStore, some: list[Trajectory]) -> None:
    batch = stored.sampler().sample(4, fields=["rewards", "next_obs"])
    assert list(flat(batch)) == ["rewards", *(f"next_obs/{key}" for key in some[0].next_obs)]
    part = stored.read(1, fields=["curr_obs/states"])
    assert part.actions is None
    assert_same(part.curr_obs, {"states": some[1].curr_obs["states"]})
    with pytest.raises(trajstore.FieldNotFoundError, match=r"'reward' is in no trajectory.*rewards"):
        stored.read(1, fields=["reward"])
    with pytest.raises(trajstore.InvalidRequestError, match="expected None, 'common' or a list"):
        stored.sampler().sample(4, fields="rewards")


def test_trajectories_that_disagree() -> None:
    first, second, third = make(seed=1), make(seed=2), make(seed=3)
    second.curr_obs["states"] = second.curr_obs["states"].double()
    third.intervene_flags = None
    with trajstore.open(MemoryStorage()) as store:
        store.extend([first, second, third])
        for sampler in (store.sampler(), store.sampler(cache_size=3)):
            message = r"field 'curr_obs/states'.*float32\[4\] \(trajectory 0\).*float64\[4\] \(trajectory 1\).*fields="
            with pytest.raises(trajstore.SchemaMismatchError, match=message):
                sampler.sample(8)
            with pytest.raises(trajstore.SchemaMismatchError, match=r"'intervene_flags'.*no such field \(trajectory 2\)"):
                sampler.sample(8, fields=["intervene_flags"])
            common = flat(sampler.sample(8, fields="common"))
            assert "actions" in common
            assert not {"curr_obs/states", "intervene_flags"} & set(common)
            assert list(flat(sampler.sample(8, fields=["actions"]))) == ["actions"]
        assert store.sampler(window=1).sample(3).keys() == {*common} & {*vars(third)} | {"curr_obs", "next_obs", "forward_inputs"}


def test_what_is_not_there() -> None:
    with trajstore.open(MemoryStorage()) as store:
        with pytest.raises(trajstore.EmptyBufferError):
            store.sampler().sample(1)
        store.append(make(steps=4, envs=2))
        with pytest.raises(trajstore.TrajectoryNotFoundError, match="trajectory 5 is not in the store, which holds 1 between 0 and 0"):
            store.read(5)
        with pytest.raises(KeyError):
            store.index[5]
        for step, env in ((4, 0), (0, 2), (-1, 0), (0, -1)):
            with pytest.raises(trajstore.InvalidRequestError, match="which has 4 steps of 2 environments"):
                store.gather([0], [step], [env])
        with pytest.raises(trajstore.InvalidRequestError, match="1 trajectory ids, 2 steps"):
            store.gather([0], [0, 1], [0])
        with pytest.raises(trajstore.InvalidRequestError):
            store.gather([], [], [])
        for count in (0, -3):
            with pytest.raises(trajstore.InvalidRequestError):
                store.sampler().sample(count)
        with pytest.raises(trajstore.InvalidRequestError):
            store.sampler(window=-1)


@pytest.mark.parametrize("ids", [[1.5], ["1"], [True], "1", [2**70], [None], [float("nan")]])
def test_ids_are_integers(ids: Any) -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.extend([make(), make()])
        for call in (lambda: store.delete(ids), lambda: store.gather(ids, [0], [0]), lambda: store.gather([0], ids, [0])):
            with pytest.raises(trajstore.InvalidRequestError, match="expected integers"):
                call()
        assert len(store) == 2


def test_places_that_are_not_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, message in (("s3://bucket/x", "is a URL"), ("file:///tmp/x", "is a URL"), ("", "path is empty")):
        with pytest.raises(trajstore.InvalidRequestError, match=message):
            trajstore.open(place)
        with trajstore.TrajectoryReplayBuffer() as buffer:
            for call in (buffer.save_checkpoint, buffer.load_checkpoint):
                with pytest.raises(trajstore.InvalidRequestError, match=message):
                    call(place)
    assert not list(tmp_path.iterdir())


class Rewards(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What a user would write."""

    def __init__(self, store: trajstore.TrajectoryStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return 18

    def __getitem__(self, number: int) -> Any:
        step, env = divmod(number, 3)
        return self.store.gather([1], [step], [env], fields=["rewards"])["rewards"][0]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(tmp_path: Path, context: str) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.extend([make(seed=0), make(seed=1)])
        store.flush()
        store.sampler().sample(3)
        loader = torch.utils.data.DataLoader(Rewards(store), batch_size=6, num_workers=2, multiprocessing_context=context)
        assert_same(torch.cat(list(loader)), make(seed=1).rewards.flatten(0, 1))
    with trajstore.open(MemoryStorage()) as store, pytest.raises(trajstore.InvalidRequestError, match="not a local directory"):
        pickle.dumps(store)


def test_more_than_there_is_is_clamped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.append(make(steps=4, envs=2))
        sampler = store.sampler()
        assert [len(sampler.sample(count)["rewards"]) for count in (9, 8, 100)] == [8, 8, 8]
        assert len(caplog.records) == 1


def test_a_sampler_resumes() -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.extend([make(seed=1), make(seed=2)])
        first, second = store.sampler(seed=1), store.sampler(seed=2)
        first.sample(3)
        state = first.state_dict()
        expected = [first.sample(5) for _ in range(3)]
        second.load_state_dict(state)
        assert_same([second.sample(5) for _ in range(3)], expected)
        with pytest.raises(trajstore.InvalidRequestError):
            second.load_state_dict({})


def test_no_global_generator_is_touched() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with trajstore.open(MemoryStorage()) as store:
        store.append(make())
        store.sampler().sample(3)
    assert torch.equal(before[0], torch.get_rng_state())
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])


@pytest.mark.parametrize("segment_bytes", [1, 10**9])
def test_deleting_removes_files(tmp_path: Path, segment_bytes: int) -> None:
    added = [make(seed=seed) for seed in range(6)]
    with trajstore.open(tmp_path / "s", segment_bytes=segment_bytes) as store:
        store.extend(added)
        store.flush()
        store.delete([1, 4])
        with pytest.raises(trajstore.TrajectoryNotFoundError):
            store.delete([2, 4])
        assert store.ids == [0, 2, 3, 5]
        store.keep_last(2)
        assert store.ids == [3, 5]
        with pytest.raises(trajstore.TrajectoryNotFoundError):
            store.read(0)
        assert_same_trajectory(added[5], store.read(5))
        assert store.append(added[0]) == 6
    with trajstore.open(tmp_path / "s") as store:
        assert store.ids == [3, 5, 6]
        kept = {int(path.name) for path in (tmp_path / "s" / "segments").iterdir() if path.is_dir()}
        assert kept == set(store.newest(0).segments.tolist())
        assert segment_bytes > 1 or len(kept) == 3
        store.clear()
        assert (len(store), store.ids, store.num_samples) == (0, [], 0)
        assert [path.name for path in (tmp_path / "s" / "segments").iterdir()] == ["zarr.json"]
        assert store.append(added[2]) == 0
        assert_same_trajectory(added[2], store.read(0))


def test_a_limit_deletes_the_oldest_for_real(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s", max_trajectories=3, segment_bytes=1) as store:
        for seed in range(10):
            store.append(make(seed=seed))
            assert len(store) == min(seed + 1, 3)
        store.flush()
        assert store.ids == [7, 8, 9]
    assert len([path for path in (tmp_path / "s" / "segments").iterdir() if path.is_dir()]) == 3
    with trajstore.open(tmp_path / "s", max_trajectories=2) as store:
        assert store.ids == [8, 9]
    with trajstore.open(tmp_path / "s", mode="r") as store:
        assert store.ids == [8, 9]
        assert_same_trajectory(make(seed=8), store.read(8))


def inodes(path: Path) -> set[int]:
    return {p.stat().st_ino for p in (path / "segments").rglob("c.*")}


def test_linking_copies_no_data(tmp_path: Path) -> None:
    added = [make(seed=seed) for seed in range(5)]
    with trajstore.open(tmp_path / "a") as first, trajstore.open(tmp_path / "b") as second:
        first.extend(added)
        second.append(make(seed=9))
        assert second.link_from(first, ids=[3, 0]) == [1, 2]
        assert second.link_from(first) == [3, 4, 5, 6, 7]
        uuids = [second.index[i].uuid for i in second.ids]
        assert uuids[1:3] == [first.index[3].uuid, first.index[0].uuid]
        with pytest.raises(trajstore.TrajectoryNotFoundError):
            second.link_from(first, ids=[77])
        assert second.append(make(seed=8)) > 7
    assert len(inodes(tmp_path / "a") & inodes(tmp_path / "b")) == len(inodes(tmp_path / "a"))
    with trajstore.open(tmp_path / "a", mode="w") as first, trajstore.open(tmp_path / "b", mode="r") as second:
        assert len(first) == 0
        for trajectory_id, source in zip(second.ids, [make(seed=9), added[3], added[0], *added, make(seed=8)], strict=True):
            assert_same_trajectory(source, second.read(trajectory_id))
        assert second.verify() == []


def test_linking_from_memory_and_into_it() -> None:
    with trajstore.open(MemoryStorage()) as first, trajstore.open(MemoryStorage()) as second:
        first.extend([make(seed=1), make(seed=2)])
        second.link_from(first)
        first.clear()
        assert_same_trajectory(make(seed=2), second.read(1))


def test_compaction_keeps_contents_and_order(tmp_path: Path) -> None:
    added = [make(seed=seed, image=5 if seed % 2 else 6) for seed in range(8)]
    with trajstore.open(tmp_path / "s") as store:
        for trajectory in added:
            store.append(trajectory)
            store.flush()
        store.delete([2])
        before = store.sampler(seed=1).sample(20, fields=["actions"])
        assert store.compact() == 7
        assert_same(store.sampler(seed=1).sample(20, fields=["actions"]), before)
        assert store.compact() == 0
        assert store.ids == [0, 1, 3, 4, 5, 6, 7]
    assert len([path for path in (tmp_path / "s" / "segments").iterdir() if path.is_dir()]) == 2
    with trajstore.open(tmp_path / "s", mode="r") as store:
        for trajectory_id in store.ids:
            assert_same_trajectory(added[trajectory_id], store.read(trajectory_id))
        assert store.verify() == []


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for mode in ("r", "r+"):
        with pytest.raises(trajstore.StoreNotFoundError, match="no store or zarr checkpoint at"):
            trajstore.open(path, mode=mode)
        assert not path.exists()
    with trajstore.open(path, mode="w-") as store:
        store.append(make())
    with pytest.raises(trajstore.StoreExistsError):
        trajstore.open(path, mode="w-")
    with trajstore.open(path, mode="r+") as store:
        store.append(make())
        assert len(store) == 2
    with trajstore.open(path, mode="r") as store:
        for change in (lambda: store.append(make()), lambda: store.delete([0]), store.clear, store.compact, lambda: store.link_from(store)):
            with pytest.raises(trajstore.ReadOnlyError, match="mode='r'"):
                change()
    with trajstore.open(path, mode="w") as store:
        assert len(store) == 0
    with pytest.raises(trajstore.InvalidRequestError, match="mode='rw'"):
        trajstore.open(path, mode="rw")  # type: ignore[arg-type]


def test_places_that_are_no_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "trajectory_index.json").write_text("{}")
    zarr.open_group(tmp_path / "group", mode="w")
    for mode in ("r", "a", "w", "w-", "r+"):
        with pytest.raises(trajstore.NotAStoreError, match="is a file"):
            trajstore.open(file, mode=mode)
        with pytest.raises(trajstore.NotAStoreError, match=r"thesis\.tex"):
            trajstore.open(other, mode=mode)
        with pytest.raises(trajstore.NotAStoreError, match="load_checkpoint"):
            trajstore.open(tmp_path / "ckpt", mode=mode)
        with pytest.raises(trajstore.NotAStoreError, match="no store of trajstore"):
            trajstore.open(tmp_path / "group", mode=mode)
    assert (other / "thesis.tex").read_text() == "x"
    with pytest.raises(trajstore.StorageError, match="/proc"):
        trajstore.open("/proc/trajstore")
    with pytest.raises(trajstore.InvalidRequestError):
        trajstore.open(7)  # type: ignore[arg-type]
    with pytest.raises(trajstore.InvalidRequestError, match="NUL"):
        trajstore.open("a\0b")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.append(make())
    document = tmp_path / "s" / "zarr.json"
    document.write_text(document.read_text().replace('"format_version":1', '"format_version":2'))
    before = sorted(path.name for path in (tmp_path / "s").iterdir())
    for mode in ("r", "a", "w"):
        with pytest.raises(trajstore.FormatVersionError, match=r"format version 2.*up to 1"):
            trajstore.open(tmp_path / "s", mode=mode)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == before


def _try_to_write(path: Path, answers: "multiprocessing.Queue[str]") -> None:
    try:
        trajstore.open(path)
    except trajstore.LockedError as error:
        answers.put(str(error))


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.append(make())
        with pytest.raises(trajstore.LockedError, match=f"process {os.getpid()} on "):
            trajstore.open(tmp_path / "s")
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        child = context.Process(target=_try_to_write, args=(tmp_path / "s", answers))
        child.start()
        assert f"process {os.getpid()} on " in answers.get(timeout=60)
        child.join()
        assert len(trajstore.open(tmp_path / "s", mode="r")) in (0, 1)
    trajstore.open(tmp_path / "s").close()


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s", segment_bytes=1) as writer:
        reader = trajstore.open(tmp_path / "s", mode="r")
        sampler = reader.sampler()
        writer.extend([make(seed=1), make(seed=2)])
        writer.flush()
        assert len(reader) == 0
        reader.refresh()
        assert reader.ids == [0, 1]
        sampler.sample(4)
        writer.append(make(seed=3))
        writer.keep_last(1)
        writer.flush()
        reader.refresh()
        assert reader.ids == [2]
        assert_same(sampler.sample(30, fields=["actions"])["actions"].shape, torch.Size([18, 2]))


def test_a_reader_of_deleted_files_finds_the_new_index(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s", segment_bytes=1) as writer:
        writer.extend([make(seed=1), make(seed=2)])
        writer.flush()
        reader = trajstore.open(tmp_path / "s", mode="r")
        sampler = reader.sampler(seed=0)
        writer.delete([0])
        batch = sampler.sample(6, fields=["actions"])
        assert reader.ids == [1]
        rows = {tuple(r) for r in make(seed=2).actions.reshape(-1, 2).view(torch.int32).tolist()}
        assert {tuple(r) for r in batch["actions"].view(torch.int32).tolist()} <= rows
        with pytest.raises(trajstore.TrajectoryNotFoundError):
            reader.read(0)


@pytest.mark.parametrize("how", ["clear", "mode w"])
def test_a_reader_notices_that_ids_have_new_meanings(tmp_path: Path, how: str) -> None:
    with trajstore.open(tmp_path / "s") as writer:
        writer.extend([make(seed=1), make(seed=2)])
    reader = trajstore.open(tmp_path / "s", mode="r")
    cached, plain = reader.sampler(cache_size=5), reader.sampler()
    assert_same(cached.sample(8), plain.sample(8))
    with trajstore.open(tmp_path / "s", mode="w" if how == "mode w" else "a") as writer:
        writer.clear()
        writer.extend([make(seed=3), make(seed=4)])
    reader.refresh()
    assert reader.ids == [0, 1]
    assert_same_trajectory(make(seed=3), reader.read(0))
    expected = trajstore.open(tmp_path / "s", mode="r").sampler(seed=7).sample(30)
    for sampler in (cached, plain):
        sampler.seed(7)
        assert_same(sampler.sample(30), expected)


def test_a_broken_store_is_made_anew_by_mode_w(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.append(make())
    (tmp_path / "s" / "index" / "zarr.json").write_text("{")
    for mode in ("r", "a"):
        with pytest.raises(trajstore.CorruptionError, match=r"index/zarr\.json"):
            trajstore.open(tmp_path / "s", mode=mode)
    with trajstore.open(tmp_path / "s", mode="w") as store:
        assert store.append(make(seed=2)) == 0
        assert_same_trajectory(make(seed=2), store.read(0))


def test_info_of_a_trajectory() -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.append(make(steps=4, envs=2, weights="abc_12"))
        info = store.index[0]
        assert (info.num_samples, info.shape, info.max_episode_length) == (8, (4, 2, 2), 4)
        assert (info.model_weights_id, info.model_update_count, len(info.uuid)) == ("abc_12", 12, 32)
        assert store.fields["curr_obs/main_images"].row == ("uint8", (5, 5, 3))
        assert list(store.index) == [0]
        assert "1 trajectories, 8 samples" in repr(store)


def test_what_was_added_may_be_changed_afterwards() -> None:
    trajectory = make(seed=1, envs=1)
    with trajstore.open(MemoryStorage()) as store:
        store.append(trajectory)
        for value in (trajectory.actions, trajectory.curr_obs["states"], trajectory.dones):
            value.zero_()
        assert_same_trajectory(make(seed=1, envs=1), store.read(0))
        store.read(0).actions.zero_()
        store.flush()
        store.read(0).actions.zero_()
        assert_same_trajectory(make(seed=1, envs=1), store.read(0))
