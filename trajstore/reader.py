"""Rows out of segments and memory: rows -> chunks -> their places.

A read is a plan (arrays of chunk, row and destination) and an executor that decodes each chunk once, straight into its place where a
chunk is a row. There is no loop over the rows of a batch, only over its chunks.
"""

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from trajstore.arrays import StoredArray
from trajstore.decode import BadChunkError, Chunks, find_chunks
from trajstore.layout import CURR_FRAME, Array, Ints, Places, Schema, array_ranges
from trajstore.packing import array_shape
from trajstore.segment import Segment
from trajstore.storage import ByteRange
from trajstore.threads import num_threads, parallel_map

SHARES_PER_THREAD = 4
"""Parts that a batch's chunks are cut into, for threads to take in turn."""
PIECE_BYTES = 2 * 1024 * 1024
"""Copies from memory are cut into pieces of about this size."""
SCRATCH_BYTES = 1024 * 1024
"""Chunks that are decoded before rows are picked out of them."""
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

    def take(self, takes: Sequence[Take]) -> "list[Job]":
        """Does what can be done at once, and returns the decoding that is left, for `run`."""


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

    def take(self, takes: Sequence[Take]) -> "list[Job]":
        pieces = [piece for take in takes for piece in self._pieces(take)]
        if len(pieces) == len(takes):
            for take in takes:
                self._copy(take)
        else:
            parallel_map(self._copy, pieces)
        return []

    def _copy(self, take: Take) -> None:
        array, rows, out, dest = take
        if dest is None:
            self.arrays[array].take(rows, axis=0, out=out, mode="clip")
        else:
            out[dest] = self.arrays[array].take(rows, axis=0, mode="clip")

    def _pieces(self, take: Take) -> list[Take]:
        """A large copy in pieces, for several threads: one alone does not use all of the memory's bandwidth."""
        array, rows, out, dest = take
        count = min(len(rows), self.arrays[array][:1].nbytes * len(rows) // PIECE_BYTES)
        if count < 2 or num_threads() == 1:
            return [take]
        bounds = np.linspace(0, len(rows), count + 1, dtype=np.int64).tolist()
        if dest is None:
            return [Take(array, rows[a:b], out[a:b], None) for a, b in pairwise(bounds)]
        return [Take(array, rows[a:b], out, dest[a:b]) for a, b in pairwise(bounds)]


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
    return _plan_sorted(*_sort_rows(rows, dest), rows_per_chunk)


def _sort_rows(rows: Ints, dest: Ints | None) -> tuple[Ints, Ints]:
    """Rows in ascending order, and where each goes."""
    order = np.argsort(rows, kind="stable")
    return rows[order], order if dest is None else dest[order]


def _plan_sorted(rows: Ints, dest: Ints, rows_per_chunk: int) -> ChunkPlan:
    chunks = rows // rows_per_chunk if rows_per_chunk > 1 else rows
    starts = np.flatnonzero(chunks[1:] != chunks[:-1]) + 1
    bounds = np.concatenate([[0], starts, [len(rows)]])
    count = len(rows) - 1  # cheap for what is drawn at random, which is seldom in order
    in_order = bool(
        rows[-1] - rows[0] == count == dest[-1] - dest[0] and (rows[1:] - rows[:-1] == 1).all() and (dest[1:] - dest[:-1] == 1).all()
    )
    return ChunkPlan(chunks[bounds[:-1]], bounds, rows - chunks * rows_per_chunk, dest, in_order)


@dataclass(frozen=True, slots=True)
class Job:
    """A plan with the bytes of its chunks and the output.

    Attributes:
        segment: The segment.
        stored: The array.
        plan: Which chunks, and where their rows go.
        chunks: Their bytes.
        out: [n, ...].
    """

    segment: Segment
    stored: StoredArray
    plan: ChunkPlan
    chunks: Chunks
    out: Array

    def run(self, first: int, stop: int) -> None:
        """Decodes the chunks `[first, stop)` of the plan and puts their rows where they belong."""
        try:
            if self.stored.rows_per_chunk == 1:
                self._decode_rows(first, stop)
            elif self.plan.in_order:
                self._decode_in_order(first, stop)
            else:
                self._decode_and_pick(first, stop)
        except BadChunkError as error:
            start = int(self.plan.chunks[error.number]) * self.stored.rows_per_chunk
            rows = (start, start + self.stored.rows_per_chunk)
            raise self.segment.located(error, self.stored.name, rows) from error

    def _decode_rows(self, first: int, stop: int) -> None:
        """Each chunk is a row: straight into its place, and from there to where it was drawn again."""
        bounds, dest = self.plan.bounds[first : stop + 1], self.plan.dest
        places = dest[bounds[:-1]]
        self.chunks.decode(first, stop, target=self.out, offsets=places * self.stored.row_bytes)
        for number in np.flatnonzero(np.diff(bounds) > 1).tolist():
            self.out[dest[bounds[number] + 1 : bounds[number + 1]]] = self.out[places[number]]

    def _decode_in_order(self, first: int, stop: int) -> None:
        """Whole chunks go straight to their places; the first and the last may be wanted in part."""
        per_chunk, bounds = self.stored.rows_per_chunk, self.plan.bounds
        whole_first = first + (bounds[first + 1] - bounds[first] < per_chunk)
        whole_stop = max(whole_first, stop - (bounds[stop] - bounds[stop - 1] < per_chunk))
        offsets = self.plan.dest[bounds[whole_first:whole_stop]] * self.stored.row_bytes
        self.chunks.decode(whole_first, whole_stop, target=self.out, offsets=offsets)
        for number in {first, stop - 1} - set(range(whole_first, whole_stop)):
            self._decode_and_pick(number, number + 1)

    def _decode_and_pick(self, first: int, stop: int) -> None:
        """Some chunks at a time into memory that stays in the processor's cache, then the wanted rows out of it."""
        stored, plan = self.stored, self.plan
        step = max(1, SCRATCH_BYTES // stored.chunk_bytes)
        scratch = _scratch(min(step, stop - first) * stored.chunk_bytes).view(stored.dtype)
        source = scratch.reshape(-1, *stored.row_shape)
        for start in range(first, stop, step):
            end = min(start + step, stop)
            self.chunks.decode(start, end, target=scratch, offsets=np.arange(end - start) * stored.chunk_bytes)
            wanted = slice(int(plan.bounds[start]), int(plan.bounds[end]))
            within = np.repeat(np.arange(end - start), np.diff(plan.bounds[start : end + 1])) * stored.rows_per_chunk
            rows, dest = within + plan.rows[wanted], plan.dest[wanted]
            if stored.row_bytes >= LARGE_ROW_BYTES:
                for row, place in zip(rows.tolist(), dest.tolist(), strict=True):
                    self.out[place] = source[row]
            else:
                self.out[dest] = source[rows]


_local = threading.local()


def _scratch(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """This thread's own uint8[nbytes], kept since fresh pages cost more than what is done in them."""
    known = getattr(_local, "scratch", None)
    if known is None or known.nbytes < nbytes:
        known = _local.scratch = np.empty(max(nbytes, SCRATCH_BYTES), np.uint8)
    memory: np.ndarray[Any, np.dtype[np.uint8]] = known[:nbytes]
    return memory


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

    def take(self, takes: Sequence[Take]) -> list[Job]:
        segment = self.segment
        takes = [take for take in takes if segment.stored_array(take.array).bytes and len(take.rows)]
        tables = segment.chunk_table([take.array for take in takes])
        plans = self._plans(takes)
        wanted = [tables[take.array][plan.chunks] for take, plan in zip(takes, plans, strict=True)]
        return [
            Job(segment, segment.stored_array(take.array), plan, chunks, take.out)
            for take, plan, chunks in zip(takes, plans, self._find(takes, wanted), strict=True)
        ]

    def _plans(self, takes: Sequence[Take]) -> list[ChunkPlan]:
        """Fields that are read at the same rows share the sorting and, with chunks of one length, the plan."""
        orders: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        plans: dict[tuple[int, int, int], ChunkPlan] = {}
        found = []
        for take in takes:
            same = (id(take.rows), id(take.dest))
            if same not in orders:
                orders[same] = _sort_rows(take.rows, take.dest)
            per_chunk = self.segment.stored_array(take.array).rows_per_chunk
            if (*same, per_chunk) not in plans:
                plans[(*same, per_chunk)] = _plan_sorted(*orders[same], per_chunk)
            found.append(plans[(*same, per_chunk)])
        return found

    def _find(self, takes: Sequence[Take], wanted: Sequence[Ints]) -> list[Chunks]:
        """Chunks by their offsets and lengths (int64[c, 2] for each take); what is not in memory is fetched in one go."""
        segment = self.segment
        keys = [segment.shard_key(take.array) for take in takes]
        views = [segment.storage.view(key) for key in keys]
        missing = [
            ByteRange(key, *entry) for key, view, table in zip(keys, views, wanted, strict=True) if view is None for entry in table.tolist()
        ]
        fetched = iter(segment.storage.fetch(missing) if missing else [])
        found = []
        for take, view, entries in zip(takes, views, wanted, strict=True):
            base, table = view, entries
            if base is None:
                pieces = [next(fetched) for _ in table]
                lengths = np.array([len(piece) for piece in pieces])
                base, table = np.concatenate(pieces), np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)
            stored = segment.stored_array(take.array)
            locate = functools.partial(find_chunks, stored.codec, stored.chunk_bytes, base, table)
            found.append(segment.checked(locate, take.array))
        return found


def run(jobs: Sequence[Job]) -> None:
    """Decodes all that is left of some takes, on all threads."""

    def run_share(share: list[tuple[Job, int, int]]) -> None:
        for job, first, stop in share:
            job.run(first, stop)

    parallel_map(run_share, _shares(jobs))


def _shares(jobs: Sequence[Job]) -> list[list[tuple[Job, int, int]]]:
    """Cuts the chunks of all jobs into parts of about equal bytes, a few for each thread."""
    chunk_bytes = [job.stored.chunk_bytes + LARGE_ROW_BYTES for job in jobs]
    total = sum(size * len(job.plan.chunks) for size, job in zip(chunk_bytes, jobs, strict=True))
    target = max(total / (num_threads() * SHARES_PER_THREAD), 256 * 1024) if num_threads() > 1 else total
    shares: list[list[tuple[Job, int, int]]] = [[]]
    room = target
    for size, job in zip(chunk_bytes, jobs, strict=True):
        first, count = 0, len(job.plan.chunks)
        while first < count:
            stop = min(count, first + max(1, int(room // size)))
            shares[-1].append((job, first, stop))
            room -= size * (stop - first)
            if room < size:
                shares.append([])
                room = target
            first = stop
    return [share for share in shares if share]


def read_arrays(source: Source, places: Places, *, out: Mapping[str, Array]) -> None:
    """Copies one trajectory's arrays (places of length 1) whole into `out`, name -> [rows, ...]."""
    read_ranges(source, array_ranges(source.schema, places), out=out)


def read_ranges(source: Source, ranges: Mapping[str, tuple[int, int]], *, out: Mapping[str, Array]) -> None:
    """Copies rows `[start, stop)` of some arrays into `out`, name -> [stop - start, ...]."""
    run(source.take([Take(name, np.arange(*ranges[name]), target, None) for name, target in out.items()]))


def empty_arrays(schema: Schema, places: Places) -> dict[str, Array]:
    """Memory for `read_arrays`: all arrays that the fields of `schema` need."""
    empty = {}
    for name, (start, stop) in array_ranges(schema, places).items():
        dtype, row_shape = array_shape(schema, name)
        empty[name] = np.empty((stop - start, *row_shape), dtype)
    return empty
