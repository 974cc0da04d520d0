"""Trajectories for reinforcement learning and robotics: kept in compressed Zarr v3 chunks, sampled straight from them.

The modules are floors of a house; each imports only from floors above it, as a test demands:

| floor | module | what lives there |
|---|---|---|
| 0 | `errors` | the exception tree |
| 1 | `trajectory` | `Trajectory`; nested fields as paths; torch dtypes as stored dtypes |
| 1 | `layout` | arithmetic: samples, steps, rows, frames; schemas |
| 1 | `shard` | the bytes of a `sharding_indexed` shard |
| 1 | `folders` | directories that appear whole |
| 1 | `untrusted` | pt and pkl files, read without trust |
| 1 | `threads` | the one pool that encodes and decodes |
| 1 | `memory` | blocks for batches, used again |
| 1 | `mapping` | files as memory |
| 2 | `packing` | a trajectory as env-major rows and pooled frames, in memory |
| 2 | `codec` | rows a chunk and codec by the data; encode |
| 2 | `demo` | a rendered scene to try things on |
| 2 | `storage` | the one seam to bytes elsewhere; a dictionary behind it |
| 3 | `local_storage`, `zarr_storage` | a directory, any Zarr store behind it |
| 3 | `decode` | many chunks of one array into their places |
| 4 | `arrays` | one array of a segment: description, shard, and back |
| 5 | `segment` | encode, write, link, open one segment |
| 6 | `index` | the table of live trajectories; publish and read it |
| 6 | `writer` | the background thread and its bounded queue |
| 6 | `reader` | rows -> chunks -> their places |
| 7 | `gather` | a batch: fields, memory, rows of sources |
| 7 | `cache` | the decoded ring |
| 7 | `place` | the storage at a place, and what is in it: a store, nothing, something else |
| 8 | `sampler` | windows, seeds, what to draw |
| 9 | `view` | a store as its readers see it |
| 10 | `staging` | segments that appear together: link, load, compact |
| 10 | `verify` | are the bytes those that were written |
| 11 | `store` | `TrajectoryStore`, `open` |
| 12 | `checkpoint` | pt and pkl files, snapshots, and reading them back |
| 13 | `replay_buffer` | the drop-in buffer |
| 14 | `cli` | commands |

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
