"""The measuring process: `python -m benchmarks.worker REQUEST ANSWER`. Started by `benchmarks.run`, not by people."""

import os
import sys
from pathlib import Path

from benchmarks.memory import PeakMemory, status_bytes
from benchmarks.requests import AnswerFile, Request
from benchmarks.rivals import Mode, find_rival

MEMORY_BATCHES = 20
MEMORY_ROWS = 256


def limit_threads(request: Request) -> None:
    """Confines the process to as many cores as it may use; where threads are varied, a setting does it instead."""
    import torch

    torch.set_num_threads(request.threads)
    if request.task in ("pair", "memory") and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: request.threads])


def measure_memory(request: Request, answer: AnswerFile) -> None:
    """Opens one rival in one mode and samples, watching this process."""
    rival, spec, mode = find_rival(request.rival), request.spec, Mode(request.mode)
    answer.add(rival.name, mode, "rss_before", [status_bytes("VmRSS")], unit="bytes")
    with PeakMemory() as peak:
        reader = rival.reader(Path(request.root), spec, mode)
        for _ in range(2 if request.quick else MEMORY_BATCHES):
            reader.sample(MEMORY_ROWS)
        reader.close()
    answer.add(rival.name, mode, "peak_rss", [peak.resident], unit="bytes")
    answer.add(rival.name, mode, "peak_anonymous", [peak.anonymous], unit="bytes")
    bound = spec.cache_bytes + spec.batch_bytes(MEMORY_ROWS) + (300 << 20)
    answer.add("bound", mode, "peak_rss", [bound], unit="bytes", note="cache, one batch, and 300 MiB")
    answer.save()


def main(arguments: list[str]) -> None:
    """Reads the request, measures, writes the answer."""
    request = Request.from_json(Path(arguments[0]).read_text())
    answer = AnswerFile(Path(arguments[1]), request)
    limit_threads(request)
    if request.task == "pair":
        from benchmarks.pair import Pair

        Pair(request, answer).run()
    elif request.task == "memory":
        measure_memory(request, answer)
    else:
        from benchmarks.scaling import measure_scaling

        measure_scaling(request, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
