"""Many chunks of one array at once: checked, then decompressed into their places, with the GIL released for most of it.

numcodecs' own functions hold the GIL for about 5 us a chunk, and a Python loop for some more; that takes away what a second
thread gives. So the C functions behind them are called by address, through `map`. Where they can't be found, the public
functions are used; a test compares the two.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd

from trajstore.codec import Codec
from trajstore.errors import CorruptionError
from trajstore.layout import Array, Ints
from trajstore.mapping import Bytes
from trajstore.shard import CRC_BYTES

_BLOSC_HEADER_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Native:
    """C functions of the libraries that numcodecs and google-crc32c are linked with; calling one releases the GIL.

    Attributes:
        crc32c: (address, bytes) -> checksum.
        blosc: (source, target, bytes of the target, threads) -> bytes written.
        zstd: (target, its bytes, source, its bytes) -> bytes written.
    """

    crc32c: Callable[[int, int], int]
    blosc: Callable[[int, int, int, int], int]
    zstd: Callable[[int, int, int, int], int]


def _find_native() -> _Native | None:
    """The functions, where the libraries' files export them all."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libraries = Path(google_crc32c.__file__).parent.with_name("google_crc32c.libs").glob("libcrc32c*")
    try:
        checksum = ctypes.CDLL(str(next(iter(libraries)))).crc32c_value
        checksum.argtypes, checksum.restype = [pointer, size], ctypes.c_uint32
        blosc_function = ctypes.CDLL(blosc.__file__).blosc_decompress_ctx
        blosc_function.argtypes = [pointer, pointer, size, ctypes.c_int]
        zstd_function = ctypes.CDLL(zstd.__file__).ZSTD_decompress
        zstd_function.argtypes, zstd_function.restype = [pointer, size, pointer, size], size
    except (OSError, AttributeError, StopIteration):
        return None
    return _Native(checksum, blosc_function, zstd_function)


NATIVE = _find_native()


def address_of(array: Array) -> int:
    """Where a contiguous array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, slots=True)
class Chunks:
    """Encoded chunks of one array.

    Attributes:
        codec: How they are compressed.
        chunk_bytes: Bytes of each, decoded.
        base: uint8[n], memory that they all lie in.
        starts: int64[c], where each begins in `base`.
        lengths: int64[c], compressed bytes of each; its checksum follows.
        checksums: uint32[c], the crc32c stored behind each.
    """

    codec: Codec
    chunk_bytes: int
    base: Bytes
    starts: Ints
    lengths: Ints
    checksums: np.ndarray[Any, np.dtype[np.uint32]]

    def decode(self, first: int, stop: int, *, target: Array, offsets: Ints) -> None:
        """Decodes chunks `[first, stop)`.

        Args:
            first: The first one.
            stop: The one after the last.
            target: Contiguous memory to decode into.
            offsets: int64[stop - first], byte of it where each begins.

        Raises:
            BadChunkError: The bytes of one are not those that were written.
        """
        if NATIVE is None or self.codec.name == "none":
            self._decode_one_by_one(first, stop, target=target, offsets=offsets)
            return
        # `map` calls the C functions without bytecode between them, so that threads seldom wait for each other's GIL
        lengths = self.lengths[first:stop].tolist()
        sources = (self.starts[first:stop] + address_of(self.base)).tolist()
        targets = (offsets + address_of(target)).tolist()
        sizes = [self.chunk_bytes] * len(lengths)
        found = list(map(NATIVE.crc32c, sources, lengths))
        if found != self.checksums[first:stop].tolist():
            bad = int(np.flatnonzero(np.array(found) != self.checksums[first:stop])[0])
            raise BadChunkError(first + bad, "checksum does not match")
        if self.codec.name == "blosc":
            written = list(map(NATIVE.blosc, sources, targets, sizes, [1] * len(sizes)))
        else:
            written = list(map(NATIVE.zstd, targets, sizes, sources, lengths))
        if written != sizes:
            bad = next(number for number, size in enumerate(written) if size != self.chunk_bytes)
            raise BadChunkError(first + bad, f"{self.codec.name} can't decode the chunk")

    def _decode_one_by_one(self, first: int, stop: int, *, target: Array, offsets: Ints) -> None:
        flat = target.reshape(-1).view(np.uint8)
        for number, offset in zip(range(first, stop), offsets.tolist(), strict=True):
            start = int(self.starts[number])
            content = self.base[start : start + int(self.lengths[number])]
            if google_crc32c.value(content) != self.checksums[number]:
                raise BadChunkError(number, "checksum does not match")
            try:
                self.codec.decompress(content, flat[offset : offset + self.chunk_bytes])
            except CorruptionError as error:
                raise BadChunkError(number, str(error)) from error


class BadChunkError(CorruptionError):
    """A chunk's bytes are not those that were written; `number` tells which."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def find_chunks(codec: Codec, chunk_bytes: int, base: Bytes, table: Ints) -> Chunks:
    """Locates chunks by their offsets and lengths, int64[c, 2], and looks at what can be checked for all at once.

    Raises:
        CorruptionError: One lies outside `base`, or is too short, or blosc's header in it does not fit.
    """
    starts, lengths = table[:, 0], table[:, 1] - CRC_BYTES
    stops = starts + lengths
    if len(table) and ((lengths < 0).any() or stops.max() + CRC_BYTES > len(base)):
        raise CorruptionError(f"a chunk lies outside the {len(base)} bytes that there are")
    if codec.name == "blosc":
        if (lengths < _BLOSC_HEADER_BYTES).any():
            raise CorruptionError("a chunk is shorter than blosc's header")
        # versions and flags, then three uint32: bytes plain, of a block, compressed
        header = _words(base, starts + 4, count=3)
        if (header[:, 0] != chunk_bytes).any() or (header[:, 2] != lengths).any():
            raise CorruptionError(f"blosc's header does not fit a chunk of {chunk_bytes} bytes")
    elif codec.name == "none" and (lengths != chunk_bytes).any():
        raise CorruptionError(f"a chunk has not the {chunk_bytes} bytes of its rows")
    return Chunks(codec, chunk_bytes, base, starts, lengths, _words(base, stops, count=1)[:, 0])


def _words(base: Bytes, offsets: Ints, *, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """uint32[n, count], little-endian, at byte offsets."""
    words: np.ndarray[Any, np.dtype[np.uint32]] = base[offsets[:, None] + np.arange(4 * count)].view("<u4")
    return words
