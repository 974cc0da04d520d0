"""Results as PNG files: sampling times, bytes on disk, scaling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import format_bytes, format_seconds
from benchmarks.results import Results
from benchmarks.rivals import OURS

OURS_COLOR, RIVAL_COLOR, FLOOR_COLOR = "#d1495b", "#6c8ebf", "#b0b0b0"
BAR_INCHES = 0.34


def save_plots(results: Results, folder: Path) -> list[Path]:
    """Draws whatever was measured; returns the files."""
    saved = []
    for workload in results.workloads:
        saved += [_sampling(results, workload, folder), _disk(results, workload, folder)]
    saved.append(_scaling(results, folder))
    return [path for path in saved if path is not None]


def _color(rival: str) -> str:
    if rival == OURS.name:
        return OURS_COLOR
    return FLOOR_COLOR if rival.startswith("floor-") else RIVAL_COLOR


def _figure(*, num_bars: int, num_panels: int = 1) -> tuple[Any, Sequence[Any]]:
    """A figure without a screen, tall enough for its bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * num_panels, 1.3 + BAR_INCHES * max(num_bars, 2)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, num_panels, panel + 1) for panel in range(num_panels)]
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


def _bars(axis: Any, labels: Sequence[str], values: Sequence[float], *, colors: Sequence[str], texts: Sequence[str]) -> None:
    """Horizontal bars, the first on top, each with its value written behind it."""
    places = range(len(labels))
    axis.barh(places, values, color=colors, height=0.72)
    axis.set_yticks(list(places), labels)
    axis.invert_yaxis()
    for place, value, text in zip(places, values, texts, strict=True):
        axis.annotate(text, (value, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _sampling(results: Results, workload: str, folder: Path) -> Path | None:
    """One panel a batch size, sorted by time, whiskers from the 10th to the 90th percentile."""
    metrics = [metric for metric in ("sample_256", "sample_4096") if _timed(results, workload, metric)]
    if not metrics:
        return None
    figure, axes = _figure(num_bars=len(results.series(workload)), num_panels=len(metrics))
    for axis, metric in zip(axes, metrics, strict=True):
        entries = sorted(_timed(results, workload, metric), key=lambda entry: entry[1].median)
        values = [spread.median for _, spread in entries]
        labels = [f"{rival} {mode}" for (rival, mode), _ in entries]
        colors = [_color(rival) for (rival, _), _ in entries]
        axis.set_xscale("log")
        _bars(axis, labels, values, colors=colors, texts=["" for _ in values])
        for place, (_, spread) in enumerate(entries):
            axis.plot([spread.p10, spread.p90], [place, place], color="black", linewidth=1.2)
            text_at = max(spread.p90, spread.median)
            axis.annotate(
                format_seconds(spread.median),
                (text_at, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axis.set_xlim(min(values) / 3, max(spread.p90 for _, spread in entries) * 6)
        axis.xaxis.set_major_formatter(lambda seconds, _: _short(seconds))
        axis.set_xlabel("time of a batch, log scale")
        axis.set_title(f"sample({metric.removeprefix('sample_')})", fontsize=10)
    figure.suptitle(f"{workload}: {results.workloads[workload]['title']}", fontsize=11)
    return _save(figure, folder / f"sample_{workload}.png")


def _short(seconds: float) -> str:
    """A power of ten as `10 ms`."""
    factor, unit = (1e6, "us") if seconds < 0.99e-3 else (1e3, "ms") if seconds < 0.99 else (1.0, "s")
    return f"{seconds * factor:g} {unit}"


def _timed(results: Results, workload: str, metric: str) -> list[Any]:
    """((rival, mode), spread) of everyone who has the metric."""
    found = [(label, results.find(workload, *label, metric)) for label in results.series(workload)]
    return [(label, measurement.spread) for label, measurement in found if measurement]


def _disk(results: Results, workload: str, folder: Path) -> Path | None:
    """Bytes on disk, the smallest first."""
    rivals = dict.fromkeys(rival for rival, _ in results.series(workload) if not rival.startswith("floor-"))
    found = {rival: results.median(workload, rival, "", "disk_bytes") for rival in rivals}
    entries = sorted(((size, rival) for rival, size in found.items() if size), key=lambda entry: entry[0])
    if not entries:
        return None
    figure, (axis,) = _figure(num_bars=len(entries))
    values = [size / 1e6 for size, _ in entries]
    texts = [format_bytes(size) for size, _ in entries]
    _bars(axis, [rival for _, rival in entries], values, colors=[_color(rival) for _, rival in entries], texts=texts)
    axis.set_xlim(0, max(values) * 1.2)
    axis.set_xlabel("MB on disk")
    axis.set_title(f"{workload}: {results.workloads[workload]['title']}", fontsize=10)
    return _save(figure, folder / f"disk_{workload}.png")


def _scaling(results: Results, folder: Path) -> Path | None:
    """Batches a second by threads and by DataLoader workers."""
    medians: dict[str, float] = {}
    for m in results.measurements:
        if m.metric.startswith(("threads_", "workers_")):
            kind, count, *_ = m.metric.split("_")
            median = results.median(m.workload, m.rival, m.mode, m.metric)
            medians[f"{count} {kind if count != '1' else kind[:-1]}"] = 1 / median if median else 0.0
    if not medians:
        return None
    entries = sorted(medians.items(), key=lambda entry: (entry[0].split()[1], entry[0]))
    figure, (axis,) = _figure(num_bars=len(entries))
    values = [rate for _, rate in entries]
    texts = [f"{rate:.1f}" for rate in values]
    _bars(axis, [label for label, _ in entries], values, colors=[OURS_COLOR] * len(values), texts=texts)
    axis.set_xlim(0, max(values) * 1.2)
    axis.set_xlabel("batches of 256 a second, uncached")
    axis.set_title(f"{OURS.name}: threads, and DataLoader workers of one thread", fontsize=10)
    return _save(figure, folder / "scaling.png")
