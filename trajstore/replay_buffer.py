"""The drop-in for RLinf 0.3.0's `TrajectoryReplayBuffer`: the same constructor, methods and batches, over a `TrajectoryStore`."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, get_args

from trajstore.checkpoint import (
    METADATA,
    BufferState,
    CheckpointFormat,
    index_dict,
    is_checkpoint_file,
    rank_share,
    read_entries,
    read_state,
    write_files,
    write_json,
)
from trajstore.errors import ClosedError, InvalidRequestError, NotAStoreError, StoreNotFoundError, TrajectoryNotFoundError
from trajstore.folders import replacing
from trajstore.index import TrajectoryInfo
from trajstore.local_storage import local_path
from trajstore.staging import Staging
from trajstore.storage import MemoryStorage
from trajstore.store import TrajectoryStore
from trajstore.store import open as open_store
from trajstore.threads import stop_threads
from trajstore.trajectory import Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TrajectoryReplayBuffer:
    """Keeps trajectories [T, B, ...] and samples single transitions from the newest of them.

    Same data and seed give RLinf 0.3.0's batches, bit for bit. Thread-safe.

    Args:
        seed: Of the buffer's private generator.
        enable_cache: Keep the newest trajectories decoded in RAM. False: each batch is gathered from compressed chunks.
        cache_size: How many are kept decoded.
        sample_window_size: Sample from the newest N trajectories; 0: from all.
        auto_save: True: trajectories go to the store at `auto_save_path`, on a background thread; what that store holds already is
            there to be sampled. False: they are held compressed in memory, at most the window, until `save_checkpoint`.
        auto_save_path: Directory of the store.
        trajectory_format: Form of a checkpoint: "pt" or "pkl", directories that RLinf itself loads, or "zarr", a snapshot of the store.
        cache_bytes: Bytes that the cache may take; None: any.
        max_trajectories: Keep at most this many; older ones are deleted, from the disk too. None: keep all.

    Raises:
        InvalidRequestError: An argument is out of range or missing.
        LockedError: Another buffer writes to `auto_save_path`.
        NotAStoreError: `auto_save_path` holds something else.
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: "str | os.PathLike[str]" = "",
        trajectory_format: CheckpointFormat = "pt",
        *,
        cache_bytes: int | None = None,
        max_trajectories: int | None = None,
    ) -> None:
        if trajectory_format not in get_args(CheckpointFormat):
            raise InvalidRequestError(f"trajectory_format={trajectory_format!r}: expected 'pt', 'pkl' or 'zarr'")
        if auto_save and not os.fspath(auto_save_path):
            raise InvalidRequestError("auto_save=True needs auto_save_path, the directory to save to")
        if max_trajectories is not None and max_trajectories < 1:
            raise InvalidRequestError(f"max_trajectories={max_trajectories}: expected at least 1, or None to keep all")
        window = max(0, int(sample_window_size))
        self.seed = seed
        self.enable_cache = enable_cache
        self.sample_window_size = window
        self.auto_save = auto_save
        self.auto_save_path = os.fspath(auto_save_path) if auto_save else None
        self.trajectory_format = trajectory_format
        self._limit = max_trajectories if auto_save else min(max_trajectories or window, window or max_trajectories or 0) or None
        place = self.auto_save_path or MemoryStorage("the buffer's memory")
        self.store: TrajectoryStore = open_store(place, mode="a", max_trajectories=self._limit)
        if len(self.store):
            logger.warning("%s holds %d trajectories already; they are part of the buffer", place, len(self.store))
        self._added = len(self.store)
        self._counting = threading.Lock()
        self._sampler = self.store.sampler(window=window, seed=seed, cache_size=cache_size if enable_cache else 0, cache_bytes=cache_bytes)

    # ---- contents

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<TrajectoryReplayBuffer of {self.store!r}>"

    @property
    def size(self) -> int:
        """Trajectories that can be read."""
        return len(self.store)

    @property
    def total_samples(self) -> int:
        """Transitions that can be read."""
        return self.store.num_samples

    @property
    def random_generator(self) -> Any:
        """The private `torch.Generator`."""
        return self._sampler.generator

    @property
    def _trajectory_index(self) -> "IndexDicts":
        return IndexDicts(self.store)

    @property
    def _trajectory_id_list(self) -> list[int]:
        return self.store.ids

    def is_ready(self, min_size: int) -> bool:
        """Whether at least `min_size` trajectories were ever added or loaded."""
        self.store.raise_failure()
        return self._added >= min_size

    async def is_ready_async(self, min_size: int) -> bool:
        """As `is_ready`."""
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, float]:
        """Counts: trajectories and samples that can be read, trajectories in the cache."""
        self.store.raise_failure()
        return {
            "num_trajectories": self.size,
            "total_samples": self.total_samples,
            "cache_size": self._sampler.num_cached,
        }

    # ---- adding and sampling

    def add_trajectories(self, trajectories: Sequence[object]) -> None:
        """Adds trajectories [T, B, ...], of this library's class or RLinf's. They are copied before it returns.

        Raises:
            InvalidRequestError: There are none.
            InvalidTrajectoryError, UnsupportedTypeError: One can't be stored; none is added then.
            StorageError: An earlier one could not be written.
            ClosedError: The buffer was closed.
        """
        trajectories = list(trajectories or [])
        if not trajectories:
            raise InvalidRequestError(
                "add_trajectories: expected trajectories, found none; leave the call out when there is nothing to add"
            )
        count = len(self.store.extend(trajectories))
        with self._counting:
            self._added += count

    def sample(self, num_chunks: int = 0, *, fields: Sequence[str] | str | None = None) -> dict[str, Any]:
        """Draws transitions uniformly from the window; see `Sampler.sample`.

        Args:
            num_chunks: How many, at least 1.
            fields: None: all, which must agree over the window. "common": those that agree. Else paths.

        Returns:
            Nested dict of tensors [num_chunks, ...].
        """
        return self.sample_chunks(num_chunks, fields=fields)

    def sample_chunks(self, num_chunks: int, *, fields: Sequence[str] | str | None = None) -> dict[str, Any]:
        """As `sample`."""
        self.store.raise_failure()
        return self._sampler.sample(num_chunks, fields=fields)

    def _load_trajectory(self, trajectory_id: int, model_weights_id: str | None = None) -> Trajectory:  # noqa: ARG002  as in RLinf
        return self.store.read(trajectory_id)

    # ---- checkpoints

    def save_checkpoint(self, save_path: "str | os.PathLike[str]") -> None:
        """Saves every trajectory that can be read, and the generator's state. The directory appears whole, or not at all.

        Args:
            save_path: Directory. An earlier checkpoint in it is replaced; other files in it stay.

        Raises:
            InvalidRequestError: It is the buffer's own store.
            StorageError: It can't be written, or an earlier trajectory could not be.
        """
        folder = local_path(save_path)
        if self.auto_save_path is not None:
            own, target = Path(self.auto_save_path).expanduser().resolve(), folder.resolve()
            if own == target or own in target.parents or target in own.parents:
                raise InvalidRequestError(f"{folder} is, holds or lies in the buffer's own store {own}; save the checkpoint elsewhere")
        self.store.flush()
        with replacing(folder, is_replaced=is_checkpoint_file) as new:
            generator = self._sampler.state_dict()["generator"]
            state = BufferState(self.trajectory_format, self.store.next_id, self.seed, generator)
            if state.trajectory_format == "zarr":
                infos = self._snapshot(new)
            else:
                infos = write_files(new, self._trajectories(), state.trajectory_format)
            document = state.to_json(size=len(infos), total_samples=sum(info.num_samples for info in infos))
            write_json(new / METADATA, document)

    def _trajectories(self) -> Iterator[tuple[TrajectoryInfo, Trajectory]]:
        for trajectory_id in self.store.ids:
            with contextlib.suppress(TrajectoryNotFoundError):  # deleted meanwhile, by a limit
                yield self.store.info(trajectory_id), self.store.read(trajectory_id)

    def _snapshot(self, folder: Path) -> list[TrajectoryInfo]:
        while True:
            ids = self.store.ids
            try:
                with open_store(folder, mode="w") as target:
                    with target.staging(replace_contents=True, next_id=self.store.next_id) as staging:
                        staging.link_all(self.store, {trajectory_id: trajectory_id for trajectory_id in ids})
                    return list(target.index.values())
            except (TrajectoryNotFoundError, FileNotFoundError):
                if self.store.ids == ids:
                    raise

    def load_checkpoint(
        self, load_path: "str | os.PathLike[str]", is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Replaces the contents by those of a checkpoint of any form, or of a store. If it fails the buffer is as it was.

        With `auto_save=True` the trajectories that the store at `auto_save_path` held are deleted from the disk.

        Args:
            load_path: Directory.
            is_distributed: Load only the contiguous share of a rank, as RLinf divides.
            local_rank: The rank, in [0, world_size).
            world_size: Number of ranks.

        Raises:
            StoreNotFoundError: There is no checkpoint, or one of its files is missing.
            CorruptionError: One of its files does not parse.
            UnsafeFileError: One of its files asks for code to be run.
            InvalidRequestError: The rank is out of range.
        """
        folder = local_path(load_path)
        if self.store.is_closed:
            raise ClosedError("the buffer is closed; make a new one to load into")
        if not folder.is_dir():
            raise StoreNotFoundError(f"no checkpoint at {folder}")
        is_store = (folder / "zarr.json").exists()
        if not is_store and not (folder / METADATA).exists() and (folder / "rank_0").is_dir():
            raise NotAStoreError(f"{folder} holds ranks; load one of them, such as {folder / 'rank_0'}")
        if self.auto_save and self.size:
            logger.warning("loading %s replaces the %d trajectories in %s", folder, self.size, self.auto_save_path)
        is_bare = is_store and not (folder / METADATA).exists()
        state = BufferState(self.trajectory_format) if is_bare else read_state(folder, default=self.trajectory_format)
        share = (local_rank, world_size) if is_distributed else (0, 1)
        self.store.flush()  # so that a failure can go back to it, and a buffer can load its own store
        loaded = self._load_store(folder, state, share) if is_store else self._load_files(folder, state, share)
        self._added = loaded
        self.trajectory_format = state.trajectory_format
        if state.seed is not None:
            self.seed = state.seed
            self._sampler.seed(state.seed)
        if state.generator is not None:
            self._sampler.load_state_dict({"generator": state.generator})

    def _load_store(self, folder: Path, state: BufferState, share: tuple[int, int]) -> int:
        with open_store(folder, mode="r") as source:
            ids = source.ids[rank_share(len(source), local_rank=share[0], world_size=share[1])]
            with self._replacing(ids, state, share) as staging:
                staging.link_all(source, {trajectory_id: trajectory_id for trajectory_id in self._kept(ids)})
        return len(ids)

    def _load_files(self, folder: Path, state: BufferState, share: tuple[int, int]) -> int:
        if state.trajectory_format == "zarr":
            raise StoreNotFoundError(f"{folder}: metadata.json names form 'zarr', but there is no zarr.json")
        entries = read_entries(folder, state.trajectory_format)
        entries = entries[rank_share(len(entries), local_rank=share[0], world_size=share[1])]
        with self._replacing([entry.trajectory_id for entry in entries], state, share) as staging:
            for entry in self._kept(entries):
                staging.add(entry.trajectory_id, entry.pack())
        return len(entries)

    def _kept(self, items: Sequence[T]) -> Sequence[T]:
        """Those that the buffer's limit leaves."""
        return items[-self._limit :] if self._limit else items

    def _replacing(self, ids: Sequence[int], state: BufferState, share: tuple[int, int]) -> AbstractContextManager[Staging]:
        """Replaces the contents; the next id is the checkpoint's, or for a rank's share the one after its own."""
        next_id = max(ids, default=-1) + 1
        if share[1] == 1 and state.trajectory_counter is not None:
            next_id = max(next_id, state.trajectory_counter)
        return self.store.staging(replace_contents=True, next_id=next_id)

    # ---- ending

    def flush(self) -> None:
        """Returns when all that was added is durable (with `auto_save=False`: compressed)."""
        self.store.flush()

    def clear(self) -> None:
        """Empties index, counters and store; ids start at 0 again. The generator goes on."""
        self.store.clear()
        self._added = 0

    def clear_cache(self) -> None:
        """Frees the cache and stops the threads; both come back when they are needed."""
        self.store.stop_writer()
        stop_threads()
        self._sampler.clear_cache()

    def close(self, wait: bool = True) -> None:  # noqa: ARG002  as in RLinf; what was added is always written
        """Flushes and stops the threads. Sampling goes on working; adding raises `ClosedError`."""
        self.store.close()
        stop_threads()

    def __enter__(self) -> "TrajectoryReplayBuffer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class IndexDicts(Mapping[int, dict[str, Any]]):
    """Trajectory id -> the dict that RLinf 0.3.0 keeps for it, and its `uuid`; follows the store."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._infos = store.index

    def __getitem__(self, trajectory_id: int) -> dict[str, Any]:
        return index_dict(self._infos[trajectory_id])

    def __iter__(self) -> Iterator[int]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


if __name__ == "__main__":
    from trajstore.cli import sample_checkpoint

    sample_checkpoint()
