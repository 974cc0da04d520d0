"""Finds rows in a trajstore store with zarr and json alone, by `trajstore/FORMAT.md`.

For those who read the same arrays with another library.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.episodes import Array

COLUMNS = ("segment", "num_steps", "num_envs", "row_start", "env_start", "frame_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRead:
    """Rows of one array that fields of a batch come from.

    Attributes:
        array: Path of the array's folder.
        rows: int64[n], stored rows, distinct and ascending.
        targets: (field path, int64[m] places in the batch, int64[m] places in `rows`) of each field that it serves.
    """

    array: Path
    rows: Array
    targets: tuple[tuple[str, Array, Array], ...]


class StoreRows:
    """The table of a store's trajectories, and where each row of a batch lies."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._table, self._fields = _read_table(store)
        self._ends = np.cumsum(self._table["num_steps"] * self._table["num_envs"])
        self._frames = {int(number): _read_frames(store, int(number)) for number in np.unique(self._table["segment"])}

    @property
    def num_samples(self) -> int:
        """Transitions in all."""
        return int(self._ends[-1])

    def row_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Field path -> shape of a row and stored dtype."""
        import zarr

        segment = int(self._table["segment"][0])
        found = {}
        for field in self._fields[segment]:
            array: Any = zarr.open_array(self._folder(segment) / field["array"], mode="r")
            found[field["path"]] = (tuple(array.shape[1:]), array.dtype)
        return found

    def arrays(self) -> Iterator[Path]:
        """Every array that holds rows or frames of fields."""
        for segment, fields in self._fields.items():
            for name in sorted({field["array"] for field in fields}):
                yield self._folder(segment) / name

    def plan(self, samples: Array) -> list[ArrayRead]:
        """The reads that give the transitions `samples`, int64[n]; sample `j` of a trajectory is `t * B + b`."""
        which = np.searchsorted(self._ends, samples, side="right")
        place = {name: column[which] for name, column in self._table.items()}
        local = samples - (self._ends[which] - place["num_steps"] * place["num_envs"])
        place["step"], place["env"] = np.divmod(local, place["num_envs"])
        reads: list[ArrayRead] = []
        for segment in np.unique(place["segment"]):
            draws = np.flatnonzero(place["segment"] == segment)
            reads += self._plan_segment(int(segment), draws, {name: column[draws] for name, column in place.items()})
        return reads

    def _plan_segment(self, segment: int, draws: Array, place: dict[str, Array]) -> list[ArrayRead]:
        wanted: dict[str, list[tuple[str, Array]]] = {}
        for field in self._fields[segment]:
            rows = _field_rows(field, place, self._frames[segment])
            wanted.setdefault(field["array"], []).append((field["path"], rows))
        reads = []
        for name, users in wanted.items():
            rows, inverse = np.unique(np.concatenate([rows for _, rows in users]), return_inverse=True)
            shares = np.split(inverse, len(users))
            targets = tuple((path, draws, share) for (path, _), share in zip(users, shares, strict=True))
            reads.append(ArrayRead(array=self._folder(segment) / name, rows=rows, targets=targets))
        return reads

    def _folder(self, segment: int) -> Path:
        return self._store / "segments" / str(segment)


def _field_rows(field: dict[str, Any], place: dict[str, Array], frames: Array | None) -> Array:
    """Stored rows of one field for steps and environments of trajectories of one segment."""
    steps, num_steps, extra = place["step"], place["num_steps"], int(field["extra_rows"])
    if field["frame"] is not None:
        if frames is None:
            raise ValueError(f"field {field['path']!r} is in the frame pool of a segment without curr_frame")
        rows = place["row_start"] + place["env"] * num_steps + steps
        found: Array = frames[rows] + place["frame_start"] + int(field["frame"])
        return found
    if extra and field["extra_first"]:
        steps = steps + steps // (num_steps // extra) + 1
    stored: Array = place["row_start"] + extra * place["env_start"] + place["env"] * (num_steps + extra) + steps
    return stored


def _attributes(group: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((group / "zarr.json").read_text())["attributes"]["trajstore"]
    return found


def _read_table(store: Path) -> tuple[dict[str, Array], dict[int, list[dict[str, Any]]]]:
    """Columns of the live trajectories, and the fields of each segment."""
    import zarr

    generation = store / "index" / str(_attributes(store / "index")["generation"])
    head = _attributes(generation)
    array: Any = zarr.open_array(generation, mode="r")
    listed = dict(zip(head["columns"], array[:], strict=True))
    table = {name: [np.asarray(listed[name], np.int64)] for name in COLUMNS}
    schemas = dict(zip(listed["segment"].tolist(), listed["schema"].tolist(), strict=True))
    fields = {number: _fields(head["schemas"][schema]) for number, schema in schemas.items()}
    for number in _unlisted_segments(store, first=head["next_segment"], known=set(fields)):
        segment = _attributes(store / "segments" / str(number))
        fields[number] = _fields(segment["fields"])
        entries = [{**entry, "segment": number} for entry in segment["trajectories"]]
        for name in COLUMNS:
            table[name].append(np.array([entry[name] for entry in entries], np.int64))
    return {name: np.concatenate(parts) for name, parts in table.items()}, fields


def _fields(schema: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = schema["fields"] if isinstance(schema, dict) else schema
    return found


def _unlisted_segments(store: Path, *, first: int, known: set[int]) -> list[int]:
    """Committed segments that the index doesn't know yet."""
    numbers = [int(folder.name) for folder in (store / "segments").iterdir() if folder.name.isdigit()]
    fresh = [number for number in sorted(numbers) if number >= first and number not in known]
    committed = [number for number in fresh if (store / "segments" / str(number) / "zarr.json").exists()]
    return [number for number in committed if _attributes(store / "segments" / str(number))["recover"]]


def _read_frames(store: Path, segment: int) -> Array | None:
    """int64[rows] `curr_frame` of a segment, or None where nothing is pooled."""
    import zarr

    folder = store / "segments" / str(segment) / "curr_frame"
    if not folder.exists():
        return None
    array: Any = zarr.open_array(folder, mode="r")
    found: Array = np.asarray(array[:], np.int64)
    return found
