"""Checkpoints of a replay buffer: pt and pkl directories that RLinf itself loads, and the state beside any form.

A directory holds one file a trajectory, `metadata.json` and `trajectory_index.json`. RLinf 0.3.0's own names are read as well as the
tutorial's, and so are its older key `storage_format` and the misspelt `trajector_index.json`.
"""

import base64
import binascii
import contextlib
import errno
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

import numpy as np
import torch

from trajstore.errors import (
    CorruptionError,
    InvalidRequestError,
    InvalidTrajectoryError,
    StorageError,
    StoreNotFoundError,
    UnsupportedTypeError,
)
from trajstore.index import TrajectoryInfo
from trajstore.packing import Packed, prepare
from trajstore.trajectory import Json, Trajectory, split_weights_id
from trajstore.untrusted import TensorPickler, read_pkl, read_pt

FileFormat = Literal["pt", "pkl"]
CheckpointFormat = Literal["pt", "pkl", "zarr"]
METADATA = "metadata.json"
_INDEX_NAMES = ("trajectory_index.json", "trajector_index.json")
MAX_ID = 1 << 62
STORE_NAMES = ("zarr.json", "index", "segments", "writer.json", ".lock")
_FORMAT_KEYS = ("trajectory_format", "storage_format")


@dataclass(frozen=True, slots=True)
class BufferState:
    """What `metadata.json` says.

    Attributes:
        trajectory_format: Form of the checkpoint.
        trajectory_counter: The id that the next trajectory gets; None: not said.
        seed: The buffer's seed; None: not said.
        generator: State of the sampler's generator, uint8[n]; None: not said (RLinf does not save it).
    """

    trajectory_format: CheckpointFormat
    trajectory_counter: int | None = None
    seed: int | None = None
    generator: torch.Tensor | None = None

    def to_json(self, *, size: int, total_samples: int) -> dict[str, Json]:
        """The document, with the counts that RLinf expects in it."""
        document: dict[str, Json] = {
            "trajectory_format": self.trajectory_format,
            "size": size,
            "total_samples": total_samples,
            "trajectory_counter": self.trajectory_counter,
            "seed": self.seed,
        }
        if self.generator is not None:
            document["generator_state"] = base64.b64encode(self.generator.numpy().tobytes()).decode()
        return document


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A trajectory of a pt or pkl directory: its id, its file, and what the index says of it."""

    trajectory_id: int
    path: Path
    info: Mapping[str, Json]

    def load(self) -> Trajectory:
        """Reads the file.

        Raises:
            CorruptionError: It is truncated, or holds something else than a trajectory.
            UnsafeFileError: It asks for code to be run.
        """
        values = read_pt(self.path) if self.path.suffix == ".pt" else read_pkl(self.path)
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise CorruptionError(f"{self.path}: expected a dict of a trajectory's fields, found {type(values).__name__}")
        known = {field.name for field in fields(Trajectory)}
        extras = {name: value for name, value in values.items() if name not in known and value is not None}
        trajectory = Trajectory(**{name: value for name, value in values.items() if name in known and value is not None})
        if extras and isinstance(trajectory.extras, Mapping):
            trajectory.extras = {**trajectory.extras, **extras}
        if "max_episode_length" not in values:
            trajectory.max_episode_length = self.info.get("max_episode_length", 0)
        if "model_weights_id" not in values:
            trajectory.model_weights_id = str(self.info.get("model_weights_id", ""))
        return trajectory

    def pack(self) -> Packed:
        """Reads the file and packs what is in it, under the uuid that the index gives.

        Raises:
            CorruptionError, UnsafeFileError: As `load`.
            InvalidTrajectoryError, UnsupportedTypeError: It holds what can't be stored.
        """
        try:
            packed = prepare(self.load()).pack()
        except (InvalidTrajectoryError, UnsupportedTypeError) as error:
            raise type(error)(f"{self.path}: {error}") from error
        own = self.info.get("uuid")
        if isinstance(own, str) and re.fullmatch("[0-9a-f]{32}", own):
            packed = replace(packed, header=replace(packed.header, uuid=own))
        return packed


def file_name(info: TrajectoryInfo, file_format: FileFormat) -> str:
    """`trajectory_{trajectory_id}_{model_weights_uuid}_{model_update_count}.{file_format}`."""
    return f"trajectory_{info.trajectory_id}_{_file_weights_id(info)}.{file_format}"


def _file_weights_id(info: TrajectoryInfo) -> str:
    weights_uuid = split_weights_id(info.model_weights_id)[0]
    return f"{_file_uuid(weights_uuid)}_{info.model_update_count}"


def _file_uuid(weights_uuid: str) -> str:
    """As a part of a file name; lone surrogates, which no file name holds, become `?`, encoded."""
    return quote(weights_uuid, safe="", errors="replace")


def read_state(folder: Path, *, default: CheckpointFormat = "pt") -> BufferState:
    """Reads `metadata.json`; `default` is the form where it names none.

    Raises:
        StoreNotFoundError: It is not there.
        CorruptionError: It does not parse.
    """
    document = _read_json(folder / METADATA)
    try:
        name: Any = next((document[key] for key in _FORMAT_KEYS if key in document), "pt" if default == "zarr" else default)
        if name not in get_args(CheckpointFormat):
            raise ValueError(f"trajectory_format {name!r} is none of pt, pkl, zarr")
        counter, seed, state = (document.get(key) for key in ("trajectory_counter", "seed", "generator_state"))
        generator = None
        if state is not None:
            generator = torch.from_numpy(np.frombuffer(base64.b64decode(state, validate=True), np.uint8).copy())
            torch.Generator().set_state(generator)  # refuses what is no state
        form: CheckpointFormat = name
        counter, seed = (None if number is None else int(number) for number in (counter, seed))
        if counter is not None and counter > MAX_ID:
            raise ValueError(f"trajectory_counter {counter} is larger than {MAX_ID}")
        if seed is not None:
            torch.Generator().manual_seed(seed)  # refuses what is no seed
        return BufferState(form, counter, seed, generator)
    except (TypeError, ValueError, OverflowError, AttributeError, RuntimeError, binascii.Error) as error:
        raise CorruptionError(f"{folder / METADATA} does not parse: {error}") from error


def read_entries(folder: Path, file_format: FileFormat) -> list[FileEntry]:
    """The trajectories of a pt or pkl directory, oldest first.

    Raises:
        StoreNotFoundError: The index, or a file that it lists, is not there.
        CorruptionError: The index does not parse.
    """
    path = next((folder / name for name in _INDEX_NAMES if (folder / name).exists()), folder / _INDEX_NAMES[0])
    document = _read_json(path)
    try:
        index = {int(key): value for key, value in document["trajectory_index"].items()}
        ids = [int(trajectory_id) for trajectory_id in document.get("trajectory_id_list", index)]
        listed = [(trajectory_id, index[trajectory_id], str(index[trajectory_id]["model_weights_id"])) for trajectory_id in ids]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CorruptionError(f"{path} does not parse: {error!r}") from error
    if ids and not 0 <= min(ids) <= max(ids) < MAX_ID:
        raise CorruptionError(f"{path}: trajectory ids must be in [0, {MAX_ID})")
    if len(set(ids)) != len(ids):
        raise CorruptionError(f"{path}: a trajectory id stands twice in trajectory_id_list")
    return [
        FileEntry(trajectory_id, _find_file(folder, trajectory_id, weights_id, file_format), info)
        for trajectory_id, info, weights_id in listed
    ]


def _find_file(folder: Path, trajectory_id: int, weights_id: str, file_format: FileFormat) -> Path:
    """The file of a trajectory, under RLinf 0.3.0's own name or the tutorial's."""
    weights_uuid, count = split_weights_id(weights_id)
    for stem in (weights_id, f"{_file_uuid(weights_uuid)}_{count or 0}"):
        path = folder / f"trajectory_{trajectory_id}_{stem}.{file_format}"
        with contextlib.suppress(OSError):  # such as a name that is too long
            if path.parent == folder and path.is_file():
                return path
    raise StoreNotFoundError(f"{folder}: the index lists trajectory {trajectory_id}, but there is no file {path.name!r}")


def index_dict(info: TrajectoryInfo) -> dict[str, Any]:
    """What RLinf 0.3.0 keeps in its index for a trajectory, and its `uuid`."""
    return {
        "num_samples": info.num_samples,
        "trajectory_id": info.trajectory_id,
        "max_episode_length": info.max_episode_length,
        "shape": info.shape,
        "model_weights_id": info.model_weights_id,
        "uuid": info.uuid,
    }


def write_files(folder: Path, trajectories: Iterable[tuple[TrajectoryInfo, Trajectory]], file_format: FileFormat) -> list[TrajectoryInfo]:
    """Writes a file a trajectory, and the index. Returns what was written."""
    index, infos = {}, []
    for info, trajectory in trajectories:
        infos.append(info)
        # RLinf makes the name of the file from the weights id
        index[info.trajectory_id] = {**index_dict(info), "model_weights_id": _file_weights_id(info)}
        with (folder / file_name(info, file_format)).open("wb") as file:
            _write_trajectory(trajectory, file, file_format)
            os.fsync(file.fileno())
    write_json(folder / _INDEX_NAMES[0], {"trajectory_index": index, "trajectory_id_list": list(index)})
    return infos


def _write_trajectory(trajectory: Trajectory, file: io.BufferedWriter, file_format: FileFormat) -> None:
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    values = {name: value for name, value in values.items() if value is not None and (name != "extras" or value)}
    if file_format == "pt":
        try:
            torch.save(values, file)
        except RuntimeError as error:  # what torch makes of a refused write
            raise OSError(errno.EIO, f"{file.name} can't be written: {error.__context__ or error}") from error
    else:
        TensorPickler(file).dump(values)
    file.flush()


def write_json(path: Path, document: Json) -> None:
    """Writes and syncs a JSON file."""
    with path.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreNotFoundError(f"no {path.name} in {path.parent}; a checkpoint has metadata.json and trajectory_index.json") from None
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path} is no JSON: {error}") from error


def is_checkpoint_file(path: Path) -> bool:
    """Whether something in a directory belongs to the checkpoint there, of any form."""
    is_trajectory = re.fullmatch(r"trajectory_\d+_.*\.(pt|pkl)", path.name) is not None
    is_store = path.name in STORE_NAMES and (path.parent / "zarr.json").exists()
    return is_trajectory or is_store or path.name in (METADATA, *_INDEX_NAMES)


def rank_share(count: int, *, local_rank: int, world_size: int) -> slice:
    """The contiguous share of `count` trajectories that a rank gets, the first ranks one more (RLinf 0.3.0).

    Raises:
        InvalidRequestError: The rank is not in [0, world_size).
    """
    if world_size < 1 or not 0 <= local_rank < world_size:
        raise InvalidRequestError(f"local_rank={local_rank} with world_size={world_size}: expected 0 <= local_rank < world_size")
    share, remainder = divmod(count, world_size)
    start = local_rank * share + min(local_rank, remainder)
    return slice(start, start + share + (local_rank < remainder))
