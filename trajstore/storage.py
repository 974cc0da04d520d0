"""The one seam to bytes kept elsewhere, and the simplest thing behind it: a dictionary.

Two verbs write: `write` stores an object that nothing refers to yet; `replace` swaps one atomically, and only once
everything written before it is durable. The commit protocol of FORMAT.md rests on nothing else.
"""

import builtins
import errno
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from trajstore.mapping import Bytes


class ByteRange(NamedTuple):
    """`length` bytes of the object `key` from `offset` on."""

    key: str
    offset: int
    length: int


class Storage(Protocol):
    """What a store needs from the place it is kept in. Thread-safe. Keys are paths with `/`.

    Missing objects raise `FileNotFoundError`; refused operations raise `StorageError`.
    """

    location: str
    """What to call the place in messages."""

    def read(self, key: str) -> bytes:
        """A whole object."""

    def size(self, key: str) -> int:
        """Bytes of an object."""

    def fetch(self, ranges: Sequence[ByteRange]) -> builtins.list[Bytes]:
        """Many ranges at once; one that passes the object's end comes back shorter."""

    def view(self, key: str) -> Bytes | None:
        """A whole object as memory where that costs nothing, else None: then `fetch` what is needed."""

    def list(self, prefix: str) -> list[str]:
        """Names of the objects and folders directly below a prefix, in no order; none where there is nothing."""

    def write(self, key: str, *parts: bytes) -> None:
        """Stores an object that no other refers to yet; its bytes come in one part or several."""

    def replace(self, key: str, data: bytes) -> None:
        """Stores an object atomically and durably, after all earlier writes and links are durable."""

    def link(self, key: str, source: "Storage", source_key: str) -> None:
        """Stores another storage's object, which never changes, as a hard link or copy."""

    def delete(self, prefix: str) -> None:
        """Removes an object, or all below a prefix; nothing happens where there is none."""

    def lock(self) -> None:
        """Becomes the only writer; `LockedError` names the other one. Without effect where there are no locks."""

    def unlock(self) -> None:
        """Stops being the writer."""

    def after_fork(self) -> None:
        """In a forked child: no lock of this object is held by a thread that is not there."""

    def forget(self) -> None:
        """Drops what is kept of objects, since others have their names now."""


class NoLock:
    """What storages have in common that have no locks and keep nothing of their objects."""

    def lock(self) -> None:
        pass

    def unlock(self) -> None:
        pass

    def after_fork(self) -> None:
        pass

    def forget(self) -> None:
        pass


class MemoryStorage(NoLock):
    """A dictionary: what a replay buffer that does not save itself is kept in, and a stand-in for a disk in tests."""

    def __init__(self, location: str = "memory") -> None:
        self.location = location
        self.objects: dict[str, bytes] = {}

    def read(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, f"no object {key!r} in {self.location}") from None

    def size(self, key: str) -> int:
        return len(self.read(key))

    def fetch(self, ranges: Sequence[ByteRange]) -> builtins.list[Bytes]:
        return [self.view(key)[offset : offset + length] for key, offset, length in ranges]

    def view(self, key: str) -> Bytes:
        return np.frombuffer(self.read(key), np.uint8)

    def list(self, prefix: str) -> list[str]:
        start = f"{prefix}/" if prefix else ""
        return list({key[len(start) :].split("/", 1)[0] for key in list(self.objects) if key.startswith(start)})

    def write(self, key: str, *parts: bytes) -> None:
        self.objects[key] = b"".join(parts)

    replace = write

    def link(self, key: str, source: Storage, source_key: str) -> None:
        self.write(key, source.read(source_key))

    def delete(self, prefix: str) -> None:
        for key in [key for key in list(self.objects) if key == prefix or key.startswith(f"{prefix}/")]:
            self.objects.pop(key, None)
