"""Are the bytes of a store those that were written?"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trajstore.arrays import StoredArray, decode_array
from trajstore.errors import CorruptionError
from trajstore.segment import Segment
from trajstore.view import StoreView


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as it was written.

    Attributes:
        segment: The segment's number.
        array: Name of the array; "": the segment's own document.
        trajectory_ids: Live trajectories that are hit.
        message: What is wrong.
    """

    segment: int
    array: str
    trajectory_ids: tuple[int, ...]
    message: str


def find_faults(view: StoreView, *, quick: bool = False) -> Iterator[Fault]:
    """Checks every segment that holds live trajectories.

    Args:
        view: The store.
        quick: Sizes and shard indexes only; else each byte, by the checksums of files and chunks.
    """
    selection = view.newest(0)
    for number in np.unique(selection.segments[selection.segments >= 0]).tolist():
        ids = tuple(selection.ids[selection.segments == number].tolist())
        try:
            segment = view.segment(number)
        except (FileNotFoundError, CorruptionError) as error:
            yield Fault(number, "", ids, str(error))
            continue
        for array in segment.info.arrays.values():
            message = _fault(segment, array, quick=quick)
            if message:
                yield Fault(number, array.name, ids, message)


def _fault(segment: Segment, array: StoredArray, *, quick: bool) -> str:
    try:
        segment.chunk_table([array.name])
        if not quick and array.bytes:
            segment.checked(lambda: decode_array(array, segment.storage.read(segment.shard_key(array.name))), array.name)
    except (FileNotFoundError, CorruptionError) as error:
        return str(error)
    return ""
