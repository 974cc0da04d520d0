"""What was measured: every sample is kept, the spread is derived. Reads and writes `results.json`."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Quantiles of some samples, in their unit."""

    median: float
    p10: float
    p90: float
    min: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Samples of one metric.

    Attributes:
        workload: Letter of the workload.
        pair: The rival whose process it was taken in; ratios hold within a pair.
        rival: Who was measured: that rival, or ourselves.
        mode: `"cached"`, `"uncached"`, or empty where that makes no difference.
        metric: Such as `sample_256` or `ingest_durable`.
        unit: `"s"` or `"bytes"`.
        samples: In the order in which they were taken.
        note: What a reader of the number must know.
    """

    workload: str
    pair: str
    rival: str
    mode: str
    metric: str
    unit: str
    samples: tuple[float, ...]
    note: str = ""

    def __post_init__(self) -> None:
        """Refuses a measurement of nothing."""
        if not self.samples:
            raise ValueError(f"{self.workload} {self.rival} {self.metric}: no samples")

    @property
    def spread(self) -> Spread:
        """Quantiles of the samples."""
        p10, median, p90 = np.quantile(self.samples, [0.1, 0.5, 0.9]).tolist()
        return Spread(median=median, p10=p10, p90=p90, min=min(self.samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A rival that was not measured, or not to the end, and why."""

    workload: str
    rival: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run of the benchmark.

    Attributes:
        machine: What it ran on, see `benchmarks.machine`.
        settings: What was asked for.
        workloads: Letter -> title, data source and sizes.
        measurements: All of them.
        skips: Who is missing.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    measurements: tuple[Measurement, ...] = ()
    skips: tuple[Skip, ...] = field(default=())

    def find(self, workload: str, rival: str, mode: str, metric: str, pair: str | None = None) -> Measurement | None:
        """The measurement of that name, the samples of all pairs together unless one is named; None: not taken."""
        key = (workload, rival, mode, metric)
        found = [m for m in self.measurements if (m.workload, m.rival, m.mode, m.metric) == key and pair in (None, m.pair)]
        return _joined(found) if found else None

    def median(self, workload: str, rival: str, mode: str, metric: str, pair: str | None = None) -> float | None:
        """The median of `find`."""
        found = self.find(workload, rival, mode, metric, pair)
        return found.spread.median if found else None

    def series(self, workload: str) -> list[tuple[str, str]]:
        """(rival, mode) of every timed sampler of a workload, in the order of measuring."""
        timed = [m for m in self.measurements if m.workload == workload and m.metric.startswith("sample_")]
        return list(dict.fromkeys((m.rival, m.mode) for m in timed))


def _joined(found: list[Measurement]) -> Measurement:
    first = found[0]
    return Measurement(
        workload=first.workload,
        pair=first.pair if len(found) == 1 else "",
        rival=first.rival,
        mode=first.mode,
        metric=first.metric,
        unit=first.unit,
        samples=tuple(sample for m in found for sample in m.samples),
        note="; ".join(dict.fromkeys(m.note for m in found if m.note)),
    )


def to_json(results: Results) -> str:
    """The results with each measurement's spread beside its samples."""
    document = asdict(results)
    for entry, measurement in zip(document["measurements"], results.measurements, strict=True):
        entry["spread"] = asdict(measurement.spread)
    return json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=1) + "\n"


def from_json(text: str) -> Results:
    """Inverse of `to_json`.

    Raises:
        ValueError: It was written by another version of the harness.
    """
    document = json.loads(text)
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"results have schema version {document.get('schema_version')}, expected {SCHEMA_VERSION}")
    return Results(
        machine=document["machine"],
        settings=document["settings"],
        workloads=document["workloads"],
        measurements=parse_measurements(document["measurements"]),
        skips=tuple(Skip(**entry) for entry in document["skips"]),
    )


def parse_measurements(entries: Iterable[dict[str, Any]]) -> tuple[Measurement, ...]:
    """Measurements from JSON objects; the spread is derived anew."""
    plain = ({key: value for key, value in entry.items() if key != "spread"} for entry in entries)
    return tuple(Measurement(**{**entry, "samples": tuple(entry["samples"])}) for entry in plain)


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or as it was."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.write_text(text)
    scratch.replace(path)
