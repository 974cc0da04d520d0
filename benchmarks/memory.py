"""Memory of this process, from `/proc`: the kernel's own high-water mark, and the part that no file backs."""

import contextlib
import threading
from pathlib import Path
from types import TracebackType

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
INTERVAL_S = 0.002


def status_bytes(key: str) -> int:
    """A size out of `/proc/self/status`, such as `VmHWM`; 0 where there is none."""
    if not STATUS.exists():
        return 0
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """Watches this process while the block runs.

    Attributes:
        resident: Peak resident bytes, mapped files included.
        anonymous: Peak resident bytes that no file backs, seen every 2 ms.
    """

    def __enter__(self) -> "PeakMemory":
        self.anonymous = status_bytes("RssAnon")
        self._stop = threading.Event()
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")  # starts the high-water mark anew
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.resident = status_bytes("VmHWM")

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.anonymous = max(self.anonymous, status_bytes("RssAnon"))
