"""Whether sampling scales: one and two threads on a batch, one and two DataLoader workers on a stream of batches."""

import time
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DataLoader, IterableDataset

from benchmarks.requests import AnswerFile, Request
from benchmarks.rivals import Batch, Mode, Reader, Rival, find_rival
from benchmarks.specs import WorkloadSpec
from benchmarks.timing import Budget, take_turns

ROWS = 256
WORKER_BATCHES = 16


class SampledBatches(IterableDataset[Batch]):
    """Endless batches; every worker opens the folder for itself."""

    def __init__(self, rival: Rival, root: Path, spec: WorkloadSpec, mode: Mode) -> None:
        self._rival, self._root, self._spec, self._mode = rival, root, spec, mode

    def __iter__(self) -> Iterator[Batch]:
        """Batches of `ROWS` transitions; workers may draw the same ones, only their speed is of interest."""
        reader: Reader = self._rival.reader(self._root, self._spec, self._mode)
        while True:
            yield reader.sample(ROWS)


def worker_seconds(loader: "DataLoader[Batch]", *, num_batches: int, num_blocks: int) -> list[float]:
    """Seconds a batch, one figure for each block of batches; the first block warms up and is not counted."""
    batches = iter(loader)
    seconds = []
    for _ in range(num_blocks + 1):
        start = time.perf_counter()
        for _ in range(num_batches):
            next(batches)
        seconds.append((time.perf_counter() - start) / num_batches)
    del batches
    return seconds[1:]


def measure_scaling(request: Request, answer: AnswerFile) -> None:
    """Times the rival with the request's number of threads, or of workers that use one thread each."""
    rival, mode, root = find_rival(request.rival), Mode(request.mode), Path(request.root)
    metric = f"{request.task}_{request.threads}_sample_{ROWS}"
    if request.task == "threads":
        reader = rival.reader(root, request.spec, mode)
        budget: Budget = request.budget
        seconds = take_turns({metric: lambda: reader.sample(ROWS)}, budget)[metric]
        reader.close()
    else:
        dataset = SampledBatches(rival, root, request.spec, mode)
        loader: DataLoader[Batch] = DataLoader(dataset, batch_size=None, num_workers=request.threads, prefetch_factor=2)
        num_batches = 4 if request.quick else WORKER_BATCHES
        seconds = worker_seconds(loader, num_batches=num_batches, num_blocks=2 if request.quick else 8)
    answer.add(rival.name, mode, metric, seconds)
    answer.save()
