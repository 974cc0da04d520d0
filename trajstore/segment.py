"""Segments: sets of arrays that are written once, then only read, linked or deleted."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajstore.arrays import Parts, StoredArray, decode_array, encode_arrays, to_document, write_array
from trajstore.errors import CorruptionError
from trajstore.layout import CURR_FRAME, Array, Places, Rows, Schema, array_ranges
from trajstore.packing import Header, Packed
from trajstore.shard import index_bytes, parse_index
from trajstore.storage import ByteRange, Storage
from trajstore.threads import parallel_wait
from trajstore.trajectory import Json

SEGMENTS = "segments"
GROUP: dict[str, Json] = {"zarr_format": 3, "node_type": "group"}


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


@dataclass(frozen=True)
class EncodedSegment:
    """A segment that is ready to be written.

    Attributes:
        info: Its description.
        shards: Array name -> its shard.
    """

    info: SegmentInfo
    shards: dict[str, Parts]


def encode_segment(trajectories: Sequence[tuple[int, Packed]], *, recover: bool) -> EncodedSegment:
    """Encodes trajectories (id, packed) of one schema."""
    first = trajectories[0][1]
    rows = {name: Rows([packed.arrays[name] for _, packed in trajectories]) for name in first.arrays}
    encoded = encode_arrays(rows, pools={field.array for field in first.schema.fields if field.frame is not None})
    arrays = {name: array for name, (array, _) in encoded.items()}
    info = SegmentInfo(recover, first.schema, arrays, tuple(_entries(trajectories)))
    return EncodedSegment(info, {name: shard for name, (_, shard) in encoded.items()})


def write_segment(storage: Storage, number: int, encoded: EncodedSegment) -> SegmentInfo:
    """Writes and commits a segment. Durable on return."""
    schema = encoded.info.schema

    def write(array: StoredArray) -> None:
        torch_dtype = schema.by_array[array.name][0].dtype if array.name in schema.by_array else array.dtype
        attributes = {} if torch_dtype == array.dtype else {"torch_dtype": torch_dtype}
        write_array(storage, f"{segment_key(number)}/{array.name}", array=array, shard=encoded.shards[array.name], attributes=attributes)

    parallel_wait(write, sorted(encoded.info.arrays.values(), key=lambda array: array.bytes, reverse=True))
    commit_segment(storage, number, encoded.info)
    return encoded.info


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
