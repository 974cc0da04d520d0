"""Rows out of segments and memory: draws -> rows -> chunks -> batch.

A read is a plan (arrays of chunk, row and destination) and an executor that decodes each chunk once, straight into its place where a
chunk is a row. There is no loop over the rows of a batch, only over its chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from trajstore.errors import FieldNotFoundError, InvalidRequestError, SchemaMismatchError
from trajstore.layout import CURR_FRAME, Array, Field, Ints, Places, Schema, array_ranges, rows_of
from trajstore.packing import array_shape
from trajstore.segment import Segment, StoredArray
from trajstore.storage import ByteRange, Bytes
from trajstore.threads import num_threads, parallel_map
from trajstore.trajectory import STORED_DTYPES

SHARES_PER_THREAD = 4
"""Parts that a batch's chunks are cut into, for threads to take in turn."""
LARGE_ROW_BYTES = 4096
"""Rows from this size on are copied one by one; smaller ones by an index."""


class Take(NamedTuple):
    """Rows of an array to be put somewhere.

    Attributes:
        array: Name of the array.
        rows: int64[m], which rows.
        out: [n, ...] of the stored dtype, contiguous.
        dest: int64[m], which rows of `out` they become; None: all of them, in order.
    """

    array: str
    rows: Ints
    out: Array
    dest: Ints | None


class Source(Protocol):
    """Arrays that trajectories of one schema can be read from."""

    @property
    def schema(self) -> Schema:
        """The fields of its trajectories."""

    def curr_frame(self, rows: Ints) -> Ints:
        """Frames of the current observations of these rows, counted from their trajectory's first."""

    def take(self, takes: Sequence[Take]) -> None:
        """Does all of these."""


class Group(NamedTuple):
    """The draws of a batch that one source serves.

    Attributes:
        source: The source.
        draws: int64[m], their places in the batch; None: all of the batch.
        places: Where their trajectories begin in the source.
        steps, envs: int64[m].
    """

    source: Source
    draws: Ints | None
    places: Places
    steps: Ints
    envs: Ints


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Arrays in memory: a trajectory that is not written yet, or a cache.

    Attributes:
        schema: The fields of what is in them.
        arrays: By name, [n, ...].
    """

    schema: Schema
    arrays: Mapping[str, Array]

    def curr_frame(self, rows: Ints) -> Ints:
        frames: Ints = self.arrays[CURR_FRAME].take(rows, mode="clip")
        return frames

    def take(self, takes: Sequence[Take]) -> None:
        for array, rows, out, dest in takes:
            if dest is None:
                self.arrays[array].take(rows, axis=0, out=out, mode="clip")
            else:
                out[dest] = self.arrays[array].take(rows, axis=0, mode="clip")


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks that hold some rows, and where the rows go.

    Attributes:
        chunks: int64[c], distinct, ascending.
        bounds: int64[c + 1]; chunk `i` serves rows `[bounds[i], bounds[i + 1])` of the following.
        rows: int64[m], row within its chunk.
        dest: int64[m], row of the output.
        in_order: Rows and destinations both count up by one, as when a whole trajectory is read.
    """

    chunks: Ints
    bounds: Ints
    rows: Ints
    dest: Ints
    in_order: bool


def plan_chunks(rows: Ints, *, dest: Ints | None, rows_per_chunk: int) -> ChunkPlan:
    """Groups rows by chunk."""
    if dest is None:
        dest = np.arange(len(rows))
    order = np.argsort(rows, kind="stable")
    rows, dest = rows[order], dest[order]
    chunks = rows // rows_per_chunk
    starts = np.flatnonzero(np.diff(chunks, prepend=-1))
    in_order = bool((np.diff(rows) == 1).all() and (np.diff(dest) == 1).all())
    return ChunkPlan(chunks[starts], np.append(starts, len(rows)), rows - chunks * rows_per_chunk, dest, in_order)


class _Job(NamedTuple):
    """A plan with the bytes of its chunks and the output."""

    stored: StoredArray
    plan: ChunkPlan
    data: list[Bytes]
    out: Array


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A segment as a source."""

    segment: Segment

    @property
    def schema(self) -> Schema:
        return self.segment.info.schema

    def curr_frame(self, rows: Ints) -> Ints:
        frames: Ints = self.segment.curr_frame()[rows].astype(np.int64)
        return frames

    def take(self, takes: Sequence[Take]) -> None:
        takes = [take for take in takes if self.segment.stored_array(take.array).bytes and len(take.rows)]
        tables = self.segment.chunk_table([take.array for take in takes])
        plans, ranges = [], []
        for take in takes:
            stored = self.segment.stored_array(take.array)
            plan = plan_chunks(take.rows, dest=take.dest, rows_per_chunk=stored.rows_per_chunk)
            key = self.segment.shard_key(take.array)
            ranges += [ByteRange(key, offset, length) for offset, length in tables[take.array][plan.chunks].tolist()]
            plans.append(plan)
        data = iter(self.segment.storage.fetch(ranges))
        jobs = [
            _Job(self.segment.stored_array(take.array), plan, [next(data) for _ in plan.chunks], take.out)
            for take, plan in zip(takes, plans, strict=True)
        ]
        parallel_map(self._run, _shares(jobs))

    def _run(self, share: list[tuple[_Job, int, int]]) -> None:
        for job, first, stop in share:
            scratch = np.empty((job.stored.rows_per_chunk, *job.stored.row_shape), job.stored.dtype)
            for number in range(first, stop):
                chunk, per_chunk = int(job.plan.chunks[number]), job.stored.rows_per_chunk
                rows = (chunk * per_chunk, (chunk + 1) * per_chunk)
                self.segment.checked(lambda: _decode_chunk(job, number, scratch), job.stored.name, rows)  # noqa: B023


def _decode_chunk(job: _Job, number: int, scratch: Array) -> None:
    """Decodes one chunk of a job and puts its rows where they belong."""
    stored, plan, out = job.stored, job.plan, job.out
    first, stop = int(plan.bounds[number]), int(plan.bounds[number + 1])
    start = int(plan.dest[first])
    if stored.rows_per_chunk == 1 or (plan.in_order and stop - first == stored.rows_per_chunk):
        stored.codec.decode(job.data[number], out[start : start + stored.rows_per_chunk])
        if stored.rows_per_chunk == 1 and stop - first > 1:
            out[plan.dest[first + 1 : stop]] = out[start]
        return
    stored.codec.decode(job.data[number], scratch)
    if scratch[0].nbytes >= LARGE_ROW_BYTES:
        for row, dest in zip(plan.rows[first:stop].tolist(), plan.dest[first:stop].tolist(), strict=True):
            out[dest] = scratch[row]
    else:
        out[plan.dest[first:stop]] = scratch[plan.rows[first:stop]]


def _shares(jobs: Sequence[_Job]) -> list[list[tuple[_Job, int, int]]]:
    """Cuts the chunks of all jobs into parts of about equal bytes, a few for each thread."""
    chunk_bytes = [job.stored.rows_per_chunk * job.out[0].nbytes + LARGE_ROW_BYTES for job in jobs]
    total = sum(size * len(job.data) for size, job in zip(chunk_bytes, jobs, strict=True))
    target = max(total / (num_threads() * SHARES_PER_THREAD), 256 * 1024) if num_threads() > 1 else total
    shares: list[list[tuple[_Job, int, int]]] = [[]]
    room = target
    for size, job in zip(chunk_bytes, jobs, strict=True):
        first = 0
        while first < len(job.data):
            stop = min(len(job.data), first + max(1, int(room // size)))
            shares[-1].append((job, first, stop))
            room -= size * (stop - first)
            if room < size and (stop < len(job.data) or room <= 0):
                shares.append([])
                room = target
            first = stop
    return [share for share in shares if share]


def read_arrays(source: Source, places: Places, *, out: Mapping[str, Array]) -> None:
    """Copies one trajectory's arrays (places of length 1) whole into `out`, name -> [rows, ...]."""
    ranges = array_ranges(source.schema, places)
    takes = []
    for name, target in out.items():
        start, stop = ranges[name]
        takes.append(Take(name, np.arange(start, stop), target, None))
    source.take(takes)


def empty_arrays(schema: Schema, places: Places) -> dict[str, Array]:
    """Memory for `read_arrays`: all arrays that the fields of `schema` need."""
    empty = {}
    for name, (start, stop) in array_ranges(schema, places).items():
        dtype, row_shape = array_shape(schema, name)
        empty[name] = np.empty((stop - start, *row_shape), dtype)
    return empty


def gather(groups: Sequence[Group], fields: Sequence[Field], count: int) -> dict[str, Array]:
    """Reads a batch.

    Args:
        groups: Which source serves which draws; together all of them.
        fields: What to read; only path, dtype and row shape matter.
        count: Size of the batch.

    Returns:
        Path -> [count, ...] of the stored dtype, in the order of `fields`.
    """
    batch = _allocate(fields, count)
    for group in groups:
        group.source.take(list(_takes(group, fields, batch, count)))
    return {field.path: batch[field.path][:count] if field.path in batch else batch[_twin(field.path)][count:] for field in fields}


def _twin(path: str) -> str:
    """The current observation of a next one."""
    return path.replace("next_obs/", "curr_obs/", 1)


def _allocate(fields: Sequence[Field], count: int) -> dict[str, Array]:
    """Memory for a batch; both observations of a key are one array [2 * count, ...], so that one read serves both."""
    rows = {field.path: field.row for field in fields}
    batch: dict[str, Array] = {}
    for path, (dtype, row_shape) in rows.items():
        twin = path.replace("curr_obs/", "next_obs/", 1) if path.startswith("curr_obs/") else _twin(path)
        paired = twin != path and rows.get(twin) == rows[path]
        if not paired or path.startswith("curr_obs/"):
            batch[path] = np.empty((count * (1 + paired), *row_shape), STORED_DTYPES[dtype])
    return batch


def _takes(group: Group, fields: Sequence[Field], batch: Mapping[str, Array], count: int) -> "list[Take]":
    """What to take from one source."""
    schema = group.source.schema
    own = [schema.by_path[field.path] for field in fields]
    frames = None
    if any(field.frame is not None for field in own):
        rows = group.places.row_start + group.envs * group.places.num_steps + group.steps
        frames = group.places.frame_start + group.source.curr_frame(rows)
    takes = []
    for field in own:
        if field.path not in batch and field.frame is not None:
            continue  # comes with its twin
        if field.frame is None:
            rows = rows_of(field, group.places, steps=group.steps, envs=group.envs)
        else:
            assert frames is not None
            rows = frames + field.frame
        out, dest = batch.get(field.path), group.draws
        if out is None:
            out = batch[_twin(field.path)][count:]
        elif len(out) > count and field.frame is not None:
            rows = np.concatenate([rows, rows + 1])
            dest = None if dest is None else np.concatenate([dest, dest + count])
        elif len(out) > count:
            out = out[:count]
        takes.append(Take(field.array, rows, out, dest))
    return takes


def resolve_fields(ids: Ints, schemas: Ints, known: Sequence[Schema], *, fields: Sequence[str] | str | None) -> tuple[Field, ...]:
    """The fields of a batch over trajectories that may differ.

    Args:
        ids: int64[n], the trajectories.
        schemas: int64[n], their entries of `known`.
        known: All schemas.
        fields: None: all, which must agree. "common": those that agree. A list of paths, or of parents such as `curr_obs`.

    Raises:
        SchemaMismatchError: A field asked for is missing from some, or has another dtype or row shape.
        FieldNotFoundError: A field asked for is in none.
        InvalidRequestError: `fields` is something else.
    """
    if isinstance(fields, str) and fields != "common":
        raise InvalidRequestError(f"fields={fields!r}: expected None, 'common' or a list of field paths")
    numbers, first = np.unique(schemas, return_index=True)
    first_ids = ids[first]
    schema = known[numbers[0]]
    merged: dict[str, Field] = {}
    for number in numbers:
        merged = {**{field.path: field for field in known[number].fields}, **merged}
    wanted = _wanted(merged, fields)
    chosen = []
    for path in wanted:
        conflict = next((i for i, number in enumerate(numbers) if _row(known[number], path) != _row(schema, path)), None)
        if conflict is None:
            chosen.append(schema.by_path[path])
        elif fields != "common":
            this, other = _shown(schema, path), _shown(known[numbers[conflict]], path)
            raise SchemaMismatchError(
                f"field {path!r}: the trajectories mix {this} (trajectory {first_ids[0]}) and {other} (trajectory {first_ids[conflict]});"
                " pass fields= to leave it out, or fields='common'"
            )
    if not chosen:
        raise SchemaMismatchError(f"trajectories {first_ids[0]} and {first_ids[-1]} have no field in common")
    return tuple(chosen)


def _wanted(merged: Mapping[str, Field], fields: Sequence[str] | str | None) -> list[str]:
    if fields is None or isinstance(fields, str):
        return list(merged)
    wanted: dict[str, None] = {}
    for name in fields:
        found = [path for path in merged if path == name or path.startswith(f"{name}/")]
        if not found:
            raise FieldNotFoundError(f"field {name!r} is in no trajectory asked for; there are {', '.join(merged)}")
        wanted.update(dict.fromkeys(found))
    return list(wanted)


def _row(schema: Schema, path: str) -> Any:
    field = schema.by_path.get(path)
    return field and field.row


def _shown(schema: Schema, path: str) -> str:
    return str(schema.by_path.get(path, "no such field"))
