"""One array of a segment: what is known of it, its rows as the chunks of a shard, and back."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np

from trajstore.codec import NONE, Codec, choose_codec, choose_rows_per_chunk, codec_from_json
from trajstore.decode import find_chunks
from trajstore.errors import CorruptionError
from trajstore.layout import Array, Rows
from trajstore.shard import build_index, crc32c, crc32c_of_all, index_bytes, parse_index
from trajstore.storage import Storage
from trajstore.threads import parallel_map
from trajstore.trajectory import Json

_ENCODE_BYTES = 2 * 1024 * 1024
"""Rows that one task of the encoder takes."""

Parts: TypeAlias = Sequence[bytes]
"""An object's bytes: these, one after another."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a segment: a single shard.

    Attributes:
        name: Path below the segment.
        rows: Length of the first axis.
        dtype: Stored dtype, numpy's name.
        row_shape: The other axes.
        rows_per_chunk: Rows of an inner chunk.
        codec: How inner chunks are compressed.
        bytes, crc32c: Size and checksum of the shard file; 0 for rows without bytes, which have no file.
    """

    name: str
    rows: int
    dtype: str
    row_shape: tuple[int, ...]
    rows_per_chunk: int
    codec: Codec
    bytes: int
    crc32c: int

    @property
    def num_chunks(self) -> int:
        return -(-self.rows // self.rows_per_chunk) if self.bytes else 0

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        return self.rows_per_chunk * self.row_bytes

    @property
    def shard_key(self) -> str:
        """Key of the shard below the array."""
        return "c" + ".0" * (1 + len(self.row_shape))

    def metadata(self, attributes: Mapping[str, Json]) -> dict[str, Json]:
        """Its Zarr v3 metadata document."""
        dtype = np.dtype(self.dtype)
        row_shape = [max(size, 1) for size in self.row_shape]
        to_bytes = [{"name": "bytes", "configuration": {"endian": "little"}}]
        crc = [{"name": "crc32c"}]
        sharding = {
            "chunk_shape": [self.rows_per_chunk, *row_shape],
            "codecs": [*to_bytes, *self.codec.zarr_metadata(), *crc],
            "index_codecs": [*to_bytes, *crc],
            "index_location": "end",
        }
        padded_rows = -(-self.rows // self.rows_per_chunk) * self.rows_per_chunk
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self.rows, *self.row_shape],
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [padded_rows, *row_shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": [0.0, 0.0] if dtype.kind == "c" else dtype.type(0).item(),
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": attributes,
        }

    def to_json(self) -> dict[str, Json]:
        """Its description, without the name."""
        return {key: value for key, value in asdict(self).items() if key != "name"}

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Json]) -> "StoredArray":
        return cls(**{**value, "name": name, "row_shape": tuple(value["row_shape"]), "codec": codec_from_json(value["codec"])})


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the rows of an array are to be encoded."""

    name: str
    rows: Rows
    rows_per_chunk: int
    codec: Codec

    def shares(self) -> Iterable[tuple["_Plan", range]]:
        """Where its chunks begin, in portions for one task each."""
        starts = range(0, len(self.rows) if self.rows.nbytes else 0, self.rows_per_chunk)
        count = max(1, _ENCODE_BYTES // (self.rows_per_chunk * max(self.rows.row_bytes, 1)))
        return [(self, starts[first : first + count]) for first in range(0, len(starts), count)]

    def finish(self, chunks: Sequence[bytes]) -> tuple[StoredArray, Parts]:
        shard = [*chunks, build_index(chunks)] if chunks else []
        size, checksum = sum(len(part) for part in shard), crc32c_of_all(shard)
        dtype, row_shape = self.rows.dtype.name, self.rows.row_shape
        return StoredArray(self.name, len(self.rows), dtype, row_shape, self.rows_per_chunk, self.codec, size, checksum), shard


def encode_arrays(arrays: Mapping[str, Rows], *, pools: Collection[str] = ()) -> dict[str, tuple[StoredArray, Parts]]:
    """Arrays by name -> what is known of each, and its shard (empty where rows have no bytes).

    Args:
        arrays: The rows of each.
        pools: Which of them hold the frames of observations.
    """
    largest_first = sorted(arrays, key=lambda name: arrays[name].nbytes, reverse=True)
    plans = parallel_map(lambda name: _plan(name, arrays[name], is_pool=name in pools), largest_first, pool="encode")
    shares = [share for plan in plans for share in plan.shares()]
    chunks: dict[str, list[bytes]] = {name: [] for name in arrays}
    for (plan, _), encoded in zip(shares, parallel_map(lambda share: _encode(*share), shares, pool="encode"), strict=True):
        chunks[plan.name] += encoded
    finished = dict(zip(largest_first, parallel_map(lambda plan: plan.finish(chunks[plan.name]), plans, pool="encode"), strict=True))
    return {name: finished[name] for name in arrays}


def _plan(name: str, rows: Rows, *, is_pool: bool) -> _Plan:
    if not rows.nbytes:
        return _Plan(name, rows, 1, NONE)
    per_chunk = choose_rows_per_chunk(rows, is_pool=is_pool)
    return _Plan(name, rows, per_chunk, choose_codec(rows, rows_per_chunk=per_chunk))


def _encode(plan: _Plan, starts: range) -> list[bytes]:
    return [plan.codec.encode(plan.rows.chunk(start, plan.rows_per_chunk)) for start in starts]


def decode_array(array: StoredArray, shard: bytes) -> Array:
    """Inverse of `encode_arrays`, for one; `CorruptionError` if the bytes are not those that were written."""
    rows = np.empty((array.num_chunks * array.rows_per_chunk or array.rows, *array.row_shape), array.dtype)
    if array.bytes:
        if len(shard) != array.bytes or crc32c(shard) != array.crc32c:
            raise CorruptionError(f"{len(shard)} bytes are not the {array.bytes} that were written")
        data = np.frombuffer(shard, np.uint8)
        table = parse_index(data[-index_bytes(array.num_chunks) :], shard_bytes=len(data))
        chunks = find_chunks(array.codec, array.chunk_bytes, data, table)
        chunks.decode(0, array.num_chunks, target=rows, offsets=np.arange(array.num_chunks) * array.chunk_bytes)
    return rows[: array.rows]


def to_document(node: Mapping[str, Json]) -> bytes:
    """A Zarr metadata document as it is stored."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def write_array(storage: Storage, key: str, *, array: StoredArray, shard: Parts, attributes: Mapping[str, Json]) -> None:
    """Writes an encoded array's two files below `key`, or its document alone when it has no bytes."""
    if shard:
        storage.write(f"{key}/{array.shard_key}", *shard)
    storage.write(f"{key}/zarr.json", to_document(array.metadata(attributes)))
