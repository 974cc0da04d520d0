"""The trajectory: its class, its nested fields as flat paths, and torch dtypes as stored dtypes.

Everything here is a function of its arguments; nothing is read or written. Fields and defaults of `Trajectory` are those of
RLinf 0.3.0's dataclass, with `model_update_count` and `extras` added.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from trajstore.errors import CorruptionError, InvalidTrajectoryError, UnsupportedTypeError

Json: TypeAlias = Any
"""What `json.dumps` takes: None, bool, int, float, str, and lists and string-keyed dicts of these."""


@dataclass(kw_only=True)
class Trajectory:
    """`T` steps of `B` environments that ran side by side. Tensors are [T, B, ...] unless said otherwise.

    Attributes:
        max_episode_length: Steps after which the environment truncates.
        model_weights_id: Name of the policy weights that acted, often `{uuid}_{update count}`.
        model_update_count: Updates the policy had seen; None: taken from the end of `model_weights_id`, else the
            largest of `versions`, else 0.
        actions: float[T, B, action] or float[T, B, chunk, action].
        intervene_flags: bool[T, B, ...], True where a person took over.
        rewards: float[T, B, ...].
        terminations: bool[T or T + epochs, B, ...], True where the episode ended in a terminal state.
        truncations: bool[T or T + epochs, B, ...], True where it was cut off.
        dones: bool[T or T + epochs, B, ...], either of the two.
        prev_logprobs: float[T, B, ...], log-probabilities at the time of acting.
        prev_values: float[T or T + 1, B, ...], value estimates at the time of acting.
        versions: [T, B, ...], the policy version of each step.
        forward_inputs: What the policy needs to be run again, nested dicts of [T, B, ...].
        curr_obs: Observation before each step, nested dicts of [T, B, ...].
        next_obs: Observation after each step.
        extras: Whatever else a source holds, nested dicts.
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    model_update_count: int | None = None
    actions: torch.Tensor | None = None
    intervene_flags: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


HEADER_FIELDS = ("max_episode_length", "model_weights_id", "model_update_count")
DICT_FIELDS = ("curr_obs", "next_obs", "forward_inputs", "extras")
TENSOR_FIELDS = tuple(f.name for f in fields(Trajectory) if f.name not in (*HEADER_FIELDS, *DICT_FIELDS))
FLAG_FIELDS = frozenset({"dones", "terminations", "truncations"})
"""Fields whose extra rows come first in each epoch (RLinf 0.3.0); those of other fields come last."""

MAX_COUNT_DIGITS = 18
"""Of an update count in a weights id: what surely fits int64."""

MAX_PATH_BYTES = 400
MAX_DEPTH = 50
"""Of values kept aside."""
MAX_KEY_BYTES = 80
"""Percent-encoded at worst to 240, which every file system takes as a name."""

_UINTS: dict[int, np.dtype[Any]] = {1: np.dtype("uint8"), 2: np.dtype("uint16"), 4: np.dtype("uint32")}
_NATIVE_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_UINT_DTYPES = (
    *("bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
)
STORED_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NATIVE_DTYPES},
    **{name: _UINTS[getattr(torch, name).itemsize] for name in _UINT_DTYPES if hasattr(torch, name)},
}
"""torch dtype name -> the numpy dtype it is stored as: itself, else the unsigned integer of its size."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def to_stored(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same memory as a numpy array of the stored dtype; `tensor` is a plain CPU tensor."""
    name = dtype_name(tensor.dtype)
    if name in _UINT_DTYPES:
        tensor = tensor.view(getattr(torch, STORED_DTYPES[name].name))
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def from_stored(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """The same memory as a tensor of dtype `name`; inverse of `to_stored`."""
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, name)) if name in _UINT_DTYPES else tensor


def split_weights_id(model_weights_id: str) -> tuple[str, int | None]:
    """`"f643_12"` -> `("f643", 12)`; without a count at the end, `("f643", None)`."""
    uuid, separator, count = model_weights_id.rpartition("_")
    if separator and count.isascii() and count.isdigit() and len(count) <= MAX_COUNT_DIGITS:
        return uuid, int(count)
    return model_weights_id, None


def update_count(trajectory: Trajectory) -> int:
    """Policy updates before this trajectory: as given, else from the weights id, else the largest version, else 0."""
    if trajectory.model_update_count is not None:
        return int(trajectory.model_update_count)
    count = split_weights_id(trajectory.model_weights_id)[1]
    if count is not None:
        return count
    versions = trajectory.versions
    if not isinstance(versions, torch.Tensor | np.ndarray) or 0 in versions.shape:
        return 0
    tensor = torch.as_tensor(versions)
    if tensor.is_complex():
        return 0
    is_small = not tensor.is_floating_point() and tensor.dtype != torch.uint64
    largest = tensor.to(torch.int64 if is_small else torch.float64).max().item()
    return int(largest) if abs(largest) < 1 << 63 else 0


def from_object(source: object) -> Trajectory:
    """Takes any object with a trajectory's attributes, such as RLinf's own `Trajectory`, sharing its values.

    Dataclass fields that `Trajectory` does not know go below `extras`.
    """
    if isinstance(source, Trajectory):
        return source
    known = [f.name for f in fields(Trajectory)]
    values = {name: getattr(source, name) for name in known if getattr(source, name, None) is not None}
    if not values:
        raise UnsupportedTypeError(
            f"expected a Trajectory or an object with its attributes, found {type(source).__name__} with none of them"
        )
    others = [f.name for f in fields(source) if f.name not in known] if is_dataclass(source) else []
    unknown = {name: getattr(source, name) for name in others if getattr(source, name) is not None}
    if unknown:
        values["extras"] = {**values.get("extras", {}), **unknown}
    return Trajectory(**values)


def flatten(trajectory: Trajectory) -> tuple[dict[str, torch.Tensor], dict[str, Json]]:
    """Splits a trajectory into row tensors and what is kept aside.

    Returns:
        Tensors of two axes and more by field path, on the CPU, detached, in the order of a batch's keys (RLinf 0.3.0's); and
        all other values by path, as JSON.

    Raises:
        InvalidTrajectoryError: A key is not a usable name, or a tensor field has fewer than two axes.
        UnsupportedTypeError: A value can't be stored; the message names field and type.
    """
    tensors: dict[str, torch.Tensor] = {}
    aside: dict[str, Json] = {}
    for path, value in _leaves(trajectory):
        tensor = _as_tensor(path, value)
        if tensor is None:
            aside[path] = _to_json(path, value)
        elif tensor.dim() >= 2:
            tensors[path] = tensor
        elif path in TENSOR_FIELDS:
            raise InvalidTrajectoryError(f"field {path!r}: shape {list(tensor.shape)} lacks the axes [T, B, ...]; add them with unsqueeze")
        else:
            aside[path] = _to_json(path, tensor)
    return tensors, aside


def unflatten(tensors: Mapping[str, torch.Tensor], aside: Mapping[str, Json]) -> Trajectory:
    """Inverse of `flatten`, without the header fields."""
    values = nest({**tensors, **{path: from_json(value) for path, value in aside.items()}})
    return Trajectory(**values)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"curr_obs/states": x}` -> `{"curr_obs": {"states": x}}`."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        level = nested
        for key in parents:
            level = level.setdefault(key, {})
        level[name] = value
    return nested


def _leaves(trajectory: Trajectory) -> Iterator[tuple[str, Any]]:
    for name in TENSOR_FIELDS:
        value = getattr(trajectory, name)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise UnsupportedTypeError(f"field {name!r}: expected a tensor, found {type(value).__name__}; use extras for other values")
        yield name, value
    for name in DICT_FIELDS:
        value = getattr(trajectory, name)
        if value is not None and not isinstance(value, Mapping):
            raise UnsupportedTypeError(f"field {name!r}: expected a dict, found {type(value).__name__}")
        yield from _leaves_below(name, value or {})


def _leaves_below(path: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        _check_key(path, key)
        below = f"{path}/{key}"
        if len(below.encode()) > MAX_PATH_BYTES:
            raise InvalidTrajectoryError(f"field {path[:60]!r}...: keys are nested too deeply; a path holds at most {MAX_PATH_BYTES} bytes")
        if isinstance(value, Mapping) and value:
            yield from _leaves_below(below, value)
        else:
            yield below, value


def _check_key(path: str, key: object) -> None:
    if not isinstance(key, str):
        raise UnsupportedTypeError(f"field {path!r}: keys must be strings, found {key!r} ({type(key).__name__})")
    usable = "/" not in key and "\0" not in key and key.strip(".")
    if not usable or len(key.encode(errors="replace")) > MAX_KEY_BYTES or key.encode(errors="replace").decode() != key:
        raise InvalidTrajectoryError(
            f"field {path!r}: {key!r} can't be a key; keys are 1 to {MAX_KEY_BYTES} bytes of UTF-8 without '/' and NUL, and not only dots"
        )


def _as_tensor(path: str, value: Any) -> torch.Tensor | None:
    """The value as a plain CPU tensor that shares memory where it can; None when it is no tensor."""
    if isinstance(value, np.ndarray):
        return _from_numpy(path, value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise UnsupportedTypeError(f"field {path!r}: only dense tensors with data can be stored, found {value.layout} on {value.device}")
    if dtype_name(value.dtype) not in STORED_DTYPES:
        raise UnsupportedTypeError(f"field {path!r}: dtype {value.dtype} can't be stored; convert it first")
    tensor: torch.Tensor = value.detach().cpu().resolve_conj().resolve_neg()
    return tensor


def _from_numpy(path: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype.name not in _NATIVE_DTYPES:
        raise UnsupportedTypeError(f"field {path!r}: numpy dtype {array.dtype} can't be stored; convert it, or use a list of strings")
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
    return torch.from_numpy(native if native.flags.writeable else native.copy())


def _to_json(path: str, value: Any, depth: int = 0) -> Json:
    """A value kept aside, as JSON; see FORMAT.md."""
    if depth > MAX_DEPTH:
        raise InvalidTrajectoryError(f"field {path!r}: its values are nested more than {MAX_DEPTH} deep")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str) or type(value) is int or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [_to_json(path, item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {"$dict": [[_to_json(path, key, depth + 1), _to_json(path, item, depth + 1)] for key, item in value.items()]}
    if type(value) in _TO_TAG:
        tag, convert = _TO_TAG[type(value)]
        return {tag: _to_json(path, convert(value), depth + 1)}
    tensor = _as_tensor(path, value)
    if tensor is None:
        raise UnsupportedTypeError(
            f"field {path!r}: a {type(value).__name__} can't be stored; use tensors, arrays, numbers, strings, lists or dicts"
        )
    data = to_stored(tensor.contiguous()).tobytes()
    return {"$tensor": {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data": base64.b64encode(data).decode()}}


def from_json(value: Json) -> Any:
    """Inverse of how values are kept aside."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag not in _FROM_TAG:
        raise CorruptionError(f"unknown tag {tag!r} among the values kept aside; the store may be newer than this library")
    return _FROM_TAG[tag](content)


def _tensor_from_json(content: Mapping[str, Any]) -> torch.Tensor:
    data = np.frombuffer(bytearray(base64.b64decode(content["data"])), STORED_DTYPES[content["dtype"]])
    return from_stored(data.reshape(content["shape"]), content["dtype"])


_TO_TAG: dict[type, tuple[str, Callable[[Any], Any]]] = {
    float: ("$float", repr),  # those that are not finite
    complex: ("$complex", lambda value: [value.real, value.imag]),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    tuple: ("$tuple", list),
}
_FROM_TAG: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$complex": lambda content: complex(*from_json(content)),
    "$bytes": base64.b64decode,
    "$tuple": lambda content: tuple(from_json(content)),
    "$dict": lambda content: {from_json(key): from_json(item) for key, item in content},
    "$tensor": _tensor_from_json,
}
