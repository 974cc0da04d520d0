"""Results as a page of markdown: who is how fast, and which bars are met."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.bars import Verdict, judge
from benchmarks.results import Measurement, Results
from benchmarks.rivals import OURS

NOTHING = "-"


def format_seconds(seconds: float) -> str:
    """`37 us`, `1.2 ms`, `3.4 s`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def format_bytes(count: float) -> str:
    """`76 MB`: decimal units, as disks are sold."""
    for factor, unit in ((1e3, "B"), (1e6, "kB"), (1e9, "MB")):
        if count < factor:
            return f"{_digits(count / (factor / 1e3))} {unit}"
    return f"{_digits(count / 1e9)} GB"


def _digits(value: float) -> str:
    """Three digits that count, no exponent."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def format_measurement(measurement: Measurement | None) -> str:
    """Median, and the tenth to ninetieth percentile where there are enough samples."""
    if measurement is None:
        return NOTHING
    show = format_bytes if measurement.unit == "bytes" else format_seconds
    spread = measurement.spread
    if len(measurement.samples) < 5:
        return show(spread.median)
    return f"{show(spread.median)} ({show(spread.p10)} to {show(spread.p90)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table, the columns after the first aligned right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def report(results: Results) -> str:
    """The whole page."""
    parts = ["# Benchmark", describe(results)]
    for name, workload in results.workloads.items():
        if not results.series(name):
            continue
        parts.append(f"## {name}: {workload['title']}")
        parts.append(describe_workload(workload))
        parts += [sampling_table(results, name), storage_table(results, name)]
    parts += ["## Scaling", scaling_table(results)] if _scaled(results) else []
    parts += ["## Bars", bars_table(judge(results)), "## Skipped", skips_table(results)]
    return "\n\n".join(parts) + "\n"


def describe_workload(workload: dict[str, Any]) -> str:
    """Sizes and source of the data in a sentence."""
    raw, batch = format_bytes(workload["raw_bytes"]), format_bytes(workload["batch_256_bytes"])
    return (
        f"{workload['num_samples']:,} transitions, {raw} as tensors, a batch of 256 is {batch}; data"
        f" {workload['data']}; cache {workload['cache']:,}, window {workload['window']:,} trajectories."
    )


def describe(results: Results) -> str:
    """Machine and versions in a paragraph."""
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    memory = format_bytes(machine["memory_bytes"]) if machine["memory_bytes"] else "unknown"
    quick = " A quick run: small data, few samples, numbers for a look only." if results.settings["quick"] else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {results.settings['threads']} used, {memory} memory,"
        f" {machine['system']}, Python {machine['python']}; {packages}.{quick}\n\n"
        "Medians, with the 10th to the 90th percentile. Ratios are theirs divided by ours, both taken in turns in one"
        " process."
    )


def sampling_table(results: Results, workload: str) -> str:
    """One row a rival and mode: warm batches, cold batches, opening, memory."""
    head = (
        "",
        "sample(256)",
        "ours faster by",
        "sample(4096)",
        "ours faster by",
        "open",
        "cold open",
        "cold sample(256)",
        "peak memory",
        "of it anonymous",
    )
    rows = []
    for rival, mode in results.series(workload):
        find = _finder(results, workload, rival, mode)
        rows.append(
            [
                f"{_bold(rival)} {mode}",
                *(format_measurement(find("sample_256")), _ratio(results, workload, rival, mode, "sample_256")),
                *(format_measurement(find("sample_4096")), _ratio(results, workload, rival, mode, "sample_4096")),
                *(format_measurement(find(metric)) for metric in ("open", "cold_open", "cold_sample_256", "peak_rss", "peak_anonymous")),
            ]
        )
    return table(head, rows) + _notes(results, workload, ("sample_4096", "cold_sample_256"))


def storage_table(results: Results, workload: str) -> str:
    """One row a rival: ingest, bytes, checkpoints."""
    head = ("", "on disk", "ingest, acknowledged", "ingest, durable", "checkpoint save", "checkpoint load")
    metrics = ("disk_bytes", "ingest_acknowledged", "ingest_durable", "checkpoint_save", "checkpoint_load")
    rows = []
    for rival in dict.fromkeys(rival for rival, _ in results.series(workload)):
        find = _finder(results, workload, rival, "")
        if rival.startswith("floor-") or all(find(metric) is None for metric in metrics):
            continue
        rows.append([_bold(rival), *(format_measurement(find(metric)) for metric in metrics)])
    return table(head, rows) + _notes(results, workload, ("ingest_durable",))


def _finder(results: Results, workload: str, rival: str, mode: str) -> Callable[[str], Measurement | None]:
    return lambda metric: results.find(workload, rival, mode, metric)


def _ratio(results: Results, workload: str, rival: str, mode: str, metric: str) -> str:
    """Theirs by ours in the same mode and pair."""
    ours = results.median(workload, OURS.name, mode, metric, rival)
    theirs = results.median(workload, rival, mode, metric, rival)
    return f"{_digits(theirs / ours)} x" if ours and theirs and rival != OURS.name else NOTHING


def _bold(rival: str) -> str:
    return f"**{rival}**" if rival == OURS.name else rival


def _notes(results: Results, workload: str, metrics: Sequence[str]) -> str:
    """What the measurements of these metrics note, once each."""
    noted = [m for m in results.measurements if m.workload == workload and m.metric in metrics and m.note]
    notes: dict[str, list[str]] = {}
    for m in noted:
        notes.setdefault(f"{m.metric}: {m.note}", []).append(f"{m.rival}")
    lines = [f"- {note} ({', '.join(dict.fromkeys(rivals))})" for note, rivals in notes.items()]
    return "\n\n" + "\n".join(lines) if lines else ""


def _scaled(results: Results) -> list[Measurement]:
    return [m for m in results.measurements if m.metric.startswith(("threads_", "workers_"))]


def scaling_table(results: Results) -> str:
    """Batches a second by threads and by DataLoader workers, and the gain over one."""
    medians: dict[tuple[str, str, str], dict[int, float]] = {}
    for m in _scaled(results):
        kind, count, *_ = m.metric.split("_")
        joined = results.median(m.workload, m.rival, m.mode, m.metric)
        medians.setdefault((m.workload, f"{m.rival} {m.mode}", kind), {})[int(count)] = joined or 0.0
    rows = [
        [f"{workload} {label}", kind, str(count), format_seconds(seconds), f"{by_count[1] / seconds:.2f} x"]
        for (workload, label, kind), by_count in medians.items()
        for count, seconds in sorted(by_count.items())
        if seconds and 1 in by_count
    ]
    return table(("", "what", "count", "seconds a batch of 256", "gain"), rows)


def bars_table(verdicts: Iterable[Verdict]) -> str:
    """Met or not met, with the ratio."""
    rows = []
    for verdict in verdicts:
        bar, ratio = verdict.bar, verdict.ratio
        found = NOTHING if ratio is None else f"{ratio:.2f}"
        rows.append([bar.workload, bar.what, f"{bar.at_least:.2f}", found, verdict.outcome])
    return table(("", "what", "ratio wanted", "ratio found", ""), rows)


def skips_table(results: Results) -> str:
    """Who is missing and why; workload `*` means all."""
    if not results.skips:
        return "Nobody."
    return table(("workload", "rival", "why"), [(s.workload, s.rival, s.reason) for s in results.skips])
