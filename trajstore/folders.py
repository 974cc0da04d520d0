"""Directories that appear whole, or not at all."""

import contextlib
import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from trajstore.errors import NotAStoreError, StorageError, StoreNotFoundError


@contextlib.contextmanager
def replacing(folder: Path, *, is_replaced: Callable[[Path], bool]) -> Iterator[Path]:
    """A new directory to fill, which takes the place of `folder` at the end: whole, or not at all.

    Two exchanged names make the step atomic on Linux; elsewhere there is an instant in which neither name is there.

    Args:
        folder: Where it is to be.
        is_replaced: Which files and folders of one that is there already go; the others stay.

    Raises:
        NotAStoreError: `folder` is a file.
        StorageError: It can't be written.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise NotAStoreError(f"{folder} is a file; a directory is to be there")
    new = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        new.mkdir(parents=True)
        yield new
        if folder.exists():
            _keep_other_files(folder, new, is_replaced)
            sync_folder(new)
            here = _working_folder()
            _exchange(new, folder)
            if here is not None and folder in (here, *here.parents):
                os.chdir(here)  # the same path, in the new directory
        else:
            sync_folder(new)
            new.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        if isinstance(error, StorageError | StoreNotFoundError):
            raise
        raise StorageError(error.errno or errno.EIO, f"can't write {folder}: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _keep_other_files(folder: Path, new: Path, is_replaced: Callable[[Path], bool]) -> None:
    for path in folder.iterdir():
        if is_replaced(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
            for below, _, _ in os.walk(new / path.name):
                sync_folder(Path(below))
        else:
            _link(path, new / path.name)


def _link(source: "str | Path", target: "str | Path") -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(new: Path, old: Path) -> None:
    """Exchanges two directories, atomically where the system can."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        rename = None
    if rename is not None and rename(at_fdcwd, os.fsencode(new), at_fdcwd, os.fsencode(old), rename_exchange) == 0:
        return
    aside = new.with_name(new.name + ".old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _working_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


def sync_folder(folder: Path) -> None:
    """Makes the entries of a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
