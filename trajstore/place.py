"""Places: the storage there, and what is in it: a store, nothing, or something else."""

import os
import uuid as uuids
from collections.abc import Iterator

from zarr.abc.store import Store
from zarr.storage import LocalStore

from trajstore.arrays import to_document
from trajstore.errors import CorruptionError, FormatVersionError, InvalidRequestError, NotAStoreError, StoreNotFoundError
from trajstore.index import INDEX, Index, publish
from trajstore.local_storage import LocalStorage, local_path
from trajstore.segment import GROUP, SEGMENTS, group_document, parse_document
from trajstore.storage import MemoryStorage, Storage
from trajstore.zarr_storage import ZarrStorage

FORMAT_VERSION = 1


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


def is_store(storage: Storage) -> bool:
    """Whether there is a store.

    Raises:
        NotAStoreError: There is something else.
        FormatVersionError: A newer version of the library wrote it.
    """
    try:
        version = parse_document(storage.read("zarr.json"), where=storage.location)["format_version"]
    except FileNotFoundError:
        others = sorted(_other_names(storage))
        if not others:
            return False
        hint = "it looks like a pt or pkl checkpoint: load it with TrajectoryReplayBuffer.load_checkpoint"
        if "trajectory_index.json" not in others:
            hint = (
                f"it holds ranks: open one of them, such as {others[0]}"
                if others[0].startswith("rank_")
                else "a new one needs an empty directory"
            )
        raise NotAStoreError(f"{storage.location} holds {others[0]!r} but no store; {hint}") from None
    except (CorruptionError, TypeError, KeyError):
        raise NotAStoreError(f"{storage.location} is a Zarr hierarchy, but no store of trajstore") from None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise FormatVersionError(
            f"store {storage.location} has format version {version}; this library reads up to {FORMAT_VERSION}: update trajstore"
        )
    return True


def read_uuid(storage: Storage) -> str:
    """The store's own uuid, 32 hexadecimal digits; `StoreNotFoundError` if the store is gone."""
    try:
        return str(parse_document(storage.read("zarr.json"), where=storage.location).get("uuid"))
    except FileNotFoundError:
        raise StoreNotFoundError(f"the store at {storage.location} is gone") from None


def erase(storage: Storage) -> None:
    """Deletes the store at a place."""
    for key in ("zarr.json", INDEX, SEGMENTS, "metadata.json"):
        storage.delete(key)


def _other_names(storage: Storage) -> Iterator[str]:
    """What is at a place besides the remains of a store that was not made, or not erased, to the end."""
    for name in storage.list(""):
        if name in (SEGMENTS, INDEX):
            yield from (f"{name}/{below}" for below in storage.list(name) if not (below.isdigit() or "zarr.json" in below))
        elif name not in ("writer.json", "metadata.json") and not name.startswith("."):
            yield name


def create(storage: Storage) -> None:
    """Makes an empty store; it is one from the last write on. Remains of another are removed first."""
    for folder in (INDEX, SEGMENTS):
        storage.delete(folder)
    storage.write(f"{SEGMENTS}/zarr.json", to_document(GROUP))
    publish(storage, Index(), generation=0)
    storage.replace("zarr.json", group_document({"format_version": FORMAT_VERSION, "uuid": uuids.uuid4().hex}))
