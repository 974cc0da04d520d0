"""Bad input: an error that says what and where, and the store as it was; odd input that is taken."""

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_same, assert_same_trajectory, make

import trajstore
from trajstore import InvalidTrajectoryError, Trajectory, UnsupportedTypeError
from trajstore.storage import MemoryStorage
from trajstore.trajectory import split_weights_id, update_count

T, B = 4, 2


def changed(**values: Any) -> Trajectory:
    trajectory = make(steps=T, envs=B)
    for name, value in values.items():
        setattr(trajectory, name, value)
    return trajectory


def obs(value: Any, key: Any = "key") -> dict[Any, Any]:
    return {"states": torch.zeros(T, B, 1), key: value}


BAD = {
    "too few rows": (changed(actions=torch.zeros(T - 1, B, 2)), InvalidTrajectoryError, r"'actions'.*\[3, 2, 2\].*T = 4"),
    "too few rows below": (changed(curr_obs=obs(torch.zeros(1, B))), InvalidTrajectoryError, "'curr_obs/key'.*T = 4"),
    "other B": (changed(versions=torch.zeros(T, B + 1, 1)), InvalidTrajectoryError, r"'versions'.*\[4, 3, 1\].*B = 2"),
    "flags that are no epochs": (changed(dones=torch.zeros(T + 3, B, 1)), InvalidTrajectoryError, "'dones'.*no multiple of 3"),
    "one axis": (changed(rewards=torch.zeros(T)), InvalidTrajectoryError, r"'rewards'.*lacks the axes \[T, B"),
    "T of 0": (Trajectory(actions=torch.zeros(0, B, 2)), InvalidTrajectoryError, "T = 0"),
    "B of 0": (Trajectory(actions=torch.zeros(T, 0, 2)), InvalidTrajectoryError, "B = 0"),
    "no tensor": (Trajectory(), InvalidTrajectoryError, "holds no tensor"),
    "only a string": (Trajectory(curr_obs={"task": "lift"}), InvalidTrajectoryError, "holds no tensor"),
    "a lambda": (changed(curr_obs=obs(lambda: 0)), UnsupportedTypeError, "'curr_obs/key'.*function"),
    "a lambda in a list": (changed(curr_obs=obs([1, lambda: 0])), UnsupportedTypeError, "'curr_obs/key'.*function"),
    "an object": (changed(next_obs=obs(object())), UnsupportedTypeError, "'next_obs/key'.*object"),
    "a set": (changed(extras=obs({1})), UnsupportedTypeError, "'extras/key'.*set"),
    "a sparse tensor": (changed(extras=obs(torch.zeros(T, B).to_sparse())), UnsupportedTypeError, "'extras/key'.*sparse"),
    "a tensor without data": (changed(extras=obs(torch.zeros(T, B, device="meta"))), UnsupportedTypeError, "'extras/key'.*meta"),
    "an array of objects": (changed(extras=obs(np.full((T, B), None))), UnsupportedTypeError, "'extras/key'.*object"),
    "an array of strings": (changed(extras=obs(np.full((T, B), "a"))), UnsupportedTypeError, "'extras/key'.*<U1"),
    "a list of actions": (changed(actions=[1.0]), UnsupportedTypeError, "'actions': expected a tensor, found list"),
    "a dict of rewards": (changed(rewards={"a": torch.zeros(T, B)}), UnsupportedTypeError, "'rewards': expected a tensor, found dict"),
    "observations that are a tensor": (changed(curr_obs=torch.zeros(T, B)), UnsupportedTypeError, "'curr_obs': expected a dict"),
    "not a trajectory": ("text", UnsupportedTypeError, "found str"),
    "None": (None, UnsupportedTypeError, "found NoneType"),
    "a number as key": (changed(curr_obs=obs(1, key=3)), UnsupportedTypeError, "'curr_obs'.*3 "),
    **{
        f"key {key!r}": (changed(curr_obs={"a": obs(torch.zeros(T, B), key=key)}), InvalidTrajectoryError, "'curr_obs/a'.*can't be a key")
        for key in ("", "/", "a/b", ".", "..", "...", "a\0b", "x" * 81, "ü" * 41, "\ud800")
    },
}


@pytest.fixture
def store() -> Any:
    with trajstore.open(MemoryStorage()) as opened:
        yield opened


@pytest.mark.parametrize(("bad", "error", "message"), BAD.values(), ids=BAD)
def test_bad_trajectories_are_refused_and_nothing_is_added(
    store: trajstore.TrajectoryStore, bad: Any, error: type[Exception], message: str
) -> None:
    store.append(make(seed=1))
    with pytest.raises(error, match=message) as caught:
        store.extend([make(seed=2), bad, make(seed=3)])
    assert isinstance(caught.value, trajstore.TrajStoreError)
    assert store.ids == [0]
    assert store.extend([]) == []
    assert store.append(make(seed=2)) == 1
    assert_same_trajectory(make(seed=1), store.read(0))


def test_tensors_that_are_taken(store: trajstore.TrajectoryStore) -> None:
    plain = torch.arange(T * B * 6.0).reshape(T, B, 6)
    taken = {
        "requires grad": torch.nn.Parameter(plain.clone()),
        "view": plain.repeat_interleave(2, -1)[..., ::2],
        "transposed": plain.permute(1, 0, 2).contiguous().permute(1, 0, 2),
        "expanded": plain[:, :, :1].expand(T, B, 6) * 0 + plain,
        "numpy": plain.numpy(),
        "big endian": plain.numpy().astype(">f4"),
        "fortran": np.asfortranarray(plain.numpy()),
        "read only": np.frombuffer(plain.numpy().tobytes(), "f4").reshape(T, B, 6),
        "conjugated": torch.view_as_complex(plain.reshape(T, B, 3, 2)).conj(),
        "nan": torch.full((T, B), float("nan")),
        "minus zero": torch.full((T, B), -0.0),
    }
    store.append(Trajectory(actions=plain.numpy(), curr_obs=taken, next_obs=taken))
    found = store.read(0)
    assert_same(found.actions, plain)
    for obs_found in (found.curr_obs, found.next_obs):
        for key in list(taken)[:8]:
            assert_same(obs_found[key], plain, key)
        assert_same(obs_found["conjugated"], taken["conjugated"].resolve_conj())
        assert_same(obs_found["nan"], taken["nan"])
        assert_same(obs_found["minus zero"], taken["minus zero"])


def test_observations_that_differ_only_in_bits_are_kept_apart(store: trajstore.TrajectoryStore) -> None:
    curr, after = torch.zeros(T, 1, 2), -torch.zeros(T, 1, 2)
    store.append(Trajectory(actions=torch.zeros(T, 1, 1), curr_obs={"x": curr}, next_obs={"x": after}))
    assert_same(store.read(0).next_obs["x"], after)


def test_lists_strings_and_numbers_are_kept_and_not_sampled(store: trajstore.TrajectoryStore) -> None:
    values = {
        "task_descriptions": ["lift the cube", "ümläut"],
        "nested": {"none": None, "list": [1, 2.5, True, [None, "x"]], "tuple": (1, ("a",)), "empty": {}},
        "floats": [float("nan"), float("inf"), -float("inf"), -0.0, 1e-310],
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "scalar": torch.tensor(3, dtype=torch.int8),
        "vector": torch.arange(3, dtype=torch.bfloat16),
        "dicts": [{"a": 1, "b": torch.tensor([1.5])}, {"$tuple": "not a tag"}],
        "huge": 2**80,
    }
    store.append(Trajectory(actions=torch.zeros(T, B, 1), curr_obs=dict(values), extras={"seed": np.int64(7), "lr": np.float32(0.5)}))
    store.flush()
    found = store.read(0)
    assert_same(found.curr_obs, values, ordered=False)
    assert found.extras == {"seed": 7, "lr": 0.5}
    assert list(store.sampler().sample(2)) == ["actions"]


def test_t_and_b_come_from_the_first_reference_field(store: trajstore.TrajectoryStore) -> None:
    longer = torch.zeros(T + 2, B, 1)
    store.append(Trajectory(actions=longer, rewards=torch.zeros(T, B, 1)))
    store.append(Trajectory(actions=torch.zeros(T, B, 1), curr_obs={"x": longer}))
    store.append(Trajectory(curr_obs={"x": longer}))
    store.append(Trajectory(prev_logprobs=torch.zeros(T, B, 5), rewards=longer))
    assert [store.index[i].shape for i in store.ids] == [(T, B, 1), (T, B, 1), (T + 2, B, 1), (T, B, 5)]
    assert_same(store.read(0).actions, longer)


@dataclass
class Theirs:
    """As RLinf's own class is: other defaults, one more field."""

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Any = None
    rewards: Any = None
    curr_obs: dict[str, Any] = field(default_factory=dict)
    new_field: Any = None


def test_objects_are_taken_by_their_attributes(store: trajstore.TrajectoryStore) -> None:
    rows = torch.ones(T, B, 1)
    store.append(Theirs(model_weights_id="u_3", actions=rows, curr_obs=OrderedDict(x=rows), new_field=rows))
    found = store.read(0)
    assert (found.model_weights_id, found.model_update_count) == ("u_3", 3)
    assert_same([found.actions, found.curr_obs, found.extras], [rows, {"x": rows}, {"new_field": rows}])


@pytest.mark.parametrize(
    ("weights_id", "split"),
    [("a-b_12", ("a-b", 12)), ("a_b_0", ("a_b", 0)), ("a", ("a", None)), ("", ("", None)), ("a_", ("a_", None)), ("a_-1", ("a_-1", None))],
)
def test_weights_ids_split(weights_id: str, split: tuple[str, int | None]) -> None:
    assert split_weights_id(weights_id) == split


def test_update_counts() -> None:
    versions = torch.tensor([[3.0], [9.0]])
    assert update_count(Trajectory(model_weights_id="a_4", versions=versions)) == 4
    assert update_count(Trajectory(model_weights_id="a_4", model_update_count=0)) == 0
    assert update_count(Trajectory(model_weights_id="a", versions=versions)) == 9
    assert update_count(Trajectory(model_weights_id="a", versions=torch.full((2, 2), float("nan")))) == 0
    assert update_count(Trajectory(model_weights_id="a")) == 0


def test_the_store_on_disk_is_as_it_was_after_bad_input(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s") as store:
        store.append(make())
        store.flush()
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")}
        for bad, error, _ in BAD.values():
            with pytest.raises(error):
                store.append(bad)
        store.flush()
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")} == before


@pytest.mark.parametrize("nothing", [[], (), None])
def test_adding_nothing_is_refused(nothing: Any) -> None:
    with trajstore.TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([make(seed=1)])
        with pytest.raises(trajstore.InvalidRequestError, match="found none"):
            buffer.add_trajectories(nothing)
        assert buffer.get_stats()["num_trajectories"] == 1
