"""The exception tree: one class for each thing a caller may want to do about a failure.

Every class is a `TrajStoreError` and also the builtin exception that a caller unaware of this library would catch.
"""


class TrajStoreError(Exception):
    """Base of all errors raised by trajstore on purpose."""


class InvalidTrajectoryError(TrajStoreError, ValueError):
    """A trajectory's shapes or keys do not fit [T, B, ...]."""


class UnsupportedTypeError(TrajStoreError, TypeError):
    """A value has a type that no store can hold."""


class InvalidRequestError(TrajStoreError, ValueError):
    """An argument is out of its range or contradicts another."""


class TrajectoryNotFoundError(TrajStoreError, KeyError):
    """A trajectory id is not, or no longer, in the store."""

    __str__ = Exception.__str__  # KeyError's shows the repr of the message


class FieldNotFoundError(TrajStoreError, KeyError):
    """A field is in none of the trajectories asked for."""

    __str__ = Exception.__str__


class SchemaMismatchError(TrajStoreError, ValueError):
    """The trajectories asked for disagree on a field."""


class EmptyBufferError(TrajStoreError, RuntimeError):
    """There is nothing to sample from."""


class ClosedError(TrajStoreError, RuntimeError):
    """The store or buffer was closed."""


class ReadOnlyError(TrajStoreError, PermissionError):
    """The store was opened for reading only."""


class LockedError(TrajStoreError, RuntimeError):
    """Another writer holds the store."""


class StoreNotFoundError(TrajStoreError, FileNotFoundError):
    """There is no store or checkpoint at a place."""


class StoreExistsError(TrajStoreError, FileExistsError):
    """There is a store already where a new one was asked for."""


class NotAStoreError(TrajStoreError, ValueError):
    """A place holds something else than a store or checkpoint."""


class FormatVersionError(TrajStoreError, ValueError):
    """A store was written by a newer version of the format."""


class CorruptionError(TrajStoreError, ValueError):
    """Bytes that were read are not the bytes that were written."""


class UnsafeFileError(TrajStoreError, ValueError):
    """A file asks for code to be run, and was not loaded."""


class StorageError(TrajStoreError, OSError):
    """The storage refused a read or write (full, no permission, broken)."""
