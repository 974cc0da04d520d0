"""A batch: which fields, in which memory, from which rows of which sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trajstore.errors import FieldNotFoundError, InvalidRequestError, SchemaMismatchError
from trajstore.layout import Array, Field, Ints, Schema, rows_of
from trajstore.memory import BATCHES
from trajstore.reader import Group, MemorySource, Source, Take, run
from trajstore.trajectory import STORED_DTYPES, from_stored

POOLED_BATCH_BYTES = 4 * 1024 * 1024
"""Batches from this size on take their memory from the pool of blocks; below, the allocator is as fast."""
_ALIGNMENT = 64


class _Slot(NamedTuple):
    """Memory of a field, or of both observations of a key one after the other, so that one read serves both."""

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    row_bytes: int
    copies: int


class _Output(NamedTuple):
    """A field of the batch: its keys, its slot, whether it is the second half of it, its dtype for torch."""

    keys: tuple[str, ...]
    slot: int
    half: int
    dtype: str


@dataclass(frozen=True)
class BatchLayout:
    """How a batch of some fields lies in memory; depends on nothing but the fields."""

    slots: tuple[_Slot, ...]
    outputs: dict[str, _Output]
    row_bytes: int

    def allocate(self, count: int) -> list[Array]:
        """Memory [copies * count, ...] for each slot."""
        lengths = [count * slot.copies for slot in self.slots]
        offsets, total = [], 0
        for length, slot in zip(lengths, self.slots, strict=True):
            offsets.append(total)
            total += -(-length * slot.row_bytes // _ALIGNMENT) * _ALIGNMENT
        if total < POOLED_BATCH_BYTES:
            return [np.empty((n, *slot.row_shape), slot.dtype) for n, slot in zip(lengths, self.slots, strict=True)]
        memory = BATCHES.lend(total)
        return [
            np.ndarray((n, *slot.row_shape), slot.dtype, memory, offset)
            for n, slot, offset in zip(lengths, self.slots, offsets, strict=True)
        ]

    def to_batch(self, memory: Sequence[Array], count: int) -> dict[str, Any]:
        """Nested dict of tensors [count, ...] over that memory."""
        batch: dict[str, Any] = {}
        for keys, slot, half, dtype in self.outputs.values():
            array = memory[slot]
            if len(array) != count:
                array = array[count:] if half else array[:count]
            level = batch
            for key in keys[:-1]:
                level = level.setdefault(key, {})
            level[keys[-1]] = from_stored(array, dtype)
        return batch


@lru_cache(256)
def batch_layout(fields: Schema) -> BatchLayout:
    """The layout of a batch of these fields."""
    slots: list[_Slot] = []
    outputs: dict[str, _Output] = {}
    for field in fields.fields:
        curr = outputs.get(field.path.replace("next_obs/", "curr_obs/", 1))
        keys = tuple(field.path.split("/"))
        if curr is not None and fields.by_path["/".join(curr.keys)].row == field.row:
            slots[curr.slot] = slots[curr.slot]._replace(copies=2)
            outputs[field.path] = _Output(keys, curr.slot, 1, field.dtype)
            continue
        dtype = STORED_DTYPES[field.dtype]
        outputs[field.path] = _Output(keys, len(slots), 0, field.dtype)
        slots.append(_Slot(dtype, field.row_shape, dtype.itemsize * int(np.prod(field.row_shape)), 1))
    return BatchLayout(tuple(slots), outputs, sum(slot.row_bytes * slot.copies for slot in slots))


class _Op(NamedTuple):
    """A field, or both observations of a key, to be taken from a source.

    Attributes:
        field: The field as the source has it.
        rows: Fields with equal ones are at the same rows: how its extra rows lie, or which frames.
        slot, half: Where it goes.
        both: It goes with the next observation, to both halves.
    """

    field: Field
    rows: tuple[int, bool, bool]
    slot: int
    half: int
    both: bool


@lru_cache(256)
def _ops(source: Schema, fields: Schema) -> tuple[_Op, ...]:
    layout = batch_layout(fields)
    ops = []
    for path, output in layout.outputs.items():
        field = source.by_path[path]
        both = field.frame is not None and layout.slots[output.slot].copies == 2
        if both and output.half == 1:
            continue
        rows = (field.extra_rows, field.extra_first, False) if field.frame is None else (field.frame, both, True)
        ops.append(_Op(field, rows, output.slot, output.half, both))
    return tuple(ops)


Kind: TypeAlias = tuple[int, bool, bool]
"""See `_Op.rows`."""


def gather(groups: Sequence[Group], fields: Schema, count: int) -> dict[str, Any]:
    """Reads a batch.

    Args:
        groups: Which source serves which draws; together all of them.
        fields: What to read; only paths, dtypes and row shapes matter.
        count: Size of the batch.

    Returns:
        Nested dict of tensors [count, ...], keys in the order of `fields`.
    """
    layout = batch_layout(fields)
    if len(groups) == 1:
        ops = _ops(groups[0].source.schema, fields)
        return _gather_from_one(groups[0].source, ops, layout, _rows(groups[0], ops))
    memory = layout.allocate(count)
    jobs = []
    for group in groups:
        ops = _ops(group.source.schema, fields)
        jobs += group.source.take(_takes(ops, _rows(group, ops), memory, draws=group.draws, count=count))
    run(jobs)
    return layout.to_batch(memory, count)


class RowTable:
    """The rows of every sample of a window that one source serves, so that a batch's are one index away.

    It costs 8 bytes a sample and the arithmetic of a batch as large as the window.

    Args:
        group: All samples of the window.
        fields: What is read.
    """

    def __init__(self, group: Group, fields: Schema) -> None:
        self._source = group.source
        self._layout = batch_layout(fields)
        self._ops = _ops(group.source.schema, fields)
        count = len(group.steps)
        self._rows = {kind: rows[:count] for kind, rows in _rows(group, self._ops).items()}

    def gather(self, samples: Ints) -> dict[str, Any]:
        """The batch of these samples, by their numbers in the window."""
        rows = {}
        for kind, table in self._rows.items():
            own = table.take(samples)
            rows[kind] = np.concatenate([own, own + 1]) if _is_both(kind) else own
        return _gather_from_one(self._source, self._ops, self._layout, rows)


def _gather_from_one(source: Source, ops: Sequence[_Op], layout: BatchLayout, rows: Mapping[Kind, Ints]) -> dict[str, Any]:
    """A batch of which one source serves all draws, in order."""
    kind = ops[0].rows
    count = len(rows[kind]) // (2 if _is_both(kind) else 1)
    if isinstance(source, MemorySource) and len(ops) == len(layout.slots) and count * layout.row_bytes < POOLED_BATCH_BYTES:
        arrays = source.arrays
        return layout.to_batch([arrays[op.field.array].take(rows[op.rows], 0, None, "clip") for op in ops], count)
    memory = layout.allocate(count)
    run(source.take(_takes(ops, rows, memory, draws=None, count=count)))
    return layout.to_batch(memory, count)


def _takes(ops: Sequence[_Op], rows: Mapping[Kind, Ints], memory: Sequence[Array], *, draws: Ints | None, count: int) -> list[Take]:
    """What to take from a source. Fields with the same rows share the array of rows, by which the source shares its plan."""
    both_draws = None if draws is None else np.concatenate([draws, draws + count])
    takes = []
    for op in ops:
        out = memory[op.slot]
        if not op.both and len(out) != count:
            out = out[count:] if op.half else out[:count]
        takes.append(Take(op.field.array, rows[op.rows], out, both_draws if op.both else draws))
    return takes


def _is_both(kind: Kind) -> bool:
    _, both, is_frame = kind
    return is_frame and both


def _rows(group: Group, ops: Sequence[_Op]) -> dict[Kind, Ints]:
    """The rows of a group's draws in its source's arrays; where both observations are meant, the next ones after the current ones."""
    _, _, places, steps, envs = group
    rows: dict[Kind, Ints] = {}
    plain = places.row_start + envs * places.num_steps + steps
    frames: Ints | None = None
    for field, kind, _, _, both in ops:
        if kind in rows:
            continue
        if field.frame is None:
            rows[kind] = rows_of(field, places, steps=steps, envs=envs) if field.extra_rows else plain
            continue
        if frames is None:
            frames = places.frame_start + group.source.curr_frame(plain)
        rows[kind] = np.concatenate([frames, frames + 1]) if both else frames + field.frame
    return rows


def resolve_fields(ids: Ints, schemas: Ints, known: Sequence[Schema], *, fields: Sequence[str] | str | None) -> Schema:
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
    if fields is not None and not len(fields):
        raise InvalidRequestError("fields is empty; pass None for all")
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
    return Schema(tuple(chosen))


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
