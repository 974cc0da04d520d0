"""Taking turns: everyone is called a little, again and again, so that noise falls on all alike."""

import gc
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long to measure.

    Attributes:
        batch_sizes: Rows of a batch.
        sampling_s: Seconds of sampling for one participant and batch size.
        turn_s: Seconds of one turn; a call that has begun is finished.
        turn_calls: Calls of one turn at most.
        max_calls: Calls of one participant and batch size at most.
        rounds: Repetitions of ingest, open, checkpoints and cold reads at most.
        rounds_s: No further repetition is begun after so many seconds.
        timeout_s: Longest life of one process.
    """

    batch_sizes: tuple[int, ...]
    sampling_s: float
    turn_s: float = 0.02
    turn_calls: int = 20
    max_calls: int = 600
    rounds: int
    rounds_s: float
    timeout_s: float


FULL = Budget(batch_sizes=(256, 4096), sampling_s=4.0, rounds=3, rounds_s=30.0, timeout_s=3600.0)
QUICK = Budget(batch_sizes=(256, 4096), sampling_s=0.1, max_calls=100, rounds=1, rounds_s=1.0, timeout_s=50.0)


def take_turns(calls: Mapping[Key, Callable[[], object]], budget: Budget) -> dict[Key, list[float]]:
    """Times each call many times, in turns.

    One call of each goes ahead to warm up; it is not counted, for the first call of some is far slower than the rest.

    Returns:
        Seconds of each call, in order.
    """
    for call in calls.values():
        timed(call)
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    active = list(calls)
    gc.collect()
    gc.disable()
    try:
        while active:
            for key in active:
                samples[key] += _turn(calls[key], budget)
            active = [k for k in active if sum(samples[k]) < budget.sampling_s and len(samples[k]) < budget.max_calls]
    finally:
        gc.enable()
    return samples


def _turn(call: Callable[[], object], budget: Budget) -> list[float]:
    seconds: list[float] = []
    while not seconds or (sum(seconds) < budget.turn_s and len(seconds) < budget.turn_calls):
        seconds.append(timed(call))
    return seconds


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call; its result is freed after the clock was read."""
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


class Rounds:
    """Counts repetitions: yields 0, 1, ... until their number or their time is used up, at least once."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __iter__(self) -> "Rounds":
        self._done, self._start = 0, time.perf_counter()
        return self

    def __next__(self) -> int:
        late = time.perf_counter() - self._start > self._budget.rounds_s
        if self._done and (late or self._done >= self._budget.rounds):
            raise StopIteration
        self._done += 1
        return self._done - 1
