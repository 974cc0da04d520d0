"""The commands: each a thin call of the library, and the only module that prints."""

import argparse
import importlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trajstore.checkpoint import METADATA, read_entries, read_state
from trajstore.demo import make_trajectory
from trajstore.errors import StoreExistsError, StoreNotFoundError, TrajStoreError
from trajstore.layout import Field
from trajstore.packing import prepare
from trajstore.replay_buffer import TrajectoryReplayBuffer
from trajstore.store import TrajectoryStore
from trajstore.store import open as open_store
from trajstore.trajectory import dtype_name

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Place = Annotated[Path, typer.Argument(help="A store, or a checkpoint of any form.", show_default=False)]
StorePlace = Annotated[Path, typer.Argument(help="A store, or a zarr checkpoint.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(version("trajstore"))
        raise typer.Exit


@app.callback()
def _trajstore(
    _: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Keep trajectories of reinforcement learning and robotics in compressed chunks, and sample from them."""


def _is_files(place: Path) -> bool:
    return (place / METADATA).exists() and not (place / "zarr.json").exists()


@contextmanager
def _opened(place: Path, *, window: int) -> Iterator[TrajectoryStore]:
    """A store for reading; of a pt or pkl directory, the window is loaded into memory."""
    if _is_files(place):
        with TrajectoryReplayBuffer(sample_window_size=window) as buffer:
            buffer.load_checkpoint(place)
            yield buffer.store
    else:
        with open_store(place, mode="r") as store:
            yield store


@app.command(epilog="Example: trajstore info runs/buffer")
def info(place: Place, as_json: AsJson = False) -> None:
    """Show what is in a store or checkpoint: trajectories, fields, sizes."""
    summary = _summary_of_files(place) if _is_files(place) else _summary_of_store(place)
    summary["bytes"] = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
        return
    typer.echo(
        f"{place}: {summary['form']}, {summary['num_trajectories']} trajectories, {summary['num_samples']:,} transitions, "
        f"{_size(summary['bytes'])}, {_size(summary['raw_bytes'])} as tensors"
    )
    if summary["num_trajectories"]:
        typer.echo(f"ids {summary['first_id']} to {summary['last_id']}, T {summary['steps']}, B {summary['envs']}")
    table = Table("field", "dtype", "row shape", "extra rows", box=None, pad_edge=False)
    for field in summary["fields"]:
        table.add_row(field["path"], field["dtype"], str(field["row_shape"]), str(field["extra_rows"] or ""))
    Console().print(table)


def _summary_of_store(place: Path) -> dict[str, Any]:
    with open_store(place, mode="r") as store:
        infos = store.index
        shapes = {trajectory_id: entry.shape for trajectory_id, entry in infos.items()}
        return _summary("store", shapes, list(store.fields.values()))


def _summary_of_files(place: Path) -> dict[str, Any]:
    """Reads the index and the newest file only."""
    form = read_state(place).trajectory_format
    entries = read_entries(place, form) if form != "zarr" else []
    shapes = {entry.trajectory_id: tuple(entry.info["shape"]) for entry in entries}
    fields = prepare(entries[-1].load()).pack().schema.fields if entries else ()
    return _summary(f"{form} files", shapes, fields)


def _summary(form: str, shapes: Mapping[int, tuple[int, ...]], fields: Sequence[Field]) -> dict[str, Any]:
    num_samples = sum(shape[0] * shape[1] for shape in shapes.values())
    row_bytes = sum(torch.empty(field.row_shape, dtype=getattr(torch, field.dtype)).nbytes for field in fields)
    return {
        "form": form,
        "num_trajectories": len(shapes),
        "num_samples": num_samples,
        "raw_bytes": row_bytes * num_samples,
        "first_id": min(shapes, default=None),
        "last_id": max(shapes, default=None),
        "steps": _range({shape[0] for shape in shapes.values()}),
        "envs": _range({shape[1] for shape in shapes.values()}),
        "fields": [
            {"path": field.path, "dtype": field.dtype, "row_shape": list(field.row_shape), "extra_rows": field.extra_rows}
            for field in fields
        ],
    }


def _range(values: set[int]) -> str:
    if not values:
        return "none"
    return str(min(values)) if len(values) == 1 else f"{min(values)} to {max(values)}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


@app.command(epilog="Example: trajstore sample runs/buffer --num 256 --window 100 --fields actions --fields curr_obs")
def sample(
    place: Place,
    num: Annotated[int, typer.Option(help="Transitions to draw.", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 1234,
    window: Annotated[int, typer.Option(help="Draw from the newest N trajectories; 0: all.", min=0)] = 0,
    fields: Annotated[list[str] | None, typer.Option(help="A field or parent of fields; may be repeated.")] = None,
    cache_size: Annotated[int, typer.Option(help="Trajectories to keep decoded.", min=0)] = 0,
    repeat: Annotated[int, typer.Option(help="Batches to draw; the median time is shown.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Draw a batch, and show its fields and how long it took."""
    with _opened(place, window=window) as store:
        sampler = store.sampler(window=window, seed=seed, cache_size=cache_size)
        times_s = []
        for _ in range(repeat):
            start = time.perf_counter()
            batch = sampler.sample(num, fields=fields or None)
            times_s.append(time.perf_counter() - start)
    leaves = dict(_leaves(batch))
    time_s = sorted(times_s)[len(times_s) // 2]
    if as_json:
        described = {path: {"dtype": dtype_name(t.dtype), "shape": list(t.shape)} for path, t in leaves.items()}
        typer.echo(json.dumps({"fields": described, "seconds": time_s}, indent=2))
        return
    _print_batch(leaves)
    nbytes = sum(tensor.nbytes for tensor in leaves.values())
    typer.echo(f"{_size(nbytes)} in {time_s * 1e3:.1f} ms ({_size(nbytes / time_s)}/s)")


def _leaves(batch: dict[str, Any], parent: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in batch.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{parent}{key}/")
        else:
            yield f"{parent}{key}", value


def _print_batch(leaves: dict[str, torch.Tensor]) -> None:
    width = max(map(len, leaves))
    for path, tensor in leaves.items():
        typer.echo(f"{path:{width}}  {dtype_name(tensor.dtype):10} {list(tensor.shape)}")


@app.command(epilog="Example: trajstore verify runs/buffer --quick")
def verify(
    place: StorePlace, quick: Annotated[bool, typer.Option(help="Compare sizes and indexes only.")] = False, as_json: AsJson = False
) -> None:
    """Compare a store with its checksums; exit code 1 if something is not as it was written."""
    with open_store(place, mode="r") as store:
        faults = store.verify(quick=quick)
        if as_json:
            typer.echo(json.dumps([asdict(fault) for fault in faults], indent=2))
        else:
            for fault in faults:
                typer.echo(fault.message)
            typer.echo(f"{place}: {len(store)} trajectories, {len(faults)} faults")
    if faults:
        raise typer.Exit(1)


@app.command(epilog="Example: trajstore compact runs/buffer")
def compact(place: StorePlace) -> None:
    """Join small segments of a store, and drop what was deleted from the others."""
    with open_store(place, mode="r+") as store:
        before = store.bytes_on_disk
        replaced = store.compact()
        typer.echo(f"{place}: {replaced} segments replaced, {_size(before)} before, {_size(store.bytes_on_disk)} now")


@app.command(epilog="Example: trajstore demo /tmp/demo")
def demo(
    folder: Annotated[Path, typer.Argument(help="Where to put it; absent or empty.", show_default=False)],
    trajectories: Annotated[int, typer.Option(help="How many trajectories.", min=1)] = 6,
    steps: Annotated[int, typer.Option(help="Steps of each, T.", min=1)] = 64,
    envs: Annotated[int, typer.Option(help="Environments of each, B.", min=1)] = 2,
) -> None:
    """Make trajectories of a small scene with two cameras, store, sample and export them."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreExistsError(f"{folder} is not an empty folder; choose another")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        made = [
            make_trajectory(seed=s, num_steps=steps, num_envs=envs) for s in progress.track(range(trajectories), description="rendering")
        ]
    raw_bytes = sum(tensor.nbytes for trajectory in made for _, tensor in _leaves(vars(trajectory)) if isinstance(tensor, torch.Tensor))
    typer.echo(f"made      {trajectories} trajectories [{steps}, {envs}], {_size(raw_bytes)} as tensors")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=folder / "buffer", sample_window_size=0) as buffer:
        start = time.perf_counter()
        buffer.add_trajectories(made)
        added_s = time.perf_counter() - start
        buffer.flush()
        stored_s, stored = time.perf_counter() - start, buffer.store.bytes_on_disk
        typer.echo(f"added     in {added_s * 1e3:.0f} ms; durable after {stored_s * 1e3:.0f} ms ({_size(raw_bytes / stored_s)}/s)")
        typer.echo(f"stored    {_size(stored)} at {folder / 'buffer'}: {raw_bytes / stored:.1f} times smaller")
        for name, cache_size in (("cached", trajectories), ("chunks", 0)):
            sampler = buffer.store.sampler(cache_size=cache_size)
            sampler.sample(256)
            start = time.perf_counter()
            batch = sampler.sample(256)
            time_s = time.perf_counter() - start
            nbytes = sum(tensor.nbytes for _, tensor in _leaves(batch))
            typer.echo(f"sampled   {len(batch['rewards'])} transitions from {name}: {time_s * 1e3:.1f} ms ({_size(nbytes / time_s)}/s)")
        start = time.perf_counter()
        buffer.save_checkpoint(folder / "pt")
        typer.echo(f"exported  {folder / 'pt'}, which RLinf loads, in {time.perf_counter() - start:.2f} s")
    typer.echo(f"now try   trajstore info {folder / 'buffer'}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    epilog="Example: trajstore bench --quick --output results",
)
def bench(context: typer.Context) -> None:
    """Measure the library beside its rivals; in a source checkout only. `trajstore bench --help` shows the options."""
    if not Path("benchmarks", "cli.py").is_file():
        raise StoreNotFoundError("the benchmarks are part of the source checkout: run `trajstore bench` in its folder")
    sys.path.insert(0, str(Path.cwd()))
    importlib.import_module("benchmarks.cli").app(args=context.args, prog_name="trajstore bench")


def sample_checkpoint(arguments: list[str] | None = None) -> None:
    """`python -m trajstore.replay_buffer`: loads a checkpoint, samples once, prints keys, shapes and dtypes."""
    parser = argparse.ArgumentParser(
        prog="python -m trajstore.replay_buffer",
        description="Load a replay buffer's checkpoint, sample once, and print every key with its shape and dtype.",
        epilog="Example: python -m trajstore.replay_buffer --load-path runs/ckpt --num-chunks 1024 --cache-size 10 --enable-cache",
    )
    parser.add_argument("--load-path", required=True, help="checkpoint directory (pt, pkl or zarr), or a store")
    parser.add_argument("--num-chunks", type=int, default=4, help="transitions to draw")
    parser.add_argument("--sample-window-size", type=int, default=10, help="draw from the newest N trajectories; 0: all")
    parser.add_argument("--cache-size", type=int, default=5, help="trajectories to keep decoded")
    parser.add_argument("--enable-cache", action="store_true", help="keep the newest trajectories decoded")
    given = parser.parse_args(arguments)
    with _reported():
        buffer = TrajectoryReplayBuffer(
            enable_cache=given.enable_cache, cache_size=given.cache_size, sample_window_size=given.sample_window_size
        )
        buffer.load_checkpoint(given.load_path)
        _print_batch(dict(_leaves(buffer.sample(given.num_chunks))))


@contextmanager
def _reported() -> Iterator[None]:
    """An error that the library raises on purpose is one line and exit code 1."""
    try:
        yield
    except TrajStoreError as error:
        typer.echo(f"trajstore: {error}", err=True)
        sys.exit(1)


def main() -> None:
    """Runs the command line."""
    logging.basicConfig(format="trajstore: %(message)s", level=logging.WARNING)
    with _reported():
        app()
