"""What a rival must do to be measured: write a folder, read it back in one or two modes, sample."""

import importlib.util
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from benchmarks.specs import WorkloadSpec
from benchmarks.workloads import TrajectoryData

Batch: TypeAlias = Any
"""What a rival hands to training: a (nested) dict or TensorDict of arrays or tensors [n, ...]."""


class Mode(StrEnum):
    """Where a batch comes from."""

    CACHED = "cached"
    """From RAM: everything, or as many trajectories as the workload's cache holds."""
    UNCACHED = "uncached"
    """From files, the page cache warm. The cold figures are of this mode too."""


class Writer(Protocol):
    """Takes a workload's trajectories into a folder."""

    def add(self, batch: Sequence[TrajectoryData]) -> None:
        """Takes the trajectories; returns when the caller may go on (acknowledged)."""

    def commit(self) -> None:
        """Returns when all of it is on disk and synced (durable)."""

    def close(self) -> None:
        """Frees what is held. Nothing is measured after it."""


class Reader(Protocol):
    """Samples from a folder that a `Writer` left."""

    def sample(self, num_rows: int) -> Batch:
        """A batch of `num_rows` random transitions with every field, in memory of its own."""

    def close(self) -> None:
        """Frees what is held."""


@runtime_checkable
class Checkpoints(Protocol):
    """A `Reader` that also saves and loads checkpoints."""

    def save_checkpoint(self, path: Path) -> None:
        """Writes all that is needed to go on to the empty folder `path`."""

    def load_checkpoint(self, path: Path) -> None:
        """Takes over what `save_checkpoint` wrote."""


class Rival(Protocol):
    """One way to keep and sample trajectories."""

    @property
    def name(self) -> str:
        """What it is asked for by."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes in which it can be opened."""

    @property
    def store_of(self) -> str | None:
        """Name of the rival whose folder it reads; None: it writes its own."""

    def unavailable(self) -> str | None:
        """Why it can't run here, or None."""

    def unsuited(self, spec: WorkloadSpec) -> str | None:
        """Why it can't run this workload, or None."""

    def writer(self, root: Path, spec: WorkloadSpec) -> Writer:
        """Begins to write below the empty folder `root`."""

    def reader(self, root: Path, spec: WorkloadSpec, mode: Mode) -> Reader:
        """Opens what a writer committed."""


class RivalBase:
    """Defaults of a `Rival` that needs some modules and suits every workload."""

    name: str
    modes: tuple[Mode, ...] = (Mode.UNCACHED,)
    store_of: str | None = None
    requires: tuple[str, ...] = ()

    def unavailable(self) -> str | None:
        """Names the modules that are not installed, or None."""
        absent = [module for module in self.requires if importlib.util.find_spec(module) is None]
        return f"{', '.join(absent)} is not installed" if absent else None

    def unsuited(self, spec: WorkloadSpec) -> str | None:
        """None: any workload will do."""
        del spec
        return None
