"""The bytes of a `sharding_indexed` shard (Zarr v3, index at the end): chunks, then their offsets and lengths, then a crc32c."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import google_crc32c
import numpy as np

from trajstore.errors import CorruptionError

CRC_BYTES = 4
_ENTRY_BYTES = 16


def crc32c(data: bytes | np.ndarray[Any, Any]) -> int:
    """The Castagnoli checksum that Zarr's `crc32c` codec appends. Arrays are uint8[n], contiguous."""
    return int(google_crc32c.value(data))


def crc32c_of_all(parts: Iterable[bytes]) -> int:
    """The checksum of parts that follow one another."""
    return functools.reduce(google_crc32c.extend, parts, 0)


def with_crc(data: bytes) -> bytes:
    """`data` as the `crc32c` codec stores it."""
    return data + crc32c(data).to_bytes(CRC_BYTES, "little")


def without_crc(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The content of bytes stored by the `crc32c` codec, uint8[n] -> uint8[n - 4]; `CorruptionError` if they do not match."""
    content = data[:-CRC_BYTES]
    if len(data) < CRC_BYTES or crc32c(content) != int.from_bytes(data[-CRC_BYTES:].tobytes(), "little"):
        raise CorruptionError("checksum does not match")
    return content


def index_bytes(num_chunks: int) -> int:
    """Length of the index at the end of a shard."""
    return num_chunks * _ENTRY_BYTES + CRC_BYTES


def build_index(chunks: Sequence[bytes]) -> bytes:
    """What follows these encoded chunks to make a shard of them."""
    lengths = np.array([len(chunk) for chunk in chunks], "<u8")
    entries = np.stack([np.cumsum(lengths, dtype="<u8") - lengths, lengths], axis=1)
    return with_crc(entries.tobytes())


def parse_index(data: np.ndarray[Any, Any], *, shard_bytes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Parses the index of a shard.

    Args:
        data: uint8[index_bytes(n)], the end of the shard.
        shard_bytes: Size of the whole shard, which bounds every chunk.

    Returns:
        int64[n, 2]: offset and length of each chunk.

    Raises:
        CorruptionError: The checksum does not match, or a chunk lies outside the shard.
    """
    entries = np.frombuffer(without_crc(data), "<u8").reshape(-1, 2)
    limit = shard_bytes - len(data)
    offsets, lengths = entries[:, 0], entries[:, 1]
    if ((offsets > limit) | (lengths > limit) | (offsets + lengths > limit)).any():
        raise CorruptionError("the shard's index points outside the shard")
    return entries.astype(np.int64)
