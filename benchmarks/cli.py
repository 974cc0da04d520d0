"""The command: `python -m benchmarks`."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.episodes import has_recordings
from benchmarks.machine import available_cores
from benchmarks.plots import save_plots
from benchmarks.report import report
from benchmarks.results import Results, replace_text, to_json
from benchmarks.rivals import Rival, select_rivals
from benchmarks.run import PACKAGE_ROOT, Plan, Runner
from benchmarks.specs import QUICK_WORKLOADS, SPECS

EPILOG = "Example: python -m benchmarks --workloads A,B --output results"
DEFAULT_LIFT = PACKAGE_ROOT.parent / "shared" / "data" / "lift"

DEFAULT_OUTPUT = Path("benchmark-results")

app = typer.Typer(add_completion=False)


@app.command(epilog=EPILOG)
def bench(
    workloads: Annotated[str, typer.Option(help="Letters, comma-separated; default: all, or A,B when quick.")] = "",
    rivals: Annotated[str, typer.Option(help="Names, comma-separated; default: all.")] = "",
    output: Annotated[Path, typer.Option(help="Folder of results.json, report.md and plots.")] = DEFAULT_OUTPUT,
    quick: Annotated[bool, typer.Option("--quick", help="Small data and few samples: ends in a minute.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="Cores to use; 0: all.")] = 0,
    lift: Annotated[Path | None, typer.Option(help="Folder of recorded Lift trajectories for images.")] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Where data is written while it is measured.")] = None,
    drop_caches: Annotated[
        bool, typer.Option("--drop-caches", help="For cold reads, drop the whole system's page cache (root only).")
    ] = False,
) -> None:
    """Measures trajstore beside its rivals: ingest, size, sampling warm and cold, memory, checkpoints."""
    names = _workloads(workloads)
    plan = Plan(
        workloads=names or (QUICK_WORKLOADS if quick else tuple(SPECS)),
        rivals=_rivals(rivals),
        quick=quick,
        threads=threads or available_cores(),
        lift=_lift(lift),
        work_dir=work_dir,
        drop_caches=drop_caches,
    )
    for folder in (output, *([work_dir] if work_dir else [])):
        folder.mkdir(parents=True, exist_ok=True)
    run_plan(plan, output)


def run_plan(plan: Plan, output: Path) -> None:
    """Runs the plan; what was measured is saved after each pair. A plain kill leaves no data behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results: Results | None = None
    for results in Runner(plan, tell=typer.echo).run():
        replace_text(output / "results.json", to_json(results))
    if results is None or not results.measurements:
        typer.echo("nothing was measured", err=True)
        raise typer.Exit(1)
    page = report(results)
    replace_text(output / "report.md", page)
    pictures = save_plots(results, output)
    typer.echo(page)
    typer.echo(f"written to {output}: results.json, report.md, {', '.join(path.name for path in pictures)}")


def _workloads(asked: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip().upper() for name in asked.split(",") if name.strip()))
    unknown = [name for name in names if name not in SPECS]
    if unknown:
        message = f"no workload {', '.join(unknown)}; there are {', '.join(SPECS)}"
        raise typer.BadParameter(message, param_hint="--workloads")
    return names


def _rivals(asked: str) -> tuple[Rival, ...]:
    try:
        return tuple(select_rivals(asked))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rivals") from error


def _lift(asked: Path | None) -> Path | None:
    """The folder asked for, else the default one where it is there."""
    if asked is not None and not has_recordings(asked):
        raise typer.BadParameter(f"{asked} holds no recorded trajectories", param_hint="--lift")
    found = asked or (DEFAULT_LIFT if has_recordings(DEFAULT_LIFT) else None)
    return found.resolve() if found else None
