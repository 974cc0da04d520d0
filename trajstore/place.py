"""What is at a place: a store, nothing, or something else."""

import uuid as uuids

from trajstore.errors import CorruptionError, FormatVersionError, NotAStoreError
from trajstore.index import INDEX, Index, publish
from trajstore.segment import GROUP, SEGMENTS, group_document, parse_document, to_document
from trajstore.storage import Storage

FORMAT_VERSION = 1


def is_store(storage: Storage) -> bool:
    """Whether there is a store.

    Raises:
        NotAStoreError: There is something else.
        FormatVersionError: A newer version of the library wrote it.
    """
    try:
        version = parse_document(storage.read("zarr.json"), where=storage.location)["format_version"]
    except FileNotFoundError:
        others = [name for name in storage.list("") if name not in (SEGMENTS, INDEX, "writer.json", "metadata.json") and name[0] != "."]
        if not others:
            return False
        hint = "it looks like a pt or pkl checkpoint: load it with TrajectoryReplayBuffer.load_checkpoint"
        hint = hint if "trajectory_index.json" in others else "choose an empty or new directory"
        raise NotAStoreError(f"{storage.location} holds {sorted(others)[0]!r} but no store; {hint}") from None
    except (CorruptionError, TypeError, KeyError):
        raise NotAStoreError(f"{storage.location} is a Zarr hierarchy, but no store of trajstore") from None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise FormatVersionError(
            f"store {storage.location} has format version {version}; this library reads up to {FORMAT_VERSION}: update trajstore"
        )
    return True


def erase(storage: Storage) -> None:
    """Deletes the store at a place."""
    for key in ("zarr.json", INDEX, SEGMENTS, "metadata.json"):
        storage.delete(key)


def create(storage: Storage) -> None:
    """Makes an empty store; it is one from the last write on."""
    storage.write(f"{SEGMENTS}/zarr.json", to_document(GROUP))
    publish(storage, Index(), generation=0)
    storage.replace("zarr.json", group_document({"format_version": FORMAT_VERSION, "uuid": uuids.uuid4().hex}))
