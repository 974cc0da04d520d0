"""Trajectories for reinforcement learning and robotics: kept in compressed Zarr v3 chunks, sampled straight from them.

The modules are floors of a house; each imports only from floors above it, as a test demands:

| floor | module | what lives there |
|---|---|---|
| 0 | `errors` | the exception tree |
| 1 | `trajectory` | `Trajectory`; nested fields as paths; torch dtypes as stored dtypes |
| 1 | `layout` | arithmetic: samples, steps, rows, frames; schemas |
| 1 | `shard` | the bytes of a `sharding_indexed` shard |
| 1 | `threads` | the one pool that encodes and decodes |
| 2 | `packing` | a trajectory as env-major rows and pooled frames, in memory |
| 2 | `codec` | rows a chunk and codec by the data; encode, decode |
| 2 | `demo` | a rendered scene to try things on |
| 2 | `storage` | the one seam to bytes elsewhere: directory, dictionary, any Zarr store |
| 3 | `segment` | write, link, open one segment |
| 4 | `index` | the table of live trajectories; publish and read it |
| 4 | `writer` | the background thread and its bounded queue |
| 4 | `reader` | draws -> rows -> chunks -> batch |
| 5 | `cache` | the decoded ring |
| 6 | `sampler` | windows, seeds, what to draw |
| 7 | `view` | a store as its readers see it |
| 8 | `staging` | segments that appear together: link, load, compact |
| 8 | `verify` | are the bytes those that were written |
| 9 | `store` | `TrajectoryStore`, `open` |
| 10 | `checkpoint` | pt and pkl files, snapshots, and reading them back |
| 11 | `replay_buffer` | the drop-in buffer |
| 12 | `cli` | commands |

`FORMAT.md` is the specification of what is on the disk.
"""

from typing import TYPE_CHECKING, Any

from trajstore.errors import (
    ClosedError,
    CorruptionError,
    EmptyBufferError,
    FieldNotFoundError,
    FormatVersionError,
    InvalidRequestError,
    InvalidTrajectoryError,
    LockedError,
    NotAStoreError,
    ReadOnlyError,
    SchemaMismatchError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    TrajectoryNotFoundError,
    TrajStoreError,
    UnsafeFileError,
    UnsupportedTypeError,
)
from trajstore.index import TrajectoryInfo
from trajstore.layout import Field
from trajstore.sampler import Sampler
from trajstore.store import TrajectoryStore, open  # noqa: A004  named as zarr.open
from trajstore.trajectory import Trajectory
from trajstore.verify import Fault

if TYPE_CHECKING:
    from trajstore.replay_buffer import TrajectoryReplayBuffer

__all__ = [
    "ClosedError",
    "CorruptionError",
    "EmptyBufferError",
    "Fault",
    "Field",
    "FieldNotFoundError",
    "FormatVersionError",
    "InvalidRequestError",
    "InvalidTrajectoryError",
    "LockedError",
    "NotAStoreError",
    "ReadOnlyError",
    "Sampler",
    "SchemaMismatchError",
    "StorageError",
    "StoreExistsError",
    "StoreNotFoundError",
    "TrajStoreError",
    "Trajectory",
    "TrajectoryInfo",
    "TrajectoryNotFoundError",
    "TrajectoryReplayBuffer",
    "TrajectoryStore",
    "UnsafeFileError",
    "UnsupportedTypeError",
    "open",
]


def __getattr__(name: str) -> Any:
    """Imports the buffer when it is first asked for, so that `python -m trajstore.replay_buffer` runs a module not imported yet."""
    if name == "TrajectoryReplayBuffer":
        from trajstore.replay_buffer import TrajectoryReplayBuffer  # noqa: PLC0415

        return TrajectoryReplayBuffer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
