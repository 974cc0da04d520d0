"""Trajectories for the tests, and comparison bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import Trajectory
from trajstore.trajectory import STORED_DTYPES

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def lift() -> Path:
    """Real input, where it lies beside the checkout."""
    if not (SHARED / "lift").is_dir():
        pytest.skip("no ../shared/data/lift beside this checkout")
    return SHARED / "lift"


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Random bits of a dtype, NaN and all; booleans are 0 or 1."""
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(np.bool_))
    data = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(data).reshape(-1).view(dtype).reshape(shape)


def make(
    *, steps: int = 6, envs: int = 3, seed: int = 0, chunk: int | None = None, extra: int = 1, image: int = 5, weights: str = "w_7"
) -> Trajectory:
    """A trajectory with every kind of field; `next_obs` is the next `curr_obs` but after some steps and the last."""
    rng = np.random.default_rng(seed)
    floats = torch.float32

    def tensor(*shape: int, dtype: torch.dtype = floats) -> torch.Tensor:
        return random_tensor((steps, envs, *shape), dtype, rng)

    def flags() -> torch.Tensor:
        return random_tensor((steps + extra, envs, 1), torch.bool, rng)

    curr = {"main_images": tensor(image, image, 3, dtype=torch.uint8), "states": tensor(4)}
    after = {key: torch.cat([value[1:], random_tensor((1, *value.shape[1:]), value.dtype, rng)]) for key, value in curr.items()}
    if steps > 3:
        after["main_images"][steps // 2, 0] ^= 1
        after["states"][steps // 2, 0] = 0.5
    return Trajectory(
        max_episode_length=steps,
        model_weights_id=weights,
        actions=tensor(chunk, 2) if chunk else tensor(2),
        intervene_flags=tensor(2, dtype=torch.bool),
        rewards=tensor(1),
        terminations=flags(),
        truncations=flags(),
        dones=flags(),
        prev_logprobs=tensor(2),
        prev_values=random_tensor((steps + 1, envs, 1), floats, rng),
        versions=tensor(1),
        forward_inputs={"hidden": tensor(3, dtype=torch.bfloat16), "action": tensor(2)},
        curr_obs=curr,
        next_obs=after,
    )


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(left: Any, right: Any, where: str = "", *, ordered: bool = True) -> None:
    """Equal trees: keys (in order), dtypes, shapes and bits of tensors."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), where
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert bits(left) == bits(right), where
    elif isinstance(left, Mapping):
        assert (list if ordered else set)(left) == (list if ordered else set)(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}/{key}", ordered=ordered)
    elif isinstance(left, list | tuple):
        assert type(left) is type(right), where
        assert len(left) == len(right), where
        for a, b in zip(left, right, strict=True):
            assert_same(a, b, where, ordered=ordered)
    elif isinstance(left, float | complex):
        assert (type(left), repr(left)) == (type(right), repr(right)), where  # NaN is NaN, and -0.0 is not 0.0
    else:
        assert (type(left), left) == (type(right), right), where


def assert_same_trajectory(left: Any, right: Trajectory) -> None:
    """Equal in everything that was given; a count that was not given is resolved."""
    for name in vars(left):
        if name != "model_update_count" or getattr(left, name) is not None:
            assert_same(getattr(left, name), getattr(right, name), name, ordered=False)


ALL_DTYPES = [getattr(torch, name) for name in STORED_DTYPES]
