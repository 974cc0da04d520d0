"""One pair of rivals in this process: ingest, open, sample, checkpoint, cold reads, always in turns."""

import gc
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.episodes import make_source
from benchmarks.files import drop_page_cache, tree_bytes
from benchmarks.requests import AnswerFile, Request
from benchmarks.rivals import OURS, Checkpoints, Mode, Reader, Rival, find_rival
from benchmarks.specs import WorkloadSpec
from benchmarks.timing import Rounds, take_turns, timed
from benchmarks.workloads import TrajectoryData, trajectories

KEEP_BYTES = 1 << 30
"""Data up to this size is made before the clock runs; beyond it, between calls of add, so that memory stays bounded."""
COLD_ROWS = 256


@dataclass(frozen=True, slots=True)
class Entrant:
    """A rival in one mode."""

    rival: Rival
    mode: Mode

    @property
    def label(self) -> tuple[str, str]:
        """(rival, mode) as measurements name them."""
        return self.rival.name, self.mode.value


def entrants(rivals: Iterable[Rival]) -> list[Entrant]:
    """Cached modes first, ours before the rival, so that like follows like."""
    pairs = list(rivals)
    return [Entrant(rival, mode) for mode in Mode for rival in pairs if mode in rival.modes]


class Pair:
    """The stages of a pair; each adds to the answer."""

    def __init__(self, request: Request, answer: AnswerFile) -> None:
        self._spec, self._budget, self._answer = request.spec, request.budget, answer
        self._root, self._drop_caches = Path(request.root), request.drop_caches
        self._lift = Path(request.lift) if request.lift else None
        self._rivals = self._present(find_rival(request.rival))
        self._entrants = entrants(self._rivals)

    def _present(self, rival: Rival) -> list[Rival]:
        candidates = [OURS, rival] if rival.name != OURS.name else [OURS]
        return [candidate for candidate in candidates if candidate.unavailable() is None]

    def run(self) -> None:
        """All stages; one that fails is named, and the next is tried."""
        stages: list[tuple[str, Callable[[], None]]] = [
            ("ingest", self.ingest),
            ("sample", self.sample),
            ("checkpoint", self.checkpoint),
            ("cold", self.cold),
        ]
        for name, stage in stages:
            try:
                stage()
            except Exception as error:  # noqa: BLE001  a rival's failure is a result
                self._answer.skip(self._rivals[-1].name, f"{name} failed: {type(error).__name__}: {error}")
            self._answer.save()

    def folder(self, rival: Rival) -> Path:
        """Where the rival's data lies, another's where it reads that."""
        return self._root / (rival.store_of or rival.name)

    def ingest(self) -> None:
        """Adds the whole workload, repeatedly; the last repetition's data stays."""
        source = make_source(self._spec, self._lift)
        writers = [rival for rival in self._rivals if rival.store_of is None]
        times: dict[str, list[tuple[float, float]]] = {rival.name: [] for rival in writers}
        kept = list(trajectories(self._spec, source)) if self._spec.raw_bytes <= KEEP_BYTES else None
        for _ in Rounds(self._budget):
            for rival in writers:
                folder = fresh_folder(self.folder(rival))
                batches = kept if kept is not None else trajectories(self._spec, source)
                times[rival.name].append(ingest_once(rival, folder, self._spec, batches))
        note = "" if kept is not None else "data made between calls of add, time not counted"
        for rival in writers:
            acknowledged, durable = zip(*times[rival.name], strict=True)
            self._answer.add(rival.name, "", "ingest_acknowledged", list(acknowledged), note=note)
            self._answer.add(rival.name, "", "ingest_durable", list(durable), note=note)
            self._answer.add(rival.name, "", "disk_bytes", [tree_bytes(self.folder(rival))], unit="bytes")

    def sample(self) -> None:
        """Opens every entrant, then samples in turns at each batch size."""
        readers: dict[tuple[str, str], Reader] = {}
        try:
            for entrant in self._entrants:
                self._answer.add(*entrant.label, "open", self._open_times(entrant))
                readers[entrant.label] = self._open(entrant)
            for rows in self._batch_sizes():
                calls = {label: sampling_call(reader, rows) for label, reader in readers.items()}
                for label, seconds in take_turns(calls, self._budget).items():
                    self._answer.add(*label, f"sample_{rows}", seconds, note=self._clamp_note(rows))
                self._answer.save()
        finally:
            for reader in readers.values():
                reader.close()

    def _batch_sizes(self) -> list[int]:
        """Batch sizes to measure; of those that are clamped to the same number of rows, the first."""
        return list({self._spec.batch_bytes(rows): rows for rows in reversed(self._budget.batch_sizes)}.values())[::-1]

    def _open(self, entrant: Entrant) -> Reader:
        return entrant.rival.reader(self.folder(entrant.rival), self._spec, entrant.mode)

    def _timed_open(self, entrant: Entrant) -> tuple[Reader, float]:
        opened: list[Reader] = []
        elapsed = timed(lambda: opened.append(self._open(entrant)))
        return opened[0], elapsed

    def _open_times(self, entrant: Entrant) -> list[float]:
        seconds = []
        for _ in Rounds(self._budget):
            reader, elapsed = self._timed_open(entrant)
            seconds.append(elapsed)
            reader.close()
        return seconds

    def _clamp_note(self, rows: int) -> str:
        rows_given = self._spec.batch_bytes(rows) // self._spec.row_bytes
        return "" if rows_given == rows else f"clamped to the window's {rows_given} rows"

    def checkpoint(self) -> None:
        """Saves and loads where both are offered, in the first mode that has them."""
        saved: dict[str, list[float]] = {}
        loaded: dict[str, list[float]] = {}
        for _ in Rounds(self._budget):
            for entrant in {entrant.rival.name: entrant for entrant in reversed(self._entrants)}.values():
                reader = self._open(entrant)
                try:
                    if isinstance(reader, Checkpoints):
                        path = fresh_folder(self._root / f"{entrant.rival.name}-checkpoint")
                        save, load = partial(reader.save_checkpoint, path), partial(reader.load_checkpoint, path)
                        saved.setdefault(entrant.rival.name, []).append(timed(save))
                        loaded.setdefault(entrant.rival.name, []).append(timed(load))
                finally:
                    reader.close()
        for name, seconds in saved.items():
            shutil.rmtree(self._root / f"{name}-checkpoint")
            self._answer.add(name, "", "checkpoint_save", seconds)
            self._answer.add(name, "", "checkpoint_load", loaded[name])

    def cold(self) -> None:
        """Opens and takes one batch after the folder was dropped from the page cache."""
        opens: dict[tuple[str, str], list[float]] = {}
        firsts: dict[tuple[str, str], list[float]] = {}
        notes: dict[tuple[str, str], str] = {}
        for _ in Rounds(self._budget):
            for entrant in [entrant for entrant in self._entrants if entrant.mode is Mode.UNCACHED]:
                opening, first, note = self._cold_once(entrant)
                opens.setdefault(entrant.label, []).append(opening)
                firsts.setdefault(entrant.label, []).append(first)
                notes[entrant.label] = note
        for label, seconds in opens.items():
            self._answer.add(*label, "cold_open", seconds, note=notes[label])
            self._answer.add(*label, f"cold_sample_{COLD_ROWS}", firsts[label], note=notes[label])

    def _cold_once(self, entrant: Entrant) -> tuple[float, float, str]:
        """Seconds of opening and of the first batch, and how cold they were."""
        gc.collect()  # a map that still lives keeps its pages
        outcome = drop_page_cache(self.folder(entrant.rival), whole_system=self._drop_caches)
        reader, opening = self._timed_open(entrant)
        first = timed(sampling_call(reader, COLD_ROWS))
        reader.close()
        resident = "unknown" if outcome.resident_fraction is None else f"{outcome.resident_fraction:.0%}"
        return opening, first, f"page cache dropped by {outcome.method}, {resident} still resident"


def sampling_call(reader: Reader, rows: int) -> Callable[[], object]:
    """A call that draws one batch."""
    return partial(reader.sample, rows)


def fresh_folder(folder: Path) -> Path:
    """The folder, empty."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def ingest_once(rival: Rival, folder: Path, spec: WorkloadSpec, batches: Iterable[list[TrajectoryData]]) -> tuple[float, float]:
    """Writes all batches into an empty folder.

    Returns:
        Seconds until the last was acknowledged, and until all were durable; making the data doesn't count.
    """
    writer = rival.writer(folder, spec)
    acknowledged = sum(timed(partial(writer.add, batch)) for batch in batches)
    durable = acknowledged + timed(writer.commit)
    writer.close()
    return acknowledged, durable
