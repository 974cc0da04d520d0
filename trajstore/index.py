"""The table of live trajectories, oldest first; how it is published and read back. The columns are those of FORMAT.md."""

import contextlib
import uuid as uuids
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trajstore.arrays import StoredArray, decode_array, encode_arrays, write_array
from trajstore.errors import CorruptionError, InvalidRequestError, TrajectoryNotFoundError
from trajstore.layout import Array, Ints, Places, Rows, Schema
from trajstore.packing import Header, reference_field
from trajstore.segment import Entry, SegmentInfo, group_document, parse_document
from trajstore.storage import Storage

INDEX = "index"
PENDING = -1
"""The segment of a trajectory that is not committed yet."""
COLUMNS = (
    *("id", "uuid_high", "uuid_low", "segment", "schema", "weights"),
    *("num_steps", "num_envs", "row_start", "env_start", "frame_start", "num_frames"),
    *("max_episode_length", "model_update_count"),
)
_COLUMN = {name: number for number, name in enumerate(COLUMNS)}
_PLACE = [_COLUMN[name] for name in ("segment", "row_start", "env_start", "frame_start")]


def as_integers(what: str, values: Any) -> Ints:
    """int64[n] of integers in any form; `InvalidRequestError` for anything that would have to be rounded or guessed."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.max() > np.iinfo(np.int64).max):
        raise InvalidRequestError(f"{what}: expected integers, found {array.dtype} such as {array.reshape(-1)[0]!r}")
    return array.astype(np.int64).reshape(-1)


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """What the index knows of a trajectory.

    Attributes:
        trajectory_id: Its id.
        uuid: Its own uuid, 32 hexadecimal digits.
        shape: Shape of the field that T and B come from: (T, B, ...).
        max_episode_length, model_weights_id, model_update_count: As in `Trajectory`.
    """

    trajectory_id: int
    uuid: str
    shape: tuple[int, ...]
    max_episode_length: int
    model_weights_id: str
    model_update_count: int

    @property
    def num_samples(self) -> int:
        """T * B."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Selection:
    """Some trajectories of an index, copied out of it. All arrays are int64[n].

    Attributes:
        ids: Their ids.
        segments: Where they lie; `PENDING` while they are in memory.
        schemas: Entries of `known_schemas`.
        places: Where they begin in their segments.
        known_schemas: The index's schemas.
        epoch: Changes with what ids mean; see `Index.renames`.
    """

    ids: Ints
    segments: Ints
    schemas: Ints
    places: Places
    known_schemas: tuple[Schema, ...]
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def ends(self) -> Ints:
        """Cumulative number of samples."""
        return np.cumsum(self.places.num_steps * self.places.num_envs)

    @cached_property
    def num_samples(self) -> int:
        return int(self.ends[-1]) if len(self) else 0

    def holds_what(self, other: "Selection") -> bool:
        """Whether it is about the same trajectories, wherever they lie."""
        return self.epoch == other.epoch and np.array_equal(self.ids, other.ids)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all have the same number of steps and of environments, which spares a search for each draw."""
        steps, envs = self.places.num_steps, self.places.num_envs
        return len(self) > 0 and bool((steps == steps[0]).all() and (envs == envs[0]).all())


class Index:
    """The table, in memory. Not thread-safe: the store that owns it guards it."""

    def __init__(self) -> None:
        self.schemas: list[Schema] = []
        self.weights: list[str] = []
        self.next_id = 0
        self.next_segment = 0
        self._rows = np.empty((0, len(COLUMNS)), np.int64)
        self._count = 0
        self._numbers: dict[Schema | str, int] = {}
        self._order: Ints | None = None

    def __len__(self) -> int:
        return self._count

    def column(self, name: str) -> Ints:
        """A view of one column, int64[n]; it is not to be kept."""
        column: Ints = self._rows[: self._count, _COLUMN[name]]
        return column

    @property
    def num_samples(self) -> int:
        return int(self.column("num_steps") @ self.column("num_envs"))

    def find(self, ids: Sequence[int] | Ints) -> Ints:
        """Positions of trajectory ids in the table; `TrajectoryNotFoundError` names one that is not there."""
        wanted = as_integers("trajectory ids", ids)
        positions = self._locate(wanted)
        if (positions < 0).any():
            known = self.column("id")
            held = f"{len(known)} between {known.min()} and {known.max()}" if len(known) else "none"
            raise TrajectoryNotFoundError(f"trajectory {wanted[positions < 0][0]} is not in the store, which holds {held}")
        return positions

    def _locate(self, wanted: Ints) -> Ints:
        """Positions of ids, -1 for those that are not there."""
        if not self._count:
            return np.full(len(wanted), -1)
        if self._order is None:
            self._order = np.argsort(self.column("id"), kind="stable")
        known = self.column("id")[self._order]
        at = np.minimum(np.searchsorted(known, wanted), self._count - 1)
        return np.where(known[at] == wanted, self._order[at], -1)

    def select(self, positions: Any, *, epoch: int) -> Selection:
        """Copies rows out; `positions` is int64[n] or a slice."""
        rows = self._rows[: self._count][positions]
        columns = {name: rows[:, number].copy() for name, number in _COLUMN.items()}
        places = Places(**{name: columns[name] for name in Places.__dataclass_fields__})
        return Selection(columns["id"], columns["segment"], columns["schema"], places, tuple(self.schemas), epoch)

    def info(self, position: int) -> TrajectoryInfo:
        row = dict(zip(COLUMNS, self._rows[position].tolist(), strict=True))
        field = reference_field(self.schemas[row["schema"]])
        return TrajectoryInfo(
            trajectory_id=row["id"],
            uuid=_join_uuid(row["uuid_high"], row["uuid_low"]),
            shape=(row["num_steps"] + field.extra_rows, row["num_envs"], *field.row_shape),
            max_episode_length=row["max_episode_length"],
            model_weights_id=self.weights[row["weights"]],
            model_update_count=row["model_update_count"],
        )

    def recover(self, info: SegmentInfo, *, segment: int) -> None:
        """Adds what a segment holds and the table does not; a commit that failed late was made twice."""
        known = set(self.column("id").tolist())
        new = [entry for entry in info.entries if entry.trajectory_id not in known]
        self.extend(new, segment=segment, schema=info.schema)

    def append(self, header: Header, schema: Schema) -> int:
        """Adds a trajectory that is in memory; returns its id."""
        entry = Entry(self.next_id, header, 0, 0, 0, {})
        self.extend([entry], segment=PENDING, schema=schema)
        return entry.trajectory_id

    def extend(self, entries: Iterable[Entry], *, segment: int, schema: Schema) -> None:
        """Adds trajectories of a segment, or of memory, as the newest."""
        schema_number = self._number(schema, self.schemas)
        for entry in entries:
            header = entry.header
            weights = self._number(header.model_weights_id, self.weights)
            self._append_row(
                (
                    *(entry.trajectory_id, *_split_uuid(header.uuid), segment, schema_number, weights),
                    *(header.num_steps, header.num_envs, entry.row_start, entry.env_start, entry.frame_start),
                    *(header.num_frames, header.max_episode_length, header.model_update_count),
                )
            )
            self.next_id = max(self.next_id, entry.trajectory_id + 1)
        self._order = None

    def place(self, entries: Sequence[Entry], *, segment: int) -> int:
        """Says where trajectories lie now; those no longer in the table are passed over. Returns how many those are."""
        rows = self._locate(np.array([entry.trajectory_id for entry in entries]))
        for row, entry in zip(rows.tolist(), entries, strict=True):
            if row >= 0:
                self._rows[row, _PLACE] = (segment, entry.row_start, entry.env_start, entry.frame_start)
        return int(np.count_nonzero(rows < 0))

    def remove(self, positions: Ints) -> None:
        """Takes rows out."""
        keep = np.ones(self._count, np.bool_)
        keep[positions] = False
        self._rows = self._rows[: self._count][keep]
        self._count = len(self._rows)
        self._order = None

    def _append_row(self, row: tuple[int, ...]) -> None:
        if self._count == len(self._rows):
            grown = np.empty((max(16, 2 * self._count), len(COLUMNS)), np.int64)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count] = row
        self._count += 1

    def _number(self, value: Any, known: list[Any]) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(known)
            known.append(value)
        return number

    def renames(self, before: "Index") -> bool:
        """Whether an id means another trajectory than it did `before`, as after the contents were replaced."""
        _, now, then = np.intersect1d(self.column("id"), before.column("id"), return_indices=True)
        return any((self.column(name)[now] != before.column(name)[then]).any() for name in ("uuid_high", "uuid_low"))

    def committed_rows(self) -> Array:
        """A copy of the rows that lie in segments, int64[n, columns]."""
        rows: Array = self._rows[: self._count][self.column("segment") != PENDING]
        return rows

    def committed(self, *, next_segment: int) -> "Index":
        """A copy without the trajectories in memory."""
        return Index.from_rows(
            self.committed_rows(), schemas=self.schemas, weights=self.weights, next_id=self.next_id, next_segment=next_segment
        )

    @classmethod
    def from_rows(cls, rows: Array, *, schemas: Sequence[Schema], weights: Sequence[str], next_id: int, next_segment: int) -> "Index":
        """An index of the given rows, int64[n, columns]."""
        index = cls()
        index._rows, index._count = rows, len(rows)
        index.schemas, index.weights = list(schemas), list(weights)
        index.next_id, index.next_segment = next_id, next_segment
        index._numbers.update({schema: number for number, schema in enumerate(schemas)})
        index._numbers.update({name: number for number, name in enumerate(weights)})
        return index


def publish(storage: Storage, index: Index, *, generation: int) -> None:
    """Writes the committed part of an index as a generation and makes it the current one; the one before is deleted."""
    rows = index.committed_rows()
    schemas, rows[:, _COLUMN["schema"]] = np.unique(rows[:, _COLUMN["schema"]], return_inverse=True)
    weights, rows[:, _COLUMN["weights"]] = np.unique(rows[:, _COLUMN["weights"]], return_inverse=True)
    table, shard = encode_arrays({"table": Rows([np.ascontiguousarray(rows.T)])})["table"]
    attributes = {
        "columns": COLUMNS,
        "schemas": [index.schemas[number].to_json() for number in schemas],
        "weights": [index.weights[number] for number in weights],
        "next_id": index.next_id,
        "next_segment": index.next_segment,
        "table": table.to_json(),
    }
    write_array(storage, f"{INDEX}/{generation}", array=table, shard=shard, attributes={"trajstore": attributes})
    storage.replace(f"{INDEX}/zarr.json", group_document({"generation": generation}))
    with contextlib.suppress(OSError):  # what stays is removed by the next writer
        storage.delete(f"{INDEX}/{generation - 1}")


def read_generation(storage: Storage) -> int:
    """The number of the current generation; `FileNotFoundError` if there is no index."""
    key = f"{INDEX}/zarr.json"
    value = parse_document(storage.read(key), where=f"{storage.location}: {key}")
    if not isinstance(value, dict) or not isinstance(value.get("generation"), int):
        raise CorruptionError(f"{storage.location}: {key} names no generation")
    return int(value["generation"])


def read_index(storage: Storage) -> tuple[Index, int]:
    """The current index and its generation; reads again when a writer publishes meanwhile."""
    while True:
        generation = read_generation(storage)
        try:
            return _read(storage, generation), generation
        except FileNotFoundError:
            if read_generation(storage) == generation:
                raise CorruptionError(f"{storage.location}: index generation {generation} is not there") from None


def _read(storage: Storage, generation: int) -> Index:
    where = f"{INDEX}/{generation}"
    value = parse_document(storage.read(f"{where}/zarr.json"), where=f"{storage.location}: {where}")
    try:
        table = StoredArray.from_json("table", value["table"])
        shard = storage.read(f"{where}/{table.shard_key}") if table.bytes else b""
        columns = dict(zip(value["columns"], decode_array(table, shard), strict=True))
        rows = np.stack([columns[name] for name in COLUMNS], axis=1)
        schemas = [Schema.from_json(schema) for schema in value["schemas"]]
        index = Index.from_rows(
            rows, schemas=schemas, weights=value["weights"], next_id=value["next_id"], next_segment=value["next_segment"]
        )
    except (KeyError, TypeError, ValueError, MemoryError) as error:
        raise CorruptionError(f"{storage.location}: {where} does not parse: {error!r}") from error
    _check_rows(index, where=f"{storage.location}: {where}")
    return index


def _check_rows(index: Index, *, where: str) -> None:
    """Refuses rows that would point outside their tables."""
    for name, limit in (("schema", len(index.schemas)), ("weights", len(index.weights)), ("id", index.next_id)):
        column = index.column(name)
        if len(column) and (column.min() < 0 or column.max() >= limit):
            raise CorruptionError(f"{where}: column {name!r} holds values outside [0, {limit})")
    if len(np.unique(index.column("id"))) != len(index):
        raise CorruptionError(f"{where}: a trajectory id stands twice")
    if len(index) and min(index.column("num_steps").min(), index.column("num_envs").min()) < 1:
        raise CorruptionError(f"{where}: a trajectory has no samples")


def _split_uuid(uuid: str) -> tuple[int, int]:
    high, low = np.frombuffer(uuids.UUID(uuid).bytes, ">i8").tolist()
    return high, low


def _join_uuid(high: int, low: int) -> str:
    return np.array([high, low], ">i8").tobytes().hex()
