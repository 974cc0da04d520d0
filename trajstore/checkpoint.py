"""Checkpoints of a replay buffer: pt and pkl directories that RLinf itself loads, and the state beside any form.

A directory holds one file a trajectory, `metadata.json` and `trajectory_index.json`. RLinf 0.3.0's own names are read as well as the
tutorial's, and so are its older key `storage_format` and the misspelt `trajector_index.json`. Files are never trusted: `pt` is read with
`weights_only=True`, `pkl` by an unpickler that admits tensors, arrays and plain values.
"""

import base64
import binascii
import contextlib
import ctypes
import errno
import functools
import io
import json
import os
import pickle
import re
import shutil
import types
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    NotAStoreError,
    StorageError,
    StoreNotFoundError,
    UnsafeFileError,
    UnsupportedTypeError,
)
from trajstore.index import TrajectoryInfo
from trajstore.packing import Packed, prepare
from trajstore.trajectory import Json, Trajectory, split_weights_id

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
        values = _read_pt(self.path) if self.path.suffix == ".pt" else _read_pkl(self.path)
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
        _Pickler(file).dump(values)
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


_BROKEN = (
    *(pickle.UnpicklingError, EOFError, OSError, MemoryError, ArithmeticError, LookupError),
    *(AssertionError, AttributeError, RuntimeError, TypeError, ValueError),
)
"""What readers raise over bytes that are not what was written."""
_ADMITTED = "only tensors, numpy arrays and plain Python values are loaded"


def _read_pt(path: Path) -> Any:
    return _reading(path, lambda: _load_tensors(path))


def _read_pkl(path: Path) -> Any:
    with path.open("rb") as file:
        return _reading(path, _Unpickler(file).load)


def _reading(path: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{path}: {error}") from error
    except _BROKEN as error:
        reason = str(error).splitlines()[0] if str(error) and not isinstance(error, pickle.UnpicklingError) else type(error).__name__
        raise CorruptionError(f"{path} is no complete {path.suffix[1:]} file: {reason}") from error


def _load_tensors(file: "Path | io.BytesIO") -> Any:
    try:
        with torch.serialization.safe_globals([bytes]):  # by which pickle writes b""
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"\bGLOBAL (\S+)", str(error))
        if asked is None:
            raise
        raise UnsafeFileError(f"it asks for {asked[1]}; {_ADMITTED}") from error


def _safe_storage(data: bytes) -> Any:
    """In place of `torch.storage._load_from_bytes`, which would run whatever it is given."""
    return _load_tensors(io.BytesIO(data))


def _rebuild(function: Callable[..., Any], storage: Any, *args: Any) -> Any:
    """Calls one of torch's functions that make a tensor of a storage; they let a storage that is too small grow, with random bytes."""
    untyped = getattr(storage, "_untyped_storage", storage)
    nbytes = untyped.nbytes()
    tensor = function(storage, *args)
    if untyped.nbytes() != nbytes:
        raise ValueError("a tensor is larger than its storage")
    return tensor


def _latin1(text: str, encoding: str) -> bytes:
    """In place of `_codecs.encode`, by which older pickles write bytes."""
    if encoding != "latin1":
        raise UnsafeFileError(f"it asks to encode text as {encoding!r}; only latin1 is used for bytes")
    return text.encode("latin1")


class _Pickler(pickle.Pickler):
    """pickle can't read back what it writes of torch's newer dtypes; with their storage passed off as bytes it can."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in torch.storage._new_dtypes():
            return NotImplemented
        storage = torch.storage.TypedStorage(wrap_storage=value.untyped_storage(), dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]
        place = (value.storage_offset(), tuple(value.shape), value.stride())
        return torch._utils._rebuild_tensor_v3, (storage, *place, False, OrderedDict(), value.dtype, {})


class _Unpickler(pickle.Unpickler):
    """Admits torch tensors, numpy arrays and plain values; refuses all else by name."""

    _PLAIN = frozenset({"complex", "bytearray", "set", "frozenset"})
    _NUMPY = frozenset({("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer")})
    _REBUILD = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"})

    def find_class(self, module: str, name: str) -> Any:
        found = self._find(module, name)
        # a pickle may set attributes of what it gets, so functions come wrapped
        return functools.partial(found) if isinstance(found, types.FunctionType) else found

    def _find(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _safe_storage
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if module == "torch._utils" and name in self._REBUILD:
            return functools.partial(_rebuild, super().find_class(module, name))
        is_plain = (module == "builtins" and name in self._PLAIN) or (module, name) == ("collections", "OrderedDict")
        package, _, last = module.rpartition(".")
        is_numpy = (module == "numpy" and name in ("ndarray", "dtype")) or (
            package in ("numpy.core", "numpy._core") and (last, name) in self._NUMPY
        )
        is_torch = (module, name) == ("torch._utils", "_rebuild_parameter") or (
            module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        )
        if is_plain or is_numpy or is_torch:
            return super().find_class(module, name)
        raise UnsafeFileError(f"it asks for {module}.{name}; {_ADMITTED}")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new directory to fill, which takes the place of `folder` at the end: whole, or not at all.

    An earlier checkpoint in `folder` goes; other files in it stay. Two exchanged names make the step atomic on Linux; elsewhere
    there is an instant in which neither name is there.

    Raises:
        NotAStoreError: `folder` is a file.
        StorageError: It can't be written.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise NotAStoreError(f"{folder} is a file; a checkpoint is a directory")
    new = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        new.mkdir(parents=True)
        yield new
        if folder.exists():
            _keep_other_files(folder, new)
            _sync_folder(new)
            here = _working_folder()
            _exchange(new, folder)
            if here is not None and folder in (here, *here.parents):
                os.chdir(here)  # the same path, in the new directory
        else:
            _sync_folder(new)
            new.rename(folder)
        _sync_folder(folder.parent)
    except OSError as error:
        if isinstance(error, StorageError | StoreNotFoundError):
            raise
        raise StorageError(error.errno or errno.EIO, f"can't write checkpoint {folder}: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _is_checkpoint_file(name: str, *, is_store: bool) -> bool:
    is_trajectory = re.fullmatch(r"trajectory_\d+_.*\.(pt|pkl)", name) is not None
    return is_trajectory or name in (METADATA, *_INDEX_NAMES) or (is_store and name in STORE_NAMES)


def _keep_other_files(folder: Path, new: Path) -> None:
    is_store = (folder / "zarr.json").exists()
    for path in folder.iterdir():
        if _is_checkpoint_file(path.name, is_store=is_store):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
            for below, _, _ in os.walk(new / path.name):
                _sync_folder(Path(below))
        else:
            _link(path, new / path.name)


def _link(source: "str | Path", target: "str | Path") -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(new: Path, old: Path) -> None:
    """Exchanges two directories, atomically where the system can."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        rename = None
    if rename is not None and rename(at_fdcwd, os.fsencode(new), at_fdcwd, os.fsencode(old), rename_exchange) == 0:
        return
    aside = new.with_name(new.name + ".old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _working_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
