"""A small scene with two cameras, rendered by numpy: a gripper goes to a cube and lifts it. For the demo, tests and benchmarks."""

from typing import Any

import numpy as np
import torch

from trajstore.trajectory import Trajectory

SIZE = 128
"""Height and width of the pictures, pixels."""
_CUBE, _GRIPPER = 0.09, 0.07  # half widths, of a table that is 1 wide
_REACH = 0.08  # how far the gripper goes in a step


def make_trajectory(*, seed: int, num_steps: int = 64, num_envs: int = 2) -> Trajectory:
    """One trajectory of noisy attempts to lift the cube.

    Args:
        seed: Equal seeds give equal trajectories.
        num_steps: T.
        num_envs: B.

    Returns:
        actions float32[T, B, 3], rewards float32[T, B, 1], flags bool[T + 1, B, 1], prev_logprobs float32[T, B, 3], and for each
        observation main_images and wrist_images uint8[T, B, 128, 128, 3] and states float32[T, B, 6].
    """
    rng = np.random.default_rng(seed)
    cube = rng.uniform(0.25, 0.75, (num_envs, 2))
    gripper = np.concatenate([rng.uniform(0.1, 0.9, (num_envs, 2)), np.full((num_envs, 1), 0.6)], axis=1)  # x, y, height
    observations = [_observe(gripper, cube)]
    actions, rewards = [], []
    for _ in range(num_steps):
        over = np.linalg.norm(gripper[:, :2] - cube, axis=1, keepdims=True) < _CUBE
        goal = np.concatenate([cube, np.where(over, 1.0, 0.3)], axis=1)
        action = np.clip(goal - gripper, -_REACH, _REACH) + rng.normal(0, 0.01, (num_envs, 3))
        gripper = np.clip(gripper + action, 0, 1)
        actions.append(action)
        rewards.append(over & (gripper[:, 2:] > 0.8))
        observations.append(_observe(gripper, cube))
    stacked = {key: torch.from_numpy(np.stack([o[key] for o in observations])) for key in observations[0]}
    dones = torch.zeros(num_steps + 1, num_envs, 1, dtype=torch.bool)
    dones[-1] = True
    action = torch.from_numpy(np.stack(actions)).float()
    return Trajectory(
        max_episode_length=num_steps,
        model_weights_id=f"demo_{seed}",
        actions=action,
        rewards=torch.from_numpy(np.stack(rewards)).float(),
        terminations=torch.zeros_like(dones),
        truncations=dones,
        dones=dones.clone(),
        prev_logprobs=-(action**2),
        curr_obs={key: value[:-1] for key, value in stacked.items()},
        next_obs={key: value[1:] for key, value in stacked.items()},
    )


def _observe(gripper: np.ndarray[Any, Any], cube: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    centre = np.full_like(cube, 0.5)
    return {
        "main_images": _render(gripper, cube, view=centre, width=1.0),
        "wrist_images": _render(gripper, cube, view=gripper[:, :2], width=0.4),
        "states": np.concatenate([gripper, cube, gripper[:, 2:]], axis=1).astype(np.float32),
    }


def _render(
    gripper: np.ndarray[Any, Any], cube: np.ndarray[Any, Any], *, view: np.ndarray[Any, Any], width: float
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pictures uint8[B, H, W, 3] from above, of the part of the table around `view` [B, 2]."""
    across = (np.arange(SIZE) + 0.5) / SIZE * width - width / 2
    x = view[:, 0, None, None] + across[None, None, :]  # [B, 1, W]
    y = view[:, 1, None, None] + across[None, :, None]  # [B, H, 1]
    grain = (np.sin(x * 90) * np.sin(y * 70 + 3 * np.sin(x * 11)) * 14).astype(np.int16)  # [B, H, W]
    picture = np.stack([150 + grain, 120 + grain, 90 + grain // 2], axis=-1)
    lift = np.clip(gripper[:, 2, None, None] - 0.3, 0, 1)
    for centre, half, colour in ((cube, _CUBE, (200, 40, 40)), (gripper[:, :2], _GRIPPER, (60, 70, 190))):
        dx, dy = np.abs(x - centre[:, 0, None, None]), np.abs(y - centre[:, 1, None, None])
        inside = (dx < half) & (dy < half)
        shade = (1 - 0.4 * dx / half) * (0.7 + 0.3 * lift)
        picture[inside] = np.broadcast_to(shade, inside.shape)[inside][:, None] * np.array(colour)
    clipped: np.ndarray[Any, np.dtype[np.uint8]] = np.clip(picture, 0, 255).astype(np.uint8)
    return clipped
