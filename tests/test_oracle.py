"""RLinf 0.3.0 itself as the oracle: same data and seed, same batches, bit for bit; its files are read by us and ours by it.

Settings in which it is wrong are left out, or what is right is asserted of us alone: without a cache it reads fields of more than T rows
at another trajectory's place, its checkpoints from memory hold the window where its index lists all, and it seeds numpy for everyone.
"""

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_same, random_tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajstore import EmptyBufferError, StoreNotFoundError, Trajectory, TrajectoryReplayBuffer


@pytest.fixture(scope="module")
def rlinf() -> Iterator[SimpleNamespace]:
    """The reference's buffer and trajectory. Its logger comes from a Ray worker, so it gets another."""
    module = pytest.importorskip("rlinf.data.replay_buffer")
    state = np.random.get_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "get_logger", lambda: logging.getLogger("rlinf"))
        yield SimpleNamespace(Buffer=module.TrajectoryReplayBuffer, Trajectory=module.Trajectory)
    np.random.set_state(state)


FLAGS = ("terminations", "truncations", "dones")
ROWS = {
    "actions": torch.float32,
    "rewards": torch.float32,
    "intervene_flags": torch.bool,
    **dict.fromkeys(FLAGS, torch.bool),
    "prev_logprobs": torch.float32,
    "prev_values": torch.float32,
    "versions": torch.int64,
    "curr_obs/main_images": torch.uint8,
    "curr_obs/states": torch.float32,
    "next_obs/main_images": torch.uint8,
    "next_obs/states": torch.float32,
    "forward_inputs/hidden": torch.bfloat16,
    "forward_inputs/action": torch.float64,
}
"""Field path -> its dtype, unless the layout says bfloat16 or another for the floats."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """What all trajectories of a buffer have in common.

    Attributes:
        absent: Fields they lack.
        longer: Fields, other than flags, with a row more than T.
        chunk: Actions a step; None: no such axis.
        epochs: Rows that the flags have more than T.
        dtype: Of the 32 bit floats.
        backwards: Observations come in the other order of keys.
    """

    absent: frozenset[str] = frozenset()
    longer: frozenset[str] = frozenset()
    chunk: int | None = None
    epochs: int = 1
    dtype: torch.dtype = torch.float32
    backwards: bool = False

    def values(self, *, epoch_steps: int, envs: int, seed: int) -> dict[str, Any]:
        """Fields of a trajectory of as many epochs as the flags have extra rows."""
        rng = np.random.default_rng(seed)
        steps = epoch_steps * max(1, self.epochs)
        found: dict[str, Any] = {"curr_obs": {}, "next_obs": {}, "forward_inputs": {}}
        for path in reversed(ROWS) if self.backwards else ROWS:
            if path in self.absent:
                continue
            rows = steps + (self.epochs if path in FLAGS else path in self.longer)
            dtype = self.dtype if ROWS[path] == torch.float32 else ROWS[path]
            parent, _, key = path.rpartition("/")
            (found[parent] if parent else found)[key or path] = random_tensor((rows, envs, *self.row_shape(path)), dtype, rng)
        for obs in filter(None, (found["curr_obs"], found["next_obs"])):
            obs["task_descriptions"] = ["lift the cube"] * envs
            obs["returns"] = random_tensor((envs,), torch.float32, rng)
        if found["curr_obs"].keys() == found["next_obs"].keys():
            for key, tensor in found["curr_obs"].items():
                if key in ("main_images", "states") and len(tensor) == len(found["next_obs"][key]):
                    found["next_obs"][key][: steps // 2] = tensor[1 : steps // 2 + 1]
        return {**found, "max_episode_length": steps, "model_weights_id": f"weights-{seed}_{seed}"}

    def row_shape(self, path: str) -> tuple[int, ...]:
        if path.endswith("main_images"):
            return 4, 5, 3
        if path in ("versions", "prev_values"):
            return (1,)
        chunk = () if self.chunk is None else (self.chunk,)
        return chunk if path in (*FLAGS, "rewards", "intervene_flags") else (*chunk, 3)


SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)
LAYOUTS = st.builds(
    Layout,
    absent=st.frozensets(st.sampled_from(sorted(ROWS.keys() - {"rewards"})), max_size=6),
    longer=st.frozensets(st.sampled_from(["prev_values", "versions", "curr_obs/states", "next_obs/main_images"]), max_size=2),
    chunk=st.none() | st.integers(1, 3),
    epochs=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    backwards=st.booleans(),
)


def make_all(layout: Layout, shapes: list[tuple[int, int]], *, first_seed: int = 0) -> list[dict[str, Any]]:
    return [
        layout.values(epoch_steps=epoch_steps, envs=envs, seed=first_seed + number) for number, (epoch_steps, envs) in enumerate(shapes)
    ]


@contextlib.contextmanager
def closing(*buffers: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for buffer in buffers:
            buffer.close()


def add(theirs: Any, trajectories: list[Any]) -> None:
    """Adds to the reference, and returns when its files are written."""
    theirs.add_trajectories(trajectories)
    theirs._save_executor.shutdown()
    theirs._save_executor = ThreadPoolExecutor(20)


def assert_draw_the_same(ours: Any, theirs: Any, counts: list[int]) -> None:
    for count in counts:
        assert_same(theirs.sample(count), ours.sample(count))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layout=LAYOUTS,
    rounds=st.lists(st.tuples(SHAPES, st.lists(st.integers(1, 90), min_size=1, max_size=3)), min_size=1, max_size=3),
    window=st.integers(0, 6),
    caches=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    on_disk=st.tuples(st.booleans(), st.booleans()),
    is_flushed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_same_seed_and_data_give_the_same_batches(
    rlinf: SimpleNamespace,
    layout: Layout,
    rounds: list[tuple[list[tuple[int, int]], list[int]]],
    window: int,
    caches: tuple[int, int],
    on_disk: tuple[bool, bool],
    is_flushed: bool,
    seed: int,
) -> None:
    if on_disk[1]:
        layout = dataclasses.replace(layout, longer=frozenset())
    else:
        window = max(1, window)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = (
            kind(
                seed=seed,
                enable_cache=cache > 0 or not (own_disk or kind is TrajectoryReplayBuffer),
                cache_size=cache,
                sample_window_size=window,
                auto_save=own_disk,
                auto_save_path=f"{folder}/{kind.__module__}",
            )
            for kind, cache, own_disk in zip((TrajectoryReplayBuffer, rlinf.Buffer), caches, on_disk, strict=True)
        )
        added = 0
        with closing(ours, theirs):
            for shapes, counts in rounds:
                trajectories = [rlinf.Trajectory(**values) for values in make_all(layout, shapes, first_seed=added)]
                added += len(trajectories)
                add(theirs, trajectories)
                ours.add_trajectories(trajectories)
                if is_flushed:
                    ours.flush()
                assert_draw_the_same(ours, theirs, counts)
                assert [ours.is_ready(n) for n in range(added + 2)] == [theirs.is_ready(n) for n in range(added + 2)]
                held = added if on_disk[0] else min(added, window or added)
                assert len(ours) == ours.size == held
                assert ours._trajectory_id_list == theirs._trajectory_id_list[-held:]
                assert ours.total_samples == sum(theirs._trajectory_index[i]["num_samples"] for i in ours._trajectory_id_list)
                for trajectory_id, info in ours._trajectory_index.items():
                    assert info.items() >= theirs._trajectory_index[trajectory_id].items()


def test_objects_of_either_class_give_the_same_batches(rlinf: SimpleNamespace) -> None:
    all_values = make_all(Layout(), [(3, 2), (5, 1)])
    own, foreign, theirs = (kind(seed=4) for kind in (TrajectoryReplayBuffer, TrajectoryReplayBuffer, rlinf.Buffer))
    with closing(own, foreign, theirs):
        for buffer, kind in ((own, Trajectory), (foreign, rlinf.Trajectory), (theirs, rlinf.Trajectory)):
            buffer.add_trajectories([kind(**values) for values in all_values])
        expected = theirs.sample(20)
        assert_same(expected, own.sample(20))
        assert_same(expected, foreign.sample(20))


def test_more_than_the_window_holds_is_clamped_with_one_warning(rlinf: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    trajectories = [rlinf.Trajectory(**values) for values in make_all(Layout(), [(3, 2), (4, 1), (2, 3)])]
    ours, theirs = (kind(seed=1, sample_window_size=2) for kind in (TrajectoryReplayBuffer, rlinf.Buffer))
    with closing(ours, theirs):
        ours.add_trajectories(trajectories)
        theirs.add_trajectories(trajectories)
        caplog.clear()
        assert_draw_the_same(ours, theirs, [11, 10, 500])
        assert len(ours.sample(500)["rewards"]) == 10
    assert len([record for record in caplog.records if record.name.startswith("trajstore")]) == 1


def test_a_field_with_more_rows_is_right_without_a_cache(tmp_path: Path) -> None:
    all_values = make_all(Layout(longer=frozenset({"prev_values", "curr_obs/states"})), [(3, 2), (2, 4), (1, 1)])
    ours = TrajectoryReplayBuffer(seed=9, enable_cache=False, auto_save=True, auto_save_path=tmp_path / "store")
    with closing(ours):
        ours.add_trajectories([Trajectory(**values) for values in all_values])
        ours.flush()
        batch = ours.sample(15)
    drawn = torch.randint(0, 15, (15,), generator=torch.Generator().manual_seed(9))
    values = torch.cat([values["prev_values"][:-1].flatten(0, 1) for values in all_values])
    states = torch.cat([values["curr_obs"]["states"][:-1].flatten(0, 1) for values in all_values])
    assert_same(batch["prev_values"], values[drawn])
    assert_same(batch["curr_obs"]["states"], states[drawn])


def test_no_global_generator_is_touched(tmp_path: Path) -> None:
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    buffer = TrajectoryReplayBuffer(seed=3)
    with closing(buffer):
        buffer.add_trajectories([Trajectory(**values) for values in make_all(Layout(), [(3, 2)])])
        buffer.sample(4)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        buffer.load_checkpoint(tmp_path / "checkpoint")
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


CHANGING = [(3, 2), (1, 4), (5, 1), (2, 2), (4, 3)]
"""Steps an epoch, and environments, of the trajectories of a checkpoint."""
FORMS = pytest.mark.parametrize("form", ["pt", "pkl"])


@FORMS
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("layout", [Layout(longer=frozenset({"prev_values"})), Layout(chunk=2, epochs=2, dtype=torch.bfloat16)], ids=str)
def test_the_reference_loads_what_we_save(rlinf: SimpleNamespace, tmp_path: Path, form: str, on_disk: bool, layout: Layout) -> None:
    trajectories = [rlinf.Trajectory(**values) for values in make_all(layout, CHANGING)]
    for trajectory, weights in zip(trajectories, ["f643_12", "no-count", "", "of/a/team_3", "../../out"], strict=True):
        trajectory.model_weights_id = weights
    path = tmp_path / "store" if on_disk else ""
    ours = TrajectoryReplayBuffer(
        seed=8, sample_window_size=2 if on_disk else 9, trajectory_format=form, auto_save=on_disk, auto_save_path=path
    )
    fresh, loaded = (rlinf.Buffer(seed=seed, sample_window_size=9) for seed in (8, 1))
    with closing(ours, fresh, loaded):
        ours.add_trajectories(trajectories)
        ours.save_checkpoint(tmp_path / "checkpoint")
        fresh.add_trajectories(trajectories)
        loaded.load_checkpoint(str(tmp_path / "checkpoint"))
        assert loaded.trajectory_format == form
        assert_draw_the_same(loaded, fresh, [40, 1, 7])
        assert (len(loaded), loaded.total_samples, loaded._trajectory_counter) == (len(fresh), fresh.total_samples, 5)
        more = [rlinf.Trajectory(**values) for values in make_all(layout, [(2, 2)], first_seed=9)]
        for buffer in (loaded, fresh):
            buffer.add_trajectories(more)
        assert_draw_the_same(loaded, fresh, [40])


@pytest.fixture(params=["directory", "checkpoint from disk", "checkpoint from memory"])
def their_folder(request: pytest.FixtureRequest, rlinf: SimpleNamespace, tmp_path: Path) -> Any:
    """Makes a directory that the reference wrote, in a form."""

    def write(form: str) -> Path:
        on_disk = request.param != "checkpoint from memory"
        theirs = rlinf.Buffer(
            seed=6, sample_window_size=9, auto_save=on_disk, auto_save_path=str(tmp_path / "auto"), trajectory_format=form
        )
        with closing(theirs):
            add(theirs, [rlinf.Trajectory(**values) for values in make_all(Layout(epochs=2, chunk=2), CHANGING)])
            theirs.sample(1)
            if request.param == "directory":
                return tmp_path / "auto"
            theirs.save_checkpoint(str(tmp_path / "checkpoint"))
            return tmp_path / "checkpoint"

    return write


@FORMS
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_we_load_what_the_reference_saves(rlinf: SimpleNamespace, tmp_path: Path, their_folder: Any, form: str, on_disk: bool) -> None:
    folder = their_folder(form)
    ranks = [{}] + [{"is_distributed": True, "local_rank": rank, "world_size": size} for size in (1, 2, 3, 6) for rank in range(size)]
    more = [rlinf.Trajectory(**values) for values in make_all(Layout(epochs=2, chunk=2), [(2, 2), (3, 1)], first_seed=9)]
    ours = TrajectoryReplayBuffer(seed=1, sample_window_size=9, auto_save=on_disk, auto_save_path=tmp_path / "own" if on_disk else "")
    for rank in ranks:
        theirs = rlinf.Buffer(seed=2, sample_window_size=9)
        with closing(theirs):
            theirs.load_checkpoint(str(folder), **rank)
            ours.load_checkpoint(folder, **rank)
            assert ours._trajectory_id_list == theirs._trajectory_id_list
            assert (len(ours), ours.total_samples, ours.seed) == (len(theirs), theirs.total_samples, 6)
            assert [ours.is_ready(n) for n in range(7)] == [theirs.is_ready(n) for n in range(7)]
            assert ours.trajectory_format == theirs.trajectory_format == form
            if len(theirs):
                assert_draw_the_same(ours, theirs, [30, 2])
            else:
                with pytest.raises(EmptyBufferError):
                    ours.sample(1)
            theirs.add_trajectories(more)
            ours.add_trajectories(more)
            assert ours._trajectory_id_list == theirs._trajectory_id_list
            assert_draw_the_same(ours, theirs, [30])
    ours.close()


def test_a_checkpoint_of_the_reference_that_lacks_files_is_refused(rlinf: SimpleNamespace, tmp_path: Path) -> None:
    theirs = rlinf.Buffer(sample_window_size=2)
    with closing(theirs):
        theirs.add_trajectories([rlinf.Trajectory(**values) for values in make_all(Layout(), CHANGING)])
        theirs.save_checkpoint(str(tmp_path / "checkpoint"))
    ours = TrajectoryReplayBuffer()
    with closing(ours), pytest.raises(StoreNotFoundError, match="lists trajectory 0, but there is no file"):
        ours.load_checkpoint(tmp_path / "checkpoint")


def test_real_input_gives_the_same_batches_in_every_form(rlinf: SimpleNamespace, tmp_path: Path, lift: Path) -> None:
    theirs, ours = rlinf.Buffer(sample_window_size=3), TrajectoryReplayBuffer(sample_window_size=3, cache_size=1)
    with closing(theirs, ours):
        for rank in (1, 0):
            theirs.load_checkpoint(str(lift / f"rank_{rank}"))
            ours.load_checkpoint(lift / f"rank_{rank}")
            assert_draw_the_same(ours, theirs, [64, 9])
        for form in ("zarr", "pkl", "pt"):
            again = TrajectoryReplayBuffer(sample_window_size=3, enable_cache=False)
            with closing(again):
                ours.trajectory_format = form
                ours.save_checkpoint(tmp_path / form)
                again.load_checkpoint(tmp_path / form)
                assert_same(theirs.sample(32), again.sample(32))
                ours.load_checkpoint(tmp_path / form)
                ours.sample(32)
        loaded, fresh = (rlinf.Buffer(sample_window_size=3) for _ in range(2))
        with closing(loaded, fresh):
            loaded.load_checkpoint(str(tmp_path / "pt"))
            fresh.load_checkpoint(str(lift / "rank_0"))
            assert_draw_the_same(loaded, fresh, [64, 9])
