"""Segments that no index lists yet: how many trajectories appear at once, or not at all. Links, loads and compaction are this."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from trajstore.errors import CorruptionError
from trajstore.index import PENDING, Selection
from trajstore.layout import Ints, Schema
from trajstore.packing import Packed
from trajstore.sampler import MAX_ATTEMPTS
from trajstore.segment import Entry, delete_segment, encode_segment, link_segment, write_segment
from trajstore.storage import Storage
from trajstore.view import StoreView


class StagedRow(NamedTuple):
    """A trajectory in a staged segment."""

    entry: Entry
    segment: int
    schema: Schema


@dataclass
class Staging:
    """Writes and links segments that only count once an index lists their rows.

    Attributes:
        storage: Where to.
        take_number: Gives the next segment number.
        segment_bytes: Raw bytes that are written as one segment.
    """

    storage: Storage
    take_number: Callable[[], int]
    segment_bytes: int

    def __post_init__(self) -> None:
        self.rows: list[StagedRow] = []
        self.numbers: list[int] = []
        self._order: list[int] = []
        self._waiting: defaultdict[Schema, list[tuple[int, Packed]]] = defaultdict(list)
        self._waiting_bytes = 0

    def add(self, trajectory_id: int, packed: Packed) -> None:
        """Takes a trajectory; it is written with others of its schema."""
        self._order.append(trajectory_id)
        self._waiting[packed.schema].append((trajectory_id, packed))
        self._waiting_bytes += packed.nbytes
        if self._waiting_bytes > self.segment_bytes:
            self.write()

    def write(self) -> None:
        """Writes what was added, a segment a schema."""
        for trajectories in self._waiting.values():
            number = self._number()
            info = write_segment(self.storage, number, encode_segment(trajectories, recover=False))
            self._note(number, info.entries, info.schema)
        self._waiting.clear()
        self._waiting_bytes = 0

    def link_all(self, source: StoreView, new_ids: Mapping[int, int]) -> None:
        """Takes trajectories of another store, given their old and new ids."""
        source.flush()
        self._order += new_ids.values()
        left = dict(new_ids)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            version = source.version
            try:
                self._link_some(source, left)
                return
            except FileNotFoundError as error:  # segments were moved; those linked already are not linked again
                if not source.moved(version) or attempt == MAX_ATTEMPTS:
                    raise CorruptionError(f"{source.storage.location}: an object of the store is gone: {error}") from error

    def _link_some(self, source: StoreView, left: dict[int, int]) -> None:
        """Links segments, and takes what they hold out of `left`."""
        selection = source.select(list(left))
        by_segment: dict[int, list[int]] = defaultdict(list)
        for trajectory_id, number in zip(selection.ids.tolist(), selection.segments.tolist(), strict=True):
            by_segment[number].append(trajectory_id)
        for number, ids in by_segment.items():
            segment = source.segment(number)
            entries = [replace(segment.entry(old), trajectory_id=left[old]) for old in ids]
            own_number = self._number()
            link_segment(self.storage, own_number, source=segment, entries=entries)
            self._note(own_number, entries, segment.info.schema)
            for old in ids:
                del left[old]

    def ordered_rows(self) -> list[StagedRow]:
        """All rows, in the order in which their trajectories were given."""
        by_id = {row.entry.trajectory_id: row for row in self.rows}
        return [by_id[trajectory_id] for trajectory_id in self._order]

    def abandon(self) -> None:
        """Removes all that was written."""
        for number in self.numbers:
            delete_segment(self.storage, number)

    def _number(self) -> int:
        self.numbers.append(self.take_number())
        return self.numbers[-1]

    def _note(self, number: int, entries: Sequence[Entry], schema: Schema) -> None:
        self.rows += [StagedRow(entry, number, schema) for entry in entries]


def worth_compacting(view: StoreView, selection: Selection, *, segment_bytes: int) -> Ints:
    """Rows of a selection of all trajectories that compaction rewrites, int64[n].

    These are the trajectories of segments that are mostly dead, and of small ones where several have the same schema.
    """
    small: dict[Schema, list[int]] = defaultdict(list)
    chosen = []
    for number in np.unique(selection.segments[selection.segments != PENDING]).tolist():
        info = view.segment(number).info
        live = int(np.count_nonzero(selection.segments == number))
        if live * 2 < len(info.entries):
            chosen.append(number)
        elif info.raw_bytes * 2 < segment_bytes:
            small[info.schema].append(number)
    chosen += [number for numbers in small.values() if len(numbers) > 1 for number in numbers]
    return np.flatnonzero(np.isin(selection.segments, chosen))
