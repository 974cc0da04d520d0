"""The one pool of threads that encode and decode chunks. Codecs release the GIL, so two threads are twice as fast."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_pools: list[ThreadPoolExecutor] = []
"""The pool, once there is one."""


def num_threads() -> int:
    """Threads that work on one batch: the environment variable `TRAJSTORE_THREADS`, else the cores this process may use."""
    setting = os.environ.get("TRAJSTORE_THREADS", "")
    if setting.isdigit() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel_map(function: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
    """`[function(item) for item in items]`, the calling thread and the pool's taking items in turn. Thread-safe.

    All threads have stopped when it returns or raises; the first error of an item is raised.
    """
    results: dict[int, Out] = {}
    turns = iter(enumerate(items))  # its next() is atomic

    def take_turns() -> None:
        for number, item in turns:
            results[number] = function(item)

    futures = []
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: the pool takes no more work
        for _ in range(min(num_threads(), len(items)) - 1):
            futures.append(_executor().submit(take_turns))  # noqa: PERF401
    try:
        take_turns()
    finally:
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()
    return [results[number] for number in range(len(items))]


def _executor() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(max(1, num_threads() - 1), thread_name_prefix="trajstore-codec"))
    return _pools[0]


def stop_threads() -> None:
    """Ends the pool's threads; they start again when there is work."""
    while _pools:
        _pools.pop().shutdown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a forked child has the executor but not its threads
