"""Files that may be anything, read without trust.

`pt` is read with `weights_only=True`, `pkl` by an unpickler that admits tensors, arrays and plain values. Nothing in a file is
run; what asks for it is refused by name.
"""

import functools
import io
import pickle
import re
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trajstore.errors import CorruptionError, UnsafeFileError

_BROKEN = (
    *(pickle.UnpicklingError, EOFError, OSError, MemoryError, ArithmeticError, LookupError),
    *(AssertionError, AttributeError, RuntimeError, TypeError, ValueError),
)
"""What readers raise over bytes that are not what was written."""
_ADMITTED = "only tensors, numpy arrays and plain Python values are loaded"


def read_pt(path: Path) -> Any:
    """What a pt file holds.

    Raises:
        CorruptionError: It is not complete.
        UnsafeFileError: It asks for more than tensors and plain values.
    """
    return _reading(path, lambda: _load_tensors(path))


def read_pkl(path: Path) -> Any:
    """What a pkl file holds; raises as `read_pt`."""
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


class TensorPickler(pickle.Pickler):
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
