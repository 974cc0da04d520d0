"""The threads that encode, decode and wait for disks. Codecs release the GIL, so two threads are twice as fast."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_pools: dict[str, ThreadPoolExecutor] = {}
"""By what they do. The threads of all but `decode`, for which a caller waits, leave cores to others first."""
_FILE_THREADS = 8
_NICENESS = 5


def num_threads() -> int:
    """Threads that work on one batch: the environment variable `TRAJSTORE_THREADS`, else the cores this process may use."""
    setting = os.environ.get("TRAJSTORE_THREADS", "")
    if setting.isdigit() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel_map(function: Callable[[In], Out], items: Sequence[In], *, pool: Literal["decode", "encode"] = "decode") -> list[Out]:
    """`[function(item) for item in items]` by as many threads as there are cores.

    The calling thread and the pool's take items in turn. All have stopped when it returns or raises; the first error of an
    item is raised. Thread-safe.
    """
    return _map(pool, num_threads(), function, items)


def parallel_wait(function: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
    """The same for functions that mostly wait, as for a disk to sync: by more threads than there are cores."""
    return _map("files", _FILE_THREADS, function, items)


def _map(pool: str, size: int, function: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
    results: dict[int, Out] = {}
    turns = iter(enumerate(items))  # its next() is atomic

    def take_turns() -> None:
        for number, item in turns:
            results[number] = function(item)

    futures = []
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: the pool takes no more work
        for _ in range(min(size, len(items)) - 1):
            futures.append(_pool(pool, size - 1).submit(take_turns))  # noqa: PERF401
    try:
        take_turns()
    finally:
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()
    return [results[number] for number in range(len(items))]


def start_ahead(function: Callable[[In], Out], item: In) -> "Future[Out] | None":
    """Begins `function(item)` on a thread of its own; None when the interpreter is shutting down and takes no more work."""
    with contextlib.suppress(RuntimeError):
        return _pool("ahead", 1).submit(function, item)
    return None


def _pool(name: str, size: int) -> ThreadPoolExecutor:
    if name not in _pools:
        initializer = None if name == "decode" else step_back
        _pools[name] = ThreadPoolExecutor(size, thread_name_prefix=f"trajstore-{name}", initializer=initializer)
    return _pools[name]


def step_back() -> None:
    """Lets other threads have the cores before the calling one, which works in the background. Linux only; it can't be undone.

    The measure is the main thread, since a thread begins with the niceness of the one that starts it, which may have stepped back.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where it is forbidden, work goes on as it is
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS)


def stop_threads() -> None:
    """Ends the threads; they start again when there is work."""
    while _pools:
        _pools.popitem()[1].shutdown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a forked child has the executors but not their threads
