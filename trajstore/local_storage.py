"""A store in a directory: reads from memory maps, synced writes, a lock."""

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

from filelock import FileLock, Timeout

from trajstore.errors import InvalidRequestError, LockedError, StorageError
from trajstore.folders import sync_folder
from trajstore.mapping import Bytes, map_file
from trajstore.storage import ByteRange, Storage

MAX_MAPS = 4096
"""Files mapped at a time; the kernel's limit is 65,530 a process."""
MAX_PARTS = 1024
"""Parts written by one call: POSIX systems take so many."""


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
