"""How the rows of one array become chunks: rows a chunk, codec, encode, decode. The rules are in FORMAT.md.

Measured on robosuite Lift frames (128 x 128 x 3, one core): lz4 decodes a frame of the moving camera in 20 to 27 us and a
pair in 39 us, and compresses pairs to a ratio of 1.70 at 420 MB/s (lz4hc: 1.86 at 140 to 180 MB/s, decoded as quickly; zstd-1:
2.15 at 240 MB/s, decoded in 75 us). Of the fixed camera, zstd-1 decodes 8 frames in 86 us at a ratio of 20: the first one takes
70 us of these, whatever follows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numcodecs import blosc, zstd

from trajstore.errors import CorruptionError
from trajstore.layout import Array, Rows
from trajstore.shard import with_crc

SMALL_ROW_BYTES = 4 * 1024
SMALL_ROWS_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 512 * 1024
ROW_GROWTH_LIMIT = 1.5
"""A chunk of more rows may be this much larger than the single row, compressed."""
LZ4_WINDOW_BYTES = 64 * 1024
"""How far back LZ4 finds repetitions: a frame below this size is compressed with the help of the one before it."""
PROBES = 3
"""Places of an array that the choices look at."""
PROBE_ROWS = 4
"""Rows that are looked at there."""


@dataclass(frozen=True, slots=True)
class Codec:
    """One of the codecs that a chunk may have between `bytes` and `crc32c`.

    Attributes:
        name: "none", "blosc" or "zstd".
        level: Effort of the compressor.
        compressor: blosc's inner compressor, else "".
        shuffle: Bytes a blosc shuffle interleaves; 0: none.
    """

    name: str
    level: int = 0
    compressor: str = ""
    shuffle: int = 0

    def zarr_metadata(self) -> list[dict[str, Any]]:
        """The codec as it stands in a Zarr v3 array's metadata: one entry, or none."""
        match self.name:
            case "blosc":
                configuration = {
                    "cname": self.compressor,
                    "clevel": self.level,
                    "shuffle": "shuffle" if self.shuffle else "noshuffle",
                    "typesize": max(self.shuffle, 1),
                    "blocksize": 0,
                }
            case "zstd":
                configuration = {"level": self.level, "checksum": False}
            case _:
                return []
        return [{"name": self.name, "configuration": configuration}]

    def compress(self, rows: Array) -> bytes:
        """Compresses contiguous rows."""
        match self.name:
            case "blosc":
                flat = rows.reshape(-1).view(f"V{self.shuffle}" if self.shuffle else np.uint8)
                return bytes(blosc.compress(flat, self.compressor.encode(), self.level, int(bool(self.shuffle)), 0))
            case "zstd":
                return bytes(zstd.compress(rows, self.level))
            case _:
                return rows.tobytes()

    def encode(self, rows: Array) -> bytes:
        """Contiguous rows -> the bytes of a chunk."""
        return with_crc(self.compress(rows))

    def decompress(self, content: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        """Inverse of `compress`, through numcodecs' public functions: uint8[n] -> uint8[m], which it must fill.

        Raises:
            CorruptionError: The compressor refuses the bytes.
        """
        if self.name == "none":
            target[:] = content
            return
        try:
            _DECOMPRESS[self.name](content, target)
        except (RuntimeError, ValueError) as error:
            raise CorruptionError(f"{self.name} can't decode the chunk: {error}") from error


def codec_from_json(value: dict[str, Any]) -> Codec:
    """The codec of a description (its attributes, by name); `CorruptionError` for what is no codec of this format."""
    try:
        codec = Codec(**value)
    except TypeError as error:
        raise CorruptionError(f"a codec does not parse: {error}") from error
    if codec.name not in ("none", *_DECOMPRESS):
        raise CorruptionError(f"codec {codec.name!r} is none of none, blosc, zstd")
    return codec


blosc.use_threads = False  # our own threads decode chunks side by side; zarr-python sets the same

_DECOMPRESS: dict[str, Callable[[Any, Any], Any]] = {"blosc": blosc.decompress, "zstd": zstd.decompress}
NONE = Codec("none")
ZSTD = Codec("zstd", level=1)


def lz4(*, shuffle: int = 0) -> Codec:
    """The fast codec: blosc's lz4, with a shuffle over items of `shuffle` bytes."""
    return Codec("blosc", level=9, compressor="lz4", shuffle=shuffle)


def choose_rows_per_chunk(rows: Rows, *, is_pool: bool = False) -> int:
    """Rows a chunk for an array, from its own data; `is_pool`: they are frames, which are mostly read with the next one."""
    if rows.row_bytes < SMALL_ROW_BYTES:
        return min(len(rows), SMALL_ROWS_CHUNK_BYTES // max(rows.row_bytes, 1))
    limit = min(len(rows), MAX_CHUNK_BYTES // rows.row_bytes)
    if limit < 2:
        return 1
    # a place may lie where one environment ends and another begins: the median of several is taken
    counts = [_rows_worth_one_chunk(rows, start) for start in _spread(len(rows) - 1)]
    least = 2 if is_pool and rows.row_bytes < LZ4_WINDOW_BYTES else 1
    return min(limit, max(least, int(sorted(counts)[len(counts) // 2])))


def _spread(count: int) -> list[int]:
    """Numbers below `count`, spread by the golden ratio, so that they do not fall on the period of the data."""
    return sorted({int((0.382 + number * 0.618) % 1 * count) for number in range(PROBES)})


def _rows_worth_one_chunk(rows: Rows, start: int) -> float:
    """How many rows from `start` on compress to `ROW_GROWTH_LIMIT` times the first one, as the next few let expect."""
    count = min(PROBE_ROWS, len(rows) - start)
    first, few = (len(ZSTD.compress(rows.chunk(start, number))) for number in (1, count))
    further = max(few - first, 1) / (count - 1)
    return 1 + (ROW_GROWTH_LIMIT - 1) * first / further


def choose_codec(rows: Rows, *, rows_per_chunk: int) -> Codec:
    """The codec for an array's chunks: the fast one, unless another saves enough bytes to be worth its time."""
    places = _spread(-(-len(rows) // rows_per_chunk))
    chunks = [rows.chunk(place * rows_per_chunk, rows_per_chunk) for place in places]

    def size(codec: Codec) -> int:
        return sum(len(codec.compress(chunk)) for chunk in chunks)

    best = lz4()
    smallest = size(best)
    itemsize = rows.dtype.itemsize
    if itemsize > 1 and (shuffled := size(lz4(shuffle=itemsize))) < 0.9 * smallest:
        best, smallest = lz4(shuffle=itemsize), shuffled
    if (small := size(ZSTD)) < 0.6 * smallest:
        best, smallest = ZSTD, small
    return best if smallest < 0.95 * sum(chunk.nbytes for chunk in chunks) else NONE
