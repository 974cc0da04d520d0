"""A store in any Zarr store: read by byte ranges, many at a time."""

import asyncio
import builtins
import errno
from collections.abc import Sequence

import numpy as np
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from trajstore.errors import StorageError
from trajstore.mapping import Bytes
from trajstore.storage import ByteRange, NoLock, Storage

MAX_REQUESTS = 64
"""Byte-range reads in flight at a time, for stores that are not local."""


class ZarrStorage(NoLock):
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
