"""Many chunks of one array at once: checked, then decompressed into their places, with the GIL released for most of it.

numcodecs' own functions hold the GIL for about 5 us a chunk, which takes away most of what a second thread gives (256 Lift
transitions: 25.7 ms on two threads, 18.5 when the same library's C function is called by address). Where the C function
can't be found, numcodecs' own is used; a test compares the two.
"""

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd

from trajstore.codec import Codec
from trajstore.errors import CorruptionError
from trajstore.layout import Array, Ints
from trajstore.storage import Bytes

_CRC_BYTES = 4
_BLOSC_HEADER_BYTES = 16
Native = Callable[[int, int, int, int], int]
"""(source address, its bytes, target address, its bytes) -> bytes written."""


def _native_functions() -> dict[str, Native]:
    """The C functions that numcodecs is linked with, where its files export them."""
    found: dict[str, Native] = {}
    with contextlib.suppress(OSError, AttributeError):
        blosc_function = ctypes.CDLL(blosc.__file__).blosc_decompress_ctx
        blosc_function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        found["blosc"] = lambda source, _, target, size: blosc_function(source, target, size, 1)
        zstd_function = ctypes.CDLL(zstd.__file__).ZSTD_decompress
        zstd_function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
        zstd_function.restype = ctypes.c_size_t
        found["zstd"] = lambda source, count, target, size: zstd_function(target, size, source, count)
    return found


NATIVE = _native_functions()


@dataclass(frozen=True, slots=True)
class Target:
    """Memory to decode into.

    Attributes:
        flat: uint8[n], contiguous.
        address: Where it begins.
    """

    flat: Bytes
    address: int

    @classmethod
    def of(cls, array: Array) -> "Target":
        """The memory of a contiguous array."""
        return cls(array.reshape(-1).view(np.uint8), _address(array))


@dataclass(frozen=True, slots=True)
class Chunks:
    """Encoded chunks of one array.

    Attributes:
        codec: How they are compressed.
        chunk_bytes: Bytes of each, decoded.
        base: uint8[n], memory that they all lie in.
        address: Where `base` begins.
        starts: Where each begins in `base`.
        stops: Where the compressed bytes of each end; the checksum follows.
        checksums: The crc32c stored behind each.
    """

    codec: Codec
    chunk_bytes: int
    base: Bytes
    address: int
    starts: list[int]
    stops: list[int]
    checksums: list[int]

    def decode(self, number: int, target: Target, offset: int) -> None:
        """Decodes one chunk into the `chunk_bytes` of `target` from `offset` on.

        Raises:
            CorruptionError: Its bytes are not those that were written.
        """
        start, stop = self.starts[number], self.stops[number]
        if google_crc32c.value(self.base[start:stop]) != self.checksums[number]:
            raise CorruptionError("checksum does not match")
        native = NATIVE.get(self.codec.name)
        if native is None:
            self.codec.decompress(self.base[start:stop], target.flat[offset : offset + self.chunk_bytes])
        elif native(self.address + start, stop - start, target.address + offset, self.chunk_bytes) != self.chunk_bytes:
            raise CorruptionError(f"{self.codec.name} can't decode the chunk")


def find_chunks(codec: Codec, chunk_bytes: int, base: Bytes, table: Ints) -> Chunks:
    """Locates chunks by their offsets and lengths, int64[c, 2], and looks at what can be checked for all at once.

    Raises:
        CorruptionError: One lies outside `base`, or is too short, or blosc's header in it does not fit.
    """
    starts, stops = table[:, 0], table[:, 0] + table[:, 1] - _CRC_BYTES
    if len(table) and ((starts > stops).any() or stops.max() + _CRC_BYTES > len(base)):
        raise CorruptionError(f"a chunk lies outside the {len(base)} bytes that there are")
    if codec.name == "blosc":
        if (stops - starts < _BLOSC_HEADER_BYTES).any():
            raise CorruptionError("a chunk is shorter than blosc's header")
        # versions and flags, then three uint32: bytes plain, of a block, compressed
        header = _words(base, starts + 4, count=3)
        if (header[:, 0] != chunk_bytes).any() or (header[:, 2] != stops - starts).any():
            raise CorruptionError(f"blosc's header does not fit a chunk of {chunk_bytes} bytes")
    elif codec.name == "none" and (stops - starts != chunk_bytes).any():
        raise CorruptionError(f"a chunk has not the {chunk_bytes} bytes of its rows")
    checksums = _words(base, stops, count=1)[:, 0]
    return Chunks(codec, chunk_bytes, base, _address(base), starts.tolist(), stops.tolist(), checksums.tolist())


def _words(base: Bytes, offsets: Ints, *, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """uint32[n, count], little-endian, at byte offsets."""
    words: np.ndarray[Any, np.dtype[np.uint32]] = base[offsets[:, None] + np.arange(4 * count)].view("<u4")
    return words


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
