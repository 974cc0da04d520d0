"""Segments: sets of arrays that are written once, then only read, linked or deleted."""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from trajstore.codec import Codec, choose_codec, choose_rows_per_chunk, codec_from_json
from trajstore.decode import find_chunks
from trajstore.errors import CorruptionError
from trajstore.layout import CURR_FRAME, Array, Places, Schema, array_ranges
from trajstore.packing import Header, Packed
from trajstore.shard import build, crc32c, index_bytes, parse_index
from trajstore.storage import ByteRange, Storage
from trajstore.threads import parallel_map
from trajstore.trajectory import Json

SEGMENTS = "segments"
GROUP: dict[str, Json] = {"zarr_format": 3, "node_type": "group"}
_ENCODE_BYTES = 4 * 1024 * 1024
"""Rows that one task of the encoder takes."""


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
class Entry:
    """A trajectory of a segment: its id, what is known of it, and where it begins in the arrays."""

    trajectory_id: int
    header: Header
    row_start: int
    env_start: int
    frame_start: int
    aside: dict[str, Json]

    @property
    def places(self) -> Places:
        starts = {name: np.array([getattr(self, name)]) for name in ("row_start", "env_start", "frame_start")}
        return replace(self.header.places, **starts)

    def to_json(self) -> dict[str, Json]:
        starts = {name: getattr(self, name) for name in ("row_start", "env_start", "frame_start")}
        header = {name: getattr(self.header, name) for name in Header.__dataclass_fields__}  # asdict would copy deeply
        return {"id": self.trajectory_id, **header, **starts, "aside": self.aside}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> "Entry":
        header = Header(**{name: value[name] for name in Header.__dataclass_fields__})
        return cls(value["id"], header, value["row_start"], value["env_start"], value["frame_start"], value["aside"])


@dataclass(frozen=True)
class SegmentInfo:
    """What a segment's `zarr.json` says.

    Attributes:
        recover: Whether `open` may add it to an index that does not know it.
        schema: The fields of all its trajectories.
        arrays: By name.
        entries: Its trajectories, in the order of their rows.
    """

    recover: bool
    schema: Schema
    arrays: dict[str, StoredArray]
    entries: tuple[Entry, ...]

    @functools.cached_property
    def file_bytes(self) -> int:
        """Bytes of its shards."""
        return sum(array.bytes for array in self.arrays.values())

    @functools.cached_property
    def by_id(self) -> dict[int, Entry]:
        """Trajectory id -> its entry."""
        return {entry.trajectory_id: entry for entry in self.entries}

    @functools.cached_property
    def raw_bytes(self) -> int:
        """Bytes of its arrays, decoded."""
        return sum(array.rows * array.row_bytes for array in self.arrays.values())

    def to_json(self) -> dict[str, Json]:
        arrays = {name: array.to_json() for name, array in self.arrays.items()}
        entries = [entry.to_json() for entry in self.entries]
        return {"recover": self.recover, "fields": self.schema.to_json(), "arrays": arrays, "trajectories": entries}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> "SegmentInfo":
        arrays = {name: StoredArray.from_json(name, array) for name, array in value["arrays"].items()}
        entries = tuple(Entry.from_json(entry) for entry in value["trajectories"])
        return cls(bool(value["recover"]), Schema.from_json(value["fields"]), arrays, entries)


def segment_key(number: int) -> str:
    """Where segment `number` lies."""
    return f"{SEGMENTS}/{number}"


def to_document(node: Mapping[str, Json]) -> bytes:
    """A Zarr metadata document as it is stored."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def group_document(attributes: Mapping[str, Json]) -> bytes:
    """A group with `attributes.trajstore`."""
    return to_document({**GROUP, "attributes": {"trajstore": attributes}})


def parse_document(data: bytes, *, where: str) -> Any:
    """`attributes.trajstore` of a metadata document; `CorruptionError` names the place if it does not parse."""
    try:
        return json.loads(data)["attributes"]["trajstore"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(f"{where}: no metadata of trajstore: {error!r}") from error


def read_segment_info(storage: Storage, number: int) -> SegmentInfo:
    """Reads a committed segment's description.

    Raises:
        FileNotFoundError: It is not committed, or deleted.
        CorruptionError: It does not parse.
    """
    key = f"{segment_key(number)}/zarr.json"
    value = parse_document(storage.read(key), where=f"{storage.location}: {key}")
    try:
        return SegmentInfo.from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{storage.location}: {key} does not parse: {error!r}") from error


def write_segment(storage: Storage, number: int, *, trajectories: Sequence[tuple[int, Packed]], recover: bool) -> SegmentInfo:
    """Writes and commits trajectories (id, packed) of one schema as a segment. Durable on return."""
    schema, first = trajectories[0][1].schema, trajectories[0][1].arrays

    def write(name: str) -> StoredArray:
        parts = [packed.arrays[name] for _, packed in trajectories]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return _write_array(storage, f"{segment_key(number)}/{name}", name=name, rows=rows, schema=schema)

    # the largest first: others sync their small files while it is encoded
    names = sorted(first, key=lambda name: first[name].nbytes, reverse=True)
    written = {name: write(name) for name in names}
    arrays = {name: written[name] for name in first}
    info = SegmentInfo(recover, schema, arrays, tuple(_entries(trajectories)))
    commit_segment(storage, number, info)
    return info


def commit_segment(storage: Storage, number: int, info: SegmentInfo) -> None:
    """Writes the groups above the arrays, then the segment's own document, which makes it visible."""
    for group in {name.rpartition("/")[0] for name in info.arrays} - {""}:
        parents = group.split("/")
        for depth in range(1, len(parents) + 1):
            storage.write(f"{segment_key(number)}/{'/'.join(parents[:depth])}/zarr.json", to_document(GROUP))
    storage.replace(f"{segment_key(number)}/zarr.json", group_document(info.to_json()))


def link_segment(storage: Storage, number: int, *, source: "Segment", entries: Sequence[Entry]) -> SegmentInfo:
    """Makes another store's segment a segment of this one that lists only `entries`. Nothing is decoded."""
    for array in source.info.arrays.values():
        below = [f"{array.name}/zarr.json", *([f"{array.name}/{array.shard_key}"] if array.bytes else [])]
        for key in below:
            storage.link(f"{segment_key(number)}/{key}", source.storage, f"{segment_key(source.number)}/{key}")
    info = SegmentInfo(False, source.info.schema, source.info.arrays, tuple(entries))
    commit_segment(storage, number, info)
    return info


def delete_segment(storage: Storage, number: int) -> None:
    """Removes a segment; its document goes first, so that it is never half there."""
    storage.delete(f"{segment_key(number)}/zarr.json")
    storage.delete(segment_key(number))


def _entries(trajectories: Sequence[tuple[int, Packed]]) -> Iterator[Entry]:
    row_start = env_start = frame_start = 0
    for trajectory_id, packed in trajectories:
        header = packed.header
        yield Entry(trajectory_id, header, row_start, env_start, frame_start, packed.aside)
        row_start += header.num_steps * header.num_envs
        env_start += header.num_envs
        frame_start += header.num_frames


def _write_array(storage: Storage, key: str, *, name: str, rows: Array, schema: Schema) -> StoredArray:
    torch_dtype = schema.by_array[name][0].dtype if name in schema.by_array else rows.dtype.name
    attributes = {} if torch_dtype == rows.dtype.name else {"torch_dtype": torch_dtype}
    stored, shard = encode_array(name, rows)
    write_array(storage, key, array=stored, shard=shard, attributes=attributes)
    return stored


def write_array(storage: Storage, key: str, *, array: StoredArray, shard: bytes, attributes: Mapping[str, Json]) -> None:
    """Writes an encoded array's two files below `key`, or its document alone when it has no bytes."""
    if shard:
        storage.write(f"{key}/{array.shard_key}", shard)
    storage.write(f"{key}/zarr.json", to_document(array.metadata(attributes)))


def encode_array(name: str, rows: Array) -> tuple[StoredArray, bytes]:
    """Rows [n, ...], n > 0, contiguous -> the array's description and its shard (empty when rows have no bytes)."""
    if not rows.nbytes:
        return StoredArray(name, len(rows), rows.dtype.name, rows.shape[1:], 1, Codec("none"), 0, 0), b""
    per_chunk = choose_rows_per_chunk(rows)
    codec = choose_codec(rows, rows_per_chunk=per_chunk)
    starts = range(0, len(rows), per_chunk)
    share = max(1, _ENCODE_BYTES // (per_chunk * rows[0].nbytes))
    shares = [starts[first : first + share] for first in range(0, len(starts), share)]

    def encode(share: range) -> list[bytes]:
        return [codec.encode(_padded(rows[start : start + per_chunk], per_chunk)) for start in share]

    shard = build([chunk for chunks in parallel_map(encode, shares) for chunk in chunks])
    return StoredArray(name, len(rows), rows.dtype.name, rows.shape[1:], per_chunk, codec, len(shard), crc32c(shard)), shard


def decode_array(array: StoredArray, shard: bytes) -> Array:
    """Inverse of `encode_array`; `CorruptionError` if the bytes are not those that were written."""
    rows = np.empty((array.num_chunks * array.rows_per_chunk or array.rows, *array.row_shape), array.dtype)
    if array.bytes:
        if len(shard) != array.bytes or crc32c(shard) != array.crc32c:
            raise CorruptionError(f"{len(shard)} bytes are not the {array.bytes} that were written")
        data = np.frombuffer(shard, np.uint8)
        table = parse_index(data[-index_bytes(array.num_chunks) :], shard_bytes=len(data))
        chunks = find_chunks(array.codec, array.chunk_bytes, data, table)
        chunks.decode(0, array.num_chunks, target=rows, offsets=np.arange(array.num_chunks) * array.chunk_bytes)
    return rows[: array.rows]


def _padded(rows: Array, count: int) -> Array:
    if len(rows) == count:
        return rows
    full = np.zeros((count, *rows.shape[1:]), rows.dtype)
    full[: len(rows)] = rows
    return full


class Segment:
    """A committed segment, opened for reading. Thread-safe.

    Attributes:
        storage: Where it lies.
        number: Its number.
        info: Its description.
    """

    def __init__(self, storage: Storage, number: int) -> None:
        self.storage = storage
        self.number = number
        self.info = read_segment_info(storage, number)
        self._chunks: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._frames: Array | None = None

    def __str__(self) -> str:
        return f"{self.storage.location}: segment {self.number}"

    def shard_key(self, array: str) -> str:
        return f"{segment_key(self.number)}/{array}/{self.info.arrays[array].shard_key}"

    def entry(self, trajectory_id: int) -> Entry:
        try:
            return self.info.by_id[trajectory_id]
        except KeyError:
            raise CorruptionError(f"{self}: it does not list trajectory {trajectory_id}, which the index says it holds") from None

    def stored_array(self, array: str) -> StoredArray:
        try:
            return self.info.arrays[array]
        except KeyError:
            raise CorruptionError(f"{self}: it does not list array {array!r}") from None

    def chunk_table(self, arrays: Sequence[str]) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """Offset and length of each chunk of some arrays, int64[chunks, 2]; read once, all in one round.

        Raises:
            CorruptionError: A shard's size or index is not what was written.
        """
        missing = [self.stored_array(name) for name in arrays if name not in self._chunks]
        wanted = [array for array in missing if array.bytes]
        for array in wanted:
            self._check_size(array)
        tails = [
            ByteRange(self.shard_key(array.name), array.bytes - size, size) for array in wanted for size in [index_bytes(array.num_chunks)]
        ]
        for array, data in zip(wanted, self.storage.fetch(tails), strict=True):
            parse = functools.partial(parse_index, data, shard_bytes=array.bytes)
            self._chunks[array.name] = self.checked(parse, array.name)
        return {name: self._chunks[name] for name in arrays if name in self._chunks}

    def _check_size(self, array: StoredArray) -> None:
        size = self.storage.size(self.shard_key(array.name))
        if size != array.bytes:
            raise CorruptionError(f"{self}, array {array.name!r}: its file has {size} bytes where {array.bytes} were written")

    def checked(self, read: Callable[[], Any], array: str) -> Any:
        """Calls `read`; a `CorruptionError` gets to name store, segment, array and trajectories."""
        try:
            return read()
        except CorruptionError as error:
            raise self.located(error, array) from error

    def located(self, error: CorruptionError, array: str, rows: tuple[int, int] | None = None) -> CorruptionError:
        """The same error, naming store, segment, array and the trajectories that have rows in `[start, stop)`."""
        return CorruptionError(f"{self}, array {array!r}: {error}; it holds {self._holders(array, rows)}")

    def _holders(self, array: str, rows: tuple[int, int] | None) -> str:
        ranges = [(entry.trajectory_id, array_ranges(self.info.schema, entry.places)[array]) for entry in self.info.entries]
        start, stop = rows or (0, 1 << 62)
        hit = [str(trajectory_id) for trajectory_id, (first, end) in ranges if first < stop and start < end]
        return f"trajectories {', '.join(hit[:20])}{' and more' if len(hit) > 20 else ''}"

    def curr_frame(self) -> Array:
        """The array `curr_frame`, int32[rows]: small, so it is decoded once and kept."""
        if self._frames is None:
            array = self.stored_array(CURR_FRAME)
            shard = bytes(self.storage.fetch([ByteRange(self.shard_key(CURR_FRAME), 0, array.bytes)])[0])
            self._frames = self.checked(lambda: decode_array(array, shard), CURR_FRAME)
        return self._frames
