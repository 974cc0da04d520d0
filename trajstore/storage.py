"""The one seam to bytes kept elsewhere: a local directory, a dictionary, or any Zarr store.

Two verbs write: `write` stores an object that nothing refers to yet; `replace` swaps one atomically, and only once
everything written before it is durable. The commit protocol of FORMAT.md rests on nothing else.
"""

import asyncio
import builtins
import contextlib
import errno
import json
import os
import re
import shutil
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from filelock import FileLock, Timeout
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore

from trajstore.errors import InvalidRequestError, LockedError, NotAStoreError, StorageError
from trajstore.folders import sync_folder
from trajstore.mapping import Bytes, map_file

MAX_MAPS = 4096
"""Files mapped at a time; the kernel's limit is 65,530 a process."""
MAX_PARTS = 1024
"""Parts written by one call: POSIX systems take so many."""
MAX_REQUESTS = 64
"""Byte-range reads in flight at a time, for stores that are not local."""


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


class LocalStorage:
    """A directory. Reads come from memory maps; writes are synced to the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.location = str(root)
        self._maps: OrderedDict[str, Bytes] = OrderedDict()
        self._mutex = threading.Lock()
        self._syncing = threading.Lock()
        self._unsynced: set[Path] = set()
        self._lock: FileLock | None = None

    def __reduce__(self) -> tuple[type["LocalStorage"], tuple[Path]]:
        return LocalStorage, (self.root,)

    def read(self, key: str) -> bytes:
        with self._as_storage_error("read", key):
            return (self.root / key).read_bytes()

    def size(self, key: str) -> int:
        with self._as_storage_error("read", key):
            return (self.root / key).stat().st_size

    def fetch(self, ranges: Sequence[ByteRange]) -> builtins.list[Bytes]:
        return [self.view(key)[offset : offset + length] for key, offset, length in ranges]

    def view(self, key: str) -> Bytes:
        with self._mutex:
            view = self._maps.get(key)
            if view is not None:
                self._maps.move_to_end(key)
                return view
        with self._as_storage_error("read", key), open(self.root / key, "rb") as file:
            view = map_file(file.fileno(), os.fstat(file.fileno()).st_size)
        with self._mutex:
            self._maps[key] = view
            if len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)
        return view

    def list(self, prefix: str) -> list[str]:
        with self._as_storage_error("list", prefix), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self.root / prefix)
        return []

    def write(self, key: str, *parts: bytes) -> None:
        with self._as_storage_error("write", key):
            path = self._prepare(key)
            _write_synced(path, parts)

    def replace(self, key: str, data: bytes) -> None:
        with self._as_storage_error("write", key):
            path = self._prepare(key)
            self._sync_folders()
            temporary = path.with_name(f".{path.name}.tmp")
            _write_synced(temporary, [data])
            temporary.replace(path)
            sync_folder(path.parent)

    def link(self, key: str, source: Storage, source_key: str) -> None:
        if not isinstance(source, LocalStorage):
            self.write(key, source.read(source_key))
            return
        with self._as_storage_error("link", key):
            path = self._prepare(key)
            path.unlink(missing_ok=True)
            try:
                os.link(source.root / source_key, path)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
                self.write(key, source.read(source_key))

    def delete(self, prefix: str) -> None:
        with self._mutex:
            for key in [key for key in self._maps if key == prefix or key.startswith(f"{prefix}/")]:
                del self._maps[key]
        path = self.root / prefix
        with self._as_storage_error("delete", prefix), contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def lock(self) -> None:
        lock = FileLock(self.root / ".lock")
        with self._as_storage_error("lock", ".lock"):
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise LockedError(
                    f"store {self.location}: another writer has it: {self._holder()}; close it, or open with mode='r'"
                ) from None
            self._lock = lock
            holder = {"pid": os.getpid(), "host": socket.gethostname()}
            (self.root / "writer.json").write_text(json.dumps(holder))

    def unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.root / "writer.json").unlink()
            self._lock.release()
            self._lock = None

    def after_fork(self) -> None:
        self._mutex, self._syncing = threading.Lock(), threading.Lock()

    def forget(self) -> None:
        with self._mutex:
            self._maps.clear()

    def _holder(self) -> str:
        try:
            holder = json.loads((self.root / "writer.json").read_bytes())
            return f"process {holder['pid']} on {holder['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "it has not said who it is"

    def _prepare(self, key: str) -> Path:
        """Makes the folders above a key and notes that their entries are not durable yet."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        folders = [path.parent, *path.parent.parents]
        with self._mutex:
            self._unsynced.update(folders[: folders.index(self.root) + 2])
        return path

    def _sync_folders(self) -> None:
        with self._syncing:  # who comes second needs what the first is syncing
            with self._mutex:
                folders, self._unsynced = self._unsynced, set()
            try:
                for folder in sorted(folders):
                    with contextlib.suppress(FileNotFoundError):
                        sync_folder(folder)
            except BaseException:
                with self._mutex:
                    self._unsynced |= folders
                raise

    @contextlib.contextmanager
    def _as_storage_error(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, LockedError):
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError) and verb not in ("write", "lock"):
                raise
            what = f"can't {verb} {key!r} in {self.location}: {error.strerror or error}"
            raise StorageError(error.errno or errno.EIO, what) from error


def _write_synced(path: Path, parts: Sequence[bytes]) -> None:
    with open(path, "wb", buffering=0) as file:
        left = deque(memoryview(part) for part in parts if part)
        while left:
            written = os.writev(file.fileno(), list(islice(left, MAX_PARTS)))
            while left and written >= len(left[0]):
                written -= len(left.popleft())
            if written:
                left[0] = left[0][written:]
        os.fsync(file.fileno())


class MemoryStorage:
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

    def lock(self) -> None:
        pass

    def unlock(self) -> None:
        pass

    def after_fork(self) -> None:
        pass

    def forget(self) -> None:
        pass


class ZarrStorage:
    """Any Zarr store (zip, fsspec, object stores), read by byte ranges, many at a time."""

    def __init__(self, store: Store) -> None:
        self.location = str(store)
        self._store = store
        sync(store._ensure_open())  # zip files open late; zarr-python calls the same before it uses a store
        self._prototype = default_buffer_prototype()

    def read(self, key: str) -> bytes:
        found = sync(self._store.get(key, self._prototype))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, f"no object {key!r} in {self.location}")
        return found.to_bytes()

    def size(self, key: str) -> int:
        return sync(self._store.getsize(key))

    def fetch(self, ranges: Sequence[ByteRange]) -> builtins.list[Bytes]:
        return sync(self._fetch(ranges))

    def view(self, key: str) -> None:  # noqa: ARG002  nothing is here without a read
        return None

    async def _fetch(self, ranges: Sequence[ByteRange]) -> builtins.list[Bytes]:
        turn = asyncio.Semaphore(MAX_REQUESTS)

        async def one(wanted: ByteRange) -> Bytes:
            async with turn:
                byte_range = RangeByteRequest(wanted.offset, wanted.offset + wanted.length)
                found = await self._store.get(wanted.key, self._prototype, byte_range)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, f"no object {wanted.key!r} in {self.location}")
            return np.frombuffer(found.to_bytes(), np.uint8)

        return list(await asyncio.gather(*map(one, ranges)))

    def list(self, prefix: str) -> list[str]:
        return sync(self._list(prefix))

    async def _list(self, prefix: str) -> builtins.list[str]:
        return [name.rstrip("/").rsplit("/", 1)[-1] async for name in self._store.list_dir(prefix)]

    def write(self, key: str, *parts: bytes) -> None:
        sync(self._store.set(key, self._prototype.buffer.from_bytes(b"".join(parts))))

    replace = write

    def link(self, key: str, source: Storage, source_key: str) -> None:
        self.write(key, source.read(source_key))

    def delete(self, prefix: str) -> None:
        if not self._store.supports_deletes:
            raise StorageError(
                errno.EROFS, f"{self.location} can't delete, so a store can only be read there; write to a directory and pack it"
            )
        sync(self._store.delete_dir(prefix))
        sync(self._store.delete(prefix))

    def lock(self) -> None:
        pass

    def unlock(self) -> None:
        pass

    def after_fork(self) -> None:
        pass

    def forget(self) -> None:
        pass


def local_path(place: "str | os.PathLike[str]") -> Path:
    """A path as the user gave it, `~` resolved; `InvalidRequestError` for what would be another place than they meant."""
    given = os.fspath(place)
    if not given:
        raise InvalidRequestError("the path is empty; '.' is the working directory")
    if "\0" in given:
        raise InvalidRequestError(f"path {given!r} holds a NUL byte")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", given):
        raise InvalidRequestError(f"{given!r} is a URL, not a path; a store takes zarr.storage.FsspecStore.from_url({given!r})")
    return Path(given).expanduser()


def open_storage(place: "str | os.PathLike[str] | Store | Storage") -> Storage:
    """The storage at a path, or over a Zarr store.

    Raises:
        InvalidRequestError: `place` is neither.
        NotAStoreError: The path is a file.
    """
    if isinstance(place, LocalStore):
        place = place.root
    if isinstance(place, str | os.PathLike):
        path = local_path(place)
        if path.exists() and not path.is_dir():
            raise NotAStoreError(f"{path} is a file; a store is a directory")
        return LocalStorage(path)
    if isinstance(place, Store):
        return ZarrStorage(place)
    if isinstance(place, LocalStorage | MemoryStorage | ZarrStorage):
        return place
    raise InvalidRequestError(f"expected a path or a Zarr store, found {type(place).__name__}")
