"""Plans a run and starts one process after the other; measures nothing itself."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.requests import Answer, Request, read_answer
from benchmarks.results import Results, Skip
from benchmarks.rivals import OURS, Mode, Rival
from benchmarks.specs import SPECS, quick_spec

QUICK_S = 42.0
"""A quick run begins nothing after so many seconds."""
SCALING_WORKLOAD = "A"
PACKAGE_ROOT = Path(__file__).resolve().parent.parent

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run consists of.

    Attributes:
        workloads: Letters.
        rivals: Whom to measure beside ours.
        quick: Small data, little time, an end in a minute.
        threads: Cores that a process may use.
        lift: Folder of recorded trajectories, or None.
        work_dir: Where data is written while it is measured; None: the system's folder for temporary files.
        drop_caches: For cold reads, drop the page cache of the whole system.
    """

    workloads: tuple[str, ...]
    rivals: tuple[Rival, ...]
    quick: bool = False
    threads: int
    lift: Path | None = None
    work_dir: Path | None = None
    drop_caches: bool = False


class Runner:
    """Runs the pairs of a plan."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._plan, self._tell = plan, tell
        self._ours_missing = OURS.unavailable()
        self._started = time.monotonic()
        self._answers: list[Answer] = []
        self._done: set[tuple[str, str]] = set()

    def run(self) -> Iterator[Results]:
        """Yields the results so far after each pair, so that they can be saved."""
        if self._ours_missing:
            self._note("*", OURS.name, self._ours_missing)
        for rival, reason in [(rival, rival.unavailable()) for rival in self._plan.rivals]:
            if reason:
                self._note("*", rival.name, reason)
        for rival, workload in product(self._plan.rivals, self._plan.workloads):
            if self._runs(rival, workload):
                self._pair(rival, workload)
                yield self.results()
        yield self.results()

    def results(self) -> Results:
        """All that was measured so far."""
        plan = self._plan
        return Results(
            machine=describe_machine(),
            settings={"quick": plan.quick, "threads": plan.threads, "rivals": [rival.name for rival in plan.rivals]},
            workloads={name: self._describe(name) for name in plan.workloads},
            measurements=tuple(m for answer in self._answers for m in answer.measurements),
            skips=tuple(s for answer in self._answers for s in answer.skips),
        )

    def _describe(self, name: str) -> dict[str, Any]:
        spec = quick_spec(SPECS[name]) if self._plan.quick else SPECS[name]
        frames = "recorded robosuite Lift" if spec.cameras and self._plan.lift else "made with numpy"
        return {
            "title": spec.title,
            "data": frames,
            "num_samples": spec.num_samples,
            "raw_bytes": spec.raw_bytes,
            "batch_256_bytes": spec.batch_bytes(256),
            "cache": spec.cache,
            "window": spec.window,
        }

    def _runs(self, rival: Rival, workload: str) -> bool:
        """False, and a note where it is news, if the rival can't run the workload."""
        if rival.unavailable():
            return False
        reason = rival.unsuited(SPECS[workload])
        if rival.store_of == OURS.name and self._ours_missing:
            reason = f"reads the store of {OURS.name}: {self._ours_missing}"
        if self._plan.quick and time.monotonic() - self._started > QUICK_S:
            reason = "out of time (quick)"
        if reason:
            self._note(workload, rival.name, reason)
        return not reason

    def _note(self, workload: str, rival: str, reason: str) -> None:
        self._tell(f"{workload} {rival}: skipped, {reason}")
        self._answers.append(Answer(skips=(Skip(workload=workload, rival=rival, reason=reason),)))

    def _pair(self, rival: Rival, workload: str) -> None:
        root = Path(tempfile.mkdtemp(prefix="trajstore-bench-", dir=self._plan.work_dir))
        try:
            request = Request(
                task="pair",
                workload=workload,
                rival=rival.name,
                quick=self._plan.quick,
                root=str(root),
                lift=str(self._plan.lift or ""),
                threads=self._plan.threads,
                drop_caches=self._plan.drop_caches,
            )
            self._ask(request)
            for extra in self._extra_requests(request, rival):
                self._ask(extra)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _extra_requests(self, request: Request, rival: Rival) -> Iterator[Request]:
        """What needs a process of its own, on the data that the pair left."""
        ours = [] if self._ours_missing else [OURS]
        for entrant in [*ours, rival] if not self._plan.quick else []:
            if (request.workload, entrant.name) in self._done:
                continue
            self._done.add((request.workload, entrant.name))
            folder = str(Path(request.root) / (entrant.store_of or entrant.name))
            for mode in entrant.modes:
                yield replace(request, task="memory", rival=entrant.name, mode=mode.value, root=folder)
            if entrant is OURS and request.workload == SCALING_WORKLOAD:
                yield from _scaling_requests(request, folder)

    def _ask(self, request: Request) -> None:
        answer, error = ask(request)
        if error:
            skip = Skip(workload=request.workload, rival=request.rival, reason=f"{request.task} {request.mode} {error}")
            answer = Answer(answer.measurements, (*answer.skips, skip))
        self._answers.append(answer)
        self._tell(_summary(request, answer))


def _scaling_requests(request: Request, folder: str) -> Iterator[Request]:
    for _ in range(2):
        for count in (1, 2):
            scaled = replace(request, rival=OURS.name, mode=Mode.UNCACHED.value, root=folder, threads=count)
            yield replace(scaled, task="threads")
            yield replace(scaled, task="workers")


def _summary(request: Request, answer: Answer) -> str:
    """One line about one process."""
    seconds = [m for m in answer.measurements if "sample_256" in m.metric and "cold" not in m.metric]
    parts = [f"{m.rival} {m.mode} {m.spread.median * 1e3:.3g} ms" for m in seconds]
    parts += [f"{s.rival}: {s.reason}" for s in answer.skips]
    return f"{request.workload} {request.task} {request.rival} {request.mode}: {'; '.join(parts) or 'done'}"


def ask(request: Request) -> tuple[Answer, str]:
    """Runs one measuring process to its end.

    Returns:
        Its answer, as far as it came, and what went wrong, or an empty string.
    """
    with tempfile.TemporaryDirectory(prefix="trajstore-bench-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(request.to_json())
        command = [sys.executable, "-m", "benchmarks.worker", str(asked), str(answered)]
        error = _run(command, environment(request), timeout_s=request.budget.timeout_s)
        return read_answer(answered), error


def _run(command: Sequence[str], variables: dict[str, str], *, timeout_s: float) -> str:
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_s:.0f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"ended with code {done.returncode}: {last}"
    return ""


def environment(request: Request) -> dict[str, str]:
    """The process's variables: where this package lies, and the thread settings of the libraries."""
    threads = "1" if request.task == "workers" else str(request.threads)
    path = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "TRAJSTORE_THREADS": threads, "OMP_NUM_THREADS": threads}
