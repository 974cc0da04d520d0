"""Threads in the background step back, and only so far."""

import os
import sys
import threading

import pytest

from trajstore.threads import step_back


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
def test_a_thread_started_by_one_that_stepped_back_is_as_nice_as_that() -> None:
    found: list[int] = []

    def work(depth: int) -> None:
        step_back()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if depth:
            inner = threading.Thread(target=work, args=(depth - 1,))
            inner.start()
            inner.join()

    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    outer = threading.Thread(target=work, args=(2,))
    outer.start()
    outer.join()
    assert found == [min(own + 5, 19)] * 3
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == own


def test_where_it_is_forbidden_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse, raising=False)
    step_back()
