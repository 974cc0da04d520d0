"""What one measuring process is asked for, and what it answers; both are JSON files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.results import Measurement, Skip, parse_measurements, replace_text
from benchmarks.specs import SPECS, WorkloadSpec, quick_spec
from benchmarks.timing import FULL, QUICK, Budget

Task = Literal["pair", "memory", "threads", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One measuring process.

    Attributes:
        task: `"pair"` ingests and samples ours and the rival in turns; `"memory"` opens and samples one of them;
            `"threads"` and `"workers"` time sampling alone and through a DataLoader.
        workload: Letter.
        rival: Who is measured, or compared.
        mode: For memory and scaling.
        quick: Small data, little time.
        root: Folder of the data; `pair` fills it, the others read it.
        lift: Folder of recorded trajectories, or empty.
        threads: Cores that the process may use; for `"threads"` and `"workers"`, what is varied.
        drop_caches: For cold reads, drop the page cache of the whole system.
    """

    task: Task
    workload: str
    rival: str
    mode: str = ""
    quick: bool
    root: str
    lift: str = ""
    threads: int
    drop_caches: bool = False

    @property
    def spec(self) -> WorkloadSpec:
        """The workload, small where `quick`."""
        return quick_spec(SPECS[self.workload]) if self.quick else SPECS[self.workload]

    @property
    def budget(self) -> Budget:
        """How long to measure."""
        return QUICK if self.quick else FULL

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a measuring process found, as far as it came."""

    measurements: tuple[Measurement, ...] = ()
    skips: tuple[Skip, ...] = ()


class AnswerFile:
    """Collects an answer and writes it after every stage, so that a process that dies late has answered in part."""

    def __init__(self, path: Path, request: Request) -> None:
        self._path, self._request = path, request
        self._measurements: list[Measurement] = []
        self._skips: list[Skip] = []
        self.save()

    def add(self, rival: str, mode: str, metric: str, samples: list[float], *, unit: str = "s", note: str = "") -> None:
        """Keeps one measurement of this process's pair."""
        self._measurements.append(
            Measurement(
                workload=self._request.workload,
                pair=self._request.rival,
                rival=rival,
                mode=mode,
                metric=metric,
                unit=unit,
                samples=tuple(samples),
                note=note,
            )
        )

    def skip(self, rival: str, reason: str) -> None:
        """Keeps why something is missing."""
        self._skips.append(Skip(workload=self._request.workload, rival=rival, reason=reason))

    def save(self) -> None:
        """Writes what there is."""
        document: dict[str, Any] = {
            "measurements": [asdict(measurement) for measurement in self._measurements],
            "skips": [asdict(skip) for skip in self._skips],
        }
        replace_text(self._path, json.dumps(document))


def read_answer(path: Path) -> Answer:
    """The last answer that was written; empty if there is none."""
    if not path.exists():
        return Answer()
    document = json.loads(path.read_text())
    return Answer(parse_measurements(document["measurements"]), tuple(Skip(**entry) for entry in document["skips"]))
