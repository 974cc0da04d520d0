"""Episodes of one environment: taken from recorded robosuite Lift trajectories, or drawn with numpy.

An episode source answers for numbered slots; every slot is a different episode, and the same on every machine. Values
are numpy arrays keyed by field path; bfloat16 is carried as uint16 bits.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from benchmarks.specs import FLAG_PATHS, MODEL_HIDDEN, WorkloadSpec

Array: TypeAlias = np.ndarray[Any, Any]

CHANNEL_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
LIFT_STEPS, LIFT_STATES, LIFT_PIXELS = 64, 60, 128


class EpisodeSource(Protocol):
    """Makes episodes by number."""

    description: str

    def episodes(self, slots: range) -> dict[str, Array]:
        """One episode a slot: path -> [len(slots), episode_steps, ...]; flags have no extra row."""


class RenderedSource:
    """Drawn episodes: random walks for states, moving shapes over a texture for cameras, noise for the rest."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self.description = "drawn with numpy" if spec.cameras else "random walks"
        self._spec = spec

    def episodes(self, slots: range) -> dict[str, Array]:
        """See `EpisodeSource`."""
        spec = self._spec
        rng = np.random.default_rng((spec.seed, slots.start))
        shape = (len(slots), spec.episode_steps)
        walk = np.cumsum(rng.normal(0.0, 0.1, (shape[0], shape[1] + 1, spec.num_states)), axis=1).astype(np.float32)
        found = _drawn_acting(spec, rng, shape) | {"curr_obs/states": walk[:, :-1], "next_obs/states": walk[:, 1:]}
        for number, camera in enumerate(spec.cameras):
            frames = np.stack([_render(spec, slot=slot, camera=number) for slot in slots])
            found |= {f"curr_obs/{camera}": frames[:, :-1], f"next_obs/{camera}": frames[:, 1:]}
        return found


def _drawn_acting(spec: WorkloadSpec, rng: np.random.Generator, shape: tuple[int, int]) -> dict[str, Array]:
    """All fields but the observations, path -> [episodes, steps, ...]."""
    last = np.zeros((*shape, 1), dtype=bool)
    last[:, -1] = True
    actions = rng.uniform(-1.0, 1.0, (*shape, spec.num_actions)).astype(np.float32)
    found: dict[str, Array] = {
        "actions": actions,
        "rewards": rng.normal(size=(*shape, 1)).astype(np.float32),
        "prev_logprobs": rng.normal(size=(*shape, spec.num_actions)).astype(np.float32),
        "prev_values": rng.normal(size=(*shape, 1)).astype(np.float32),
        "terminations": np.zeros_like(last),
        "truncations": last,
        "dones": last,
    }
    if spec.cameras:
        hidden = torch.from_numpy(rng.normal(size=(*shape, MODEL_HIDDEN)).astype(np.float32)).bfloat16()
        found |= {
            "intervene_flags": np.repeat(rng.random((*shape, 1)) < 0.05, spec.num_actions, axis=-1),
            "versions": np.zeros((*shape, 1), dtype=np.float32),
            "forward_inputs/action": actions,
            "forward_inputs/model_hidden": hidden.view(torch.uint16).numpy(),
        }
    return found


def _render(spec: WorkloadSpec, *, slot: int, camera: int) -> Array:
    """uint8[episode_steps + 1, size, size, 3]: camera 0 stands still, the others move with sensor noise."""
    rng = np.random.default_rng((spec.seed, slot, camera, 7))
    size, steps = spec.image_size, spec.episode_steps + 1
    ramp = np.linspace(40.0, 200.0, size)
    texture = ramp[:, None, None] * rng.uniform(0.6, 1.0, 3) + rng.normal(0.0, 3.0, (size, size, 3))
    background = np.clip(texture, 0, 255).astype(np.uint8)
    if camera == 0:
        frames = np.broadcast_to(background, (steps, size, size, 3)).copy()
    else:
        frames = np.stack([np.roll(background, 2 * step, axis=1) for step in range(steps)])
        frames += rng.integers(0, 2, frames.shape, dtype=np.uint8)
    side = max(2, size // 6)
    for color in rng.integers(0, 255, (4, 3), dtype=np.uint8):
        start, speed = rng.integers(0, size - side, 2), rng.uniform(-1.5, 1.5, 2)
        for step in range(steps):
            top, left = np.clip(start + speed * step, 0, size - side).astype(int)
            frames[step, top : top + side, left : left + side] = color
    return frames


class LiftSource:
    """Recorded robosuite Lift, mirrored and recolored so that no two slots share a frame.

    Mirrors, channel orders and an added constant keep what codecs see: equal neighbours stay equal.
    """

    def __init__(self, folder: Path, spec: WorkloadSpec) -> None:
        self.description = "recorded robosuite Lift"
        self._spec = spec
        self._recorded = _load_lift(sorted(folder.glob("*/trajectory_*.pt")))
        self._num_recorded = len(self._recorded["curr_obs/states"])

    def episodes(self, slots: range) -> dict[str, Array]:
        """See `EpisodeSource`."""
        found: dict[str, Array] = {}
        for path in [field.path for field in self._spec.fields]:
            recorded = self._recorded[path]
            found[path] = np.stack([self._variant(path, recorded, slot) for slot in slots])
        return found

    def _variant(self, path: str, recorded: Array, slot: int) -> Array:
        values: Array = recorded[slot % self._num_recorded]
        variant = slot // self._num_recorded
        if path.endswith("_images"):
            # [steps, height, width, 3]
            stride = LIFT_PIXELS // self._spec.image_size
            rows, columns = (stride, -stride)[variant & 1], (stride, -stride)[variant >> 1 & 1]
            order = CHANNEL_ORDERS[variant // 4 % 6]
            values = values[:, ::rows, ::columns][..., list(order)] + np.uint8(variant // 24)
        elif path.endswith("/states"):
            values = values + np.float32(0.01 * variant)
        return values


def _load_lift(files: Sequence[Path]) -> dict[str, Array]:
    """Path -> [recorded environments, steps, ...] of all `files`, flags without their extra row."""
    columns: dict[str, list[Array]] = {}
    for file in files:
        for path, tensor in flatten_tensors(torch.load(file, weights_only=True)).items():
            values = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
            # [T, B, ...] -> [B, T, ...]
            steps = np.moveaxis(values.numpy(), 1, 0)
            columns.setdefault(path, []).append(steps[:, 1:] if path in FLAG_PATHS else steps)
    return {path: np.concatenate(parts) for path, parts in columns.items()}


def flatten_tensors(nested: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Nested dicts of tensors -> path -> tensor; whatever else they hold is left out."""
    found: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            found |= flatten_tensors(value, f"{prefix}{key}/")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
    return found


def has_recordings(folder: Path) -> bool:
    """Whether there are trajectories that RLinf wrote, a folder a rank."""
    return any(folder.glob("*/trajectory_*.pt"))


def make_source(spec: WorkloadSpec, lift: Path | None) -> EpisodeSource:
    """Recorded frames where the workload has cameras that fit and `lift` holds recordings, drawn ones elsewhere."""
    fits = spec.num_states == LIFT_STATES and LIFT_PIXELS % spec.image_size == 0 and spec.episode_steps <= LIFT_STEPS
    if spec.cameras and fits and lift is not None and has_recordings(lift):
        return LiftSource(lift, spec)
    return RenderedSource(spec)
