"""What is measured: frozen workloads. Shapes, counts and seeds only; the data is made by `benchmarks.workloads`."""

import math
from dataclasses import dataclass, replace

import numpy as np

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1, "bool": 1}
FLAG_PATHS = frozenset({"terminations", "truncations", "dones"})
MODEL_HIDDEN = 64
QUICK_WORKLOADS = ("A", "B")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One field of every trajectory of a workload.

    Attributes:
        path: Keys of nested dicts joined by `/`.
        dtype: torch's name of the dtype.
        row_shape: Shape of one row, without the axes [T, B].
        extra_rows: Rows beyond T; the flags have one before the first step.
    """

    path: str
    dtype: str
    row_shape: tuple[int, ...]
    extra_rows: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.row_shape)

    @property
    def is_image(self) -> bool:
        """True for camera frames, uint8[height, width, 3] a row."""
        return len(self.row_shape) == 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """One workload: `num_trajectories` of [num_steps, num_envs].

    Attributes:
        name: The letter it is asked for by.
        title: A few words for tables and plots.
        num_trajectories: Trajectories that are added.
        num_steps: T.
        num_envs: B.
        episode_steps: Each environment begins a new episode after so many steps.
        cameras: Names of the cameras; none: state only.
        image_size: Height and width of a frame in pixels.
        num_states: Length of `states`.
        num_actions: Length of `actions`.
        cache: Trajectories that the cached mode keeps decoded.
        window: Trajectories that are sampled from.
        add_size: Trajectories given to one call of add.
        seed: Seeds data and samplers.
    """

    name: str
    title: str
    num_trajectories: int
    num_steps: int
    num_envs: int
    episode_steps: int = 64
    cameras: tuple[str, ...] = ()
    image_size: int = 128
    num_states: int = 60
    num_actions: int = 7
    cache: int
    window: int
    add_size: int = 1
    seed: int = 1234

    def __post_init__(self) -> None:
        """Refuses counts that name no data."""
        counts = (self.num_trajectories, self.num_steps, self.num_envs, self.episode_steps, self.cache, self.window)
        if min(counts) < 1 or self.add_size < 1:
            raise ValueError(f"workload {self.name}: every count must be at least 1, found {counts}")

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """Every field, those of both observations last."""
        return _acting_fields(self) + _observation_fields(self)

    @property
    def num_samples(self) -> int:
        """Transitions in all."""
        return self.num_trajectories * self.num_steps * self.num_envs

    @property
    def row_bytes(self) -> int:
        """Bytes of one transition in a batch."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all trajectories as tensors."""
        envs = self.num_trajectories * self.num_envs
        return sum(f.row_bytes * envs * (self.num_steps + f.extra_rows) for f in self.fields)

    @property
    def cache_bytes(self) -> int:
        """Decoded bytes of the trajectories that the cached mode keeps, each frame counted in both observations."""
        return min(self.cache, self.num_trajectories) * self.num_steps * self.num_envs * self.row_bytes

    def batch_bytes(self, num_rows: int) -> int:
        """Bytes of a batch of `num_rows`, which is clamped to the window as samplers do."""
        window = min(self.window, self.num_trajectories) * self.num_steps * self.num_envs
        return min(num_rows, window) * self.row_bytes


def _acting_fields(spec: WorkloadSpec) -> tuple[FieldSpec, ...]:
    actions = (spec.num_actions,)
    plain = [
        FieldSpec(path="actions", dtype="float32", row_shape=actions),
        FieldSpec(path="rewards", dtype="float32", row_shape=(1,)),
        FieldSpec(path="prev_logprobs", dtype="float32", row_shape=actions),
        FieldSpec(path="prev_values", dtype="float32", row_shape=(1,)),
    ]
    flags = [FieldSpec(path=path, dtype="bool", row_shape=(1,), extra_rows=1) for path in sorted(FLAG_PATHS)]
    if not spec.cameras:
        return (*plain, *flags)
    policy = [
        FieldSpec(path="intervene_flags", dtype="bool", row_shape=actions),
        FieldSpec(path="versions", dtype="float32", row_shape=(1,)),
        FieldSpec(path="forward_inputs/action", dtype="float32", row_shape=actions),
        FieldSpec(path="forward_inputs/model_hidden", dtype="bfloat16", row_shape=(MODEL_HIDDEN,)),
    ]
    return (*plain, *flags, *policy)


def _observation_fields(spec: WorkloadSpec) -> tuple[FieldSpec, ...]:
    frame = (spec.image_size, spec.image_size, 3)
    return tuple(
        field
        for side in ("curr_obs", "next_obs")
        for field in (
            *(FieldSpec(path=f"{side}/{camera}", dtype="uint8", row_shape=frame) for camera in spec.cameras),
            FieldSpec(path=f"{side}/states", dtype="float32", row_shape=(spec.num_states,)),
        )
    )


SPECS: dict[str, WorkloadSpec] = {
    "A": WorkloadSpec(
        name="A",
        title="images, 6 x [64, 8]",
        num_trajectories=6,
        num_steps=64,
        num_envs=8,
        cameras=("main_images", "wrist_images"),
        cache=6,
        window=6,
    ),
    "B": WorkloadSpec(
        name="B",
        title="state only, 100 x [64, 8]",
        num_trajectories=100,
        num_steps=64,
        num_envs=8,
        num_states=39,
        cache=100,
        window=100,
        add_size=10,
    ),
    "C": WorkloadSpec(
        name="C",
        title="images, window 100, cache 5",
        num_trajectories=100,
        num_steps=64,
        num_envs=2,
        cameras=("main_images", "wrist_images"),
        cache=5,
        window=100,
    ),
    "D": WorkloadSpec(
        name="D",
        title="long, 4 x [500, 16], 64 x 64",
        num_trajectories=4,
        num_steps=500,
        num_envs=16,
        cameras=("main_images",),
        image_size=64,
        cache=4,
        window=4,
    ),
    "E": WorkloadSpec(
        name="E",
        title="state only, 100,000 x [8, 1]",
        num_trajectories=100_000,
        num_steps=8,
        num_envs=1,
        episode_steps=8,
        num_states=39,
        cache=100_000,
        window=100_000,
        add_size=1000,
    ),
}


def quick_spec(spec: WorkloadSpec) -> WorkloadSpec:
    """The same workload made small enough for a look, at most some 50 MB of tensors."""
    count = {"A": 2, "B": 20, "C": 20, "D": 1, "E": 2000}[spec.name]
    envs = {"A": 2, "C": 1, "D": 4}.get(spec.name, spec.num_envs)
    steps = {"C": 16}.get(spec.name, spec.num_steps)
    return replace(
        spec,
        title=f"{spec.title} (quick: {count} x [{steps}, {envs}])",
        num_trajectories=count,
        num_steps=steps,
        num_envs=envs,
        episode_steps=min(spec.episode_steps, steps),
        cache=min(spec.cache, count),
        window=min(spec.window, count),
        add_size=min(spec.add_size, count),
    )


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """What a row is stored as by those who know no bfloat16: the unsigned integer of its size."""
    return np.dtype("uint16" if name == "bfloat16" else name)
