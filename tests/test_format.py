"""FORMAT.md, taken at its word: a store is read with zarr and json alone, and every array with TensorStore."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from conftest import ALL_DTYPES, assert_same, assert_same_trajectory, make, random_tensor

import trajstore
from trajstore import Trajectory


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, list[Trajectory]]:
    """Trajectories of three shapes in a store, some of which were deleted."""
    trajectories = [make(seed=seed, steps=steps) for seed, steps in enumerate((6, 4, 6, 9))]
    trajectories.insert(2, make(seed=8, image=40, extra=2))
    path = tmp_path / "store"
    with trajstore.open(path) as opened:
        opened.extend(trajectories)
        opened.flush()
        opened.delete([1])
        del trajectories[1]
    return path, trajectories


def attributes(path: Path) -> Any:
    return json.loads((path / "zarr.json").read_text())["attributes"]["trajstore"]


def read_by_the_text(path: Path) -> dict[int, dict[str, np.ndarray]]:
    """Every field of every live trajectory, [T + extra, B, ...], as FORMAT.md says it."""
    assert attributes(path)["format_version"] == 1
    generation = attributes(path / "index")["generation"]
    index = attributes(path / "index" / str(generation))
    table = zarr.open_array(path / "index" / str(generation), mode="r")[:]
    columns = dict(zip(index["columns"], table, strict=True))
    found = {}
    for row, trajectory_id in enumerate(columns["id"].tolist()):
        at = {name: int(column[row]) for name, column in columns.items()}
        segment = path / "segments" / str(at["segment"])
        steps, envs = at["num_steps"], at["num_envs"]
        fields = {}
        for field in index["schemas"][at["schema"]]:
            array = zarr.open_array(segment / field["array"], mode="r")[:]
            extra = field["extra_rows"]
            if field["frame"] is None:
                start = at["row_start"] + extra * at["env_start"]
                rows = array[start : start + envs * (steps + extra)]
            else:
                frames = zarr.open_array(segment / "curr_frame", mode="r")[at["row_start"] : at["row_start"] + envs * steps]
                rows = array[at["frame_start"] + frames + field["frame"]]
            env_major = rows.reshape(envs, steps + extra, *field["row_shape"])
            fields[field["path"]] = np.swapaxes(env_major, 0, 1)
        found[trajectory_id] = fields
    return found


def flat_fields(trajectory: Trajectory) -> dict[str, torch.Tensor]:
    flat = {name: value for name, value in vars(trajectory).items() if isinstance(value, torch.Tensor)}
    for parent in ("curr_obs", "next_obs", "forward_inputs"):
        flat |= {f"{parent}/{key}": value for key, value in getattr(trajectory, parent).items()}
    return flat


def test_a_store_is_read_with_zarr_and_json_alone(store: tuple[Path, list[Trajectory]]) -> None:
    path, trajectories = store
    found = read_by_the_text(path)
    assert list(found) == [0, 2, 3, 4]
    for fields, trajectory in zip(found.values(), trajectories, strict=True):
        expected = flat_fields(trajectory)
        assert set(fields) == set(expected)
        for name, tensor in expected.items():
            stored = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
            np.testing.assert_array_equal(fields[name].view(np.uint8), stored.numpy().view(np.uint8), err_msg=name)


@pytest.mark.filterwarnings("ignore:Object at .lock")  # zarr says so of any file that is not its own
def test_the_whole_hierarchy_opens_in_zarr(store: tuple[Path, list[Trajectory]]) -> None:
    group = zarr.open_group(store[0], mode="r")
    arrays = [key for key, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]
    on_disk = [path for path in store[0].rglob("zarr.json") if json.loads(path.read_text())["node_type"] == "array"]
    assert len(arrays) == len(on_disk) > 20


def test_every_array_is_read_by_tensorstore(store: tuple[Path, list[Trajectory]]) -> None:
    read = 0
    for document in store[0].rglob("zarr.json"):
        if json.loads(document.read_text())["node_type"] != "array":
            continue
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(document.parent)}}
        theirs = tensorstore.open(spec, read=True).result().read().result()
        np.testing.assert_array_equal(theirs.view(np.uint8), zarr.open_array(document.parent, mode="r")[...].view(np.uint8))
        read += 1
    assert read > 20


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_is_a_zarr_array_of_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    values = random_tensor((5, 2, 3), dtype, np.random.default_rng(3))
    with trajstore.open(tmp_path / "store") as store:
        store.append(Trajectory(actions=values))
        store.flush()
        assert_same(store.read(0).actions, values)
    array = zarr.open_array(tmp_path / "store" / "segments" / "0" / "actions", mode="r")
    rows = values.transpose(0, 1).contiguous().view(torch.uint8).numpy().reshape(10, -1)
    np.testing.assert_array_equal(array[:].view(np.uint8).reshape(10, -1), rows)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "store" / "segments" / "0" / "actions")}}
    theirs = tensorstore.open(spec, read=True).result().read().result()
    np.testing.assert_array_equal(theirs.view(np.uint8).reshape(10, -1), rows)
    name = str(dtype).removeprefix("torch.")
    assert array.attrs.get("torch_dtype", array.dtype.name) == name


@pytest.mark.filterwarnings("ignore:Object at .lock")
def test_keys_that_are_special_elsewhere(tmp_path: Path) -> None:
    keys = ["zarr.json", "__x", "c", "c.0.0", "a b", "ü%2F", "~", "__a~b", "observation.images.top", "-", "CON", "x" * 80, "curr_frame"]
    values = {key: torch.full((3, 2, 1), float(number)) for number, key in enumerate(keys)}
    with trajstore.open(tmp_path / "store") as store:
        store.append(Trajectory(actions=torch.zeros(3, 2, 1), curr_obs=dict(values), extras={"deep": {"er": dict(values)}}))
        store.flush()
    with trajstore.open(tmp_path / "store", mode="r") as store:
        assert_same(store.read(0).curr_obs, values)
        assert_same(store.read(0).extras, {"deep": {"er": values}})
    group = zarr.open_group(tmp_path / "store", mode="r")
    assert len([key for key, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]) == 2 * len(keys) + 2


def test_a_store_written_by_the_first_version_is_read(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).parent / "data" / "format_1.zip", tmp_path)
    for mode in ("r", "r+"):
        with trajstore.open(tmp_path, mode=mode) as store:
            assert store.ids == [0, 2]
            assert_same_trajectory(make(seed=1, image=40), store.read(0))
            assert_same_trajectory(make(seed=3, image=40, chunk=4), store.read(2))
            assert store.verify() == []
