"""Chunks and shards: inverse functions, choices that look at the data only, and no wrong bytes decoded."""

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajstore.arrays import StoredArray, decode_array, encode_arrays
from trajstore.codec import NONE, ZSTD, Codec, choose_codec, choose_rows_per_chunk, codec_from_json, lz4
from trajstore.decode import NATIVE, find_chunks
from trajstore.errors import CorruptionError
from trajstore.layout import Rows
from trajstore.shard import build_index, crc32c, crc32c_of_all, index_bytes, parse_index, with_crc

CODECS = [NONE, ZSTD, lz4(), lz4(shuffle=4)]


def view(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.fixture(params=["native", "numcodecs"], autouse=True)
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to decompress must do the same."""
    if request.param == "numcodecs":
        monkeypatch.setattr("trajstore.decode.NATIVE", None)
    else:
        assert NATIVE is not None


def encode_array(*parts: np.ndarray, is_pool: bool = False) -> tuple[StoredArray, bytes]:
    stored, shard = encode_arrays({"x": Rows(parts)}, pools=["x"] if is_pool else [])["x"]
    return stored, b"".join(shard)


def decode(codec: Codec, data: bytes, out: np.ndarray) -> None:
    """One chunk, between other bytes."""
    base = view(b"before" + data + b"after"[: 5 if data else 0])
    chunks = find_chunks(codec, out.nbytes, base, np.array([[6, len(data)]]))
    chunks.decode(0, 1, target=out, offsets=np.zeros(1, np.int64))


def test_the_checksum_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=50), max_size=9))
def test_a_shard_parses_into_its_chunks(chunks: list[bytes]) -> None:
    shard = b"".join([*chunks, build_index(chunks)])
    assert crc32c_of_all(chunks) == crc32c(b"".join(chunks))
    table = parse_index(view(shard)[-index_bytes(len(chunks)) :], shard_bytes=len(shard))
    assert [shard[offset : offset + length] for offset, length in table.tolist()] == chunks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_in_an_index_is_found(chunks: list[bytes], data: st.DataObject) -> None:
    index = bytearray(build_index(chunks))
    bit = data.draw(st.integers(0, 8 * len(index) - 1))
    index[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError):
        parse_index(view(bytes(index)), shard_bytes=10**6)


@pytest.mark.parametrize("entry", [(0, 11), (11, 0), (5, 6), (2**64 - 1, 2), (2, 2**64 - 1)])
def test_an_index_that_points_outside_is_refused(entry: tuple[int, int]) -> None:
    index = with_crc(np.array([entry], "<u8").tobytes())
    with pytest.raises(CorruptionError, match="outside"):
        parse_index(view(index), shard_bytes=10 + len(index))


@pytest.mark.parametrize(("codec", "dtype"), list(product(CODECS, ["u1", "f4", "f8", "?", "c8"])))
def test_codecs_are_inverse_and_refuse_other_bytes(codec: Codec, dtype: str) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (7, 40)).astype(dtype)
    data = codec.encode(rows)
    out = np.empty_like(rows)
    decode(codec, data, out)
    np.testing.assert_array_equal(out, rows)
    for position in range(0, len(data), 3):
        broken = bytearray(data)
        broken[position] ^= 4
        with pytest.raises(CorruptionError):
            decode(codec, bytes(broken), out)
    for length in (0, 3, 4, 10, len(data) - 1):
        with pytest.raises(CorruptionError):
            decode(codec, data[:length], out)


@pytest.mark.parametrize("codec", [lz4(), lz4(shuffle=4), NONE])
@pytest.mark.parametrize("rows", [6, 8])
def test_a_chunk_of_another_size_is_refused(codec: Codec, rows: int) -> None:
    data = codec.encode(np.zeros((7, 40), "f4"))
    with pytest.raises(CorruptionError, match=f"{rows * 160} bytes"):
        decode(codec, data, np.empty((rows, 40), "f4"))


def test_a_blosc_header_that_lies_is_refused() -> None:
    content = bytearray(lz4().compress(np.zeros((7, 40), "f4")))
    content[12] += 40
    with pytest.raises(CorruptionError, match="header does not fit"):
        decode(lz4(), with_crc(bytes(content)), np.empty((7, 40), "f4"))
    with pytest.raises(CorruptionError, match="shorter than blosc's header"):
        decode(lz4(), with_crc(b"x" * 9), np.empty((7, 40), "f4"))


def test_a_chunk_outside_the_shard_is_refused() -> None:
    for table in ([[0, 101]], [[90, 20]], [[5, 3]]):
        with pytest.raises(CorruptionError, match="outside the 100 bytes"):
            find_chunks(NONE, 4, np.zeros(100, np.uint8), np.array(table))


def test_codecs_parse() -> None:
    assert codec_from_json({"name": "zstd", "level": 1, "compressor": "", "shuffle": 0}) == ZSTD
    for bad in ({"name": "lzma"}, {"nome": "zstd"}):
        with pytest.raises(CorruptionError):
            codec_from_json(bad)


def frames(kind: str, size: int = 64) -> np.ndarray:
    rng = np.random.default_rng(0)
    still = rng.integers(0, 256, (1, size, size, 3), np.uint8)
    match kind:
        case "fixed camera":
            moving = np.repeat(still, 100, 0)
            moving[:, :8, :8] = rng.integers(0, 256, (100, 8, 8, 3))
            return moving
        case "noise":
            return rng.integers(0, 256, (100, size, size, 3), np.uint8)
        case _:
            return np.cumsum(rng.integers(-1, 2, (100, size, size, 3)), axis=2).astype(np.uint8)


@pytest.mark.parametrize("size", [64, 160])
def test_a_fixed_camera_gets_chunks_of_many_frames(size: int) -> None:
    rows = frames("fixed camera", size)
    stored, shard = encode_array(rows)
    assert 4 <= stored.rows_per_chunk <= 2**19 // rows[0].nbytes
    assert len(shard) < rows.nbytes / 3
    if rows[0].nbytes > 2**16:  # out of reach for LZ4
        assert stored.codec == ZSTD


def test_small_frames_come_in_pairs() -> None:
    assert encode_array(frames("noise"), is_pool=True)[0].rows_per_chunk == 2
    assert encode_array(frames("noise", 160), is_pool=True)[0].rows_per_chunk == 1
    assert encode_array(frames("noise")[:1], is_pool=True)[0].rows_per_chunk == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_rows_of_several_arrays_are_read_as_one(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(2 * sum(lengths), dtype="i4").reshape(-1, 2)
    rows = Rows(np.split(whole, np.cumsum(lengths)[:-1]))
    assert (len(rows), rows.dtype, rows.row_shape, rows.nbytes) == (len(whole), whole.dtype, (2,), whole.nbytes)
    start = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(1, len(whole) + 3))
    padded = np.concatenate([whole, np.zeros((count, 2), "i4")])
    found = rows.chunk(start, count)
    np.testing.assert_array_equal(found, padded[start : start + count])
    assert found.flags.c_contiguous


def test_joined_parts_are_encoded_as_one_array() -> None:
    rows = frames("smooth")
    assert encode_array(*np.split(rows, [3, 50, 51]))[1] == encode_array(rows)[1]


def test_frames_with_nothing_in_common_get_chunks_of_one() -> None:
    assert choose_rows_per_chunk(Rows([frames("smooth")])) == 1
    assert choose_codec(Rows([frames("smooth")]), rows_per_chunk=1).name in ("blosc", "zstd")
    assert choose_rows_per_chunk(Rows([frames("noise")])) == 1
    assert choose_codec(Rows([frames("noise")]), rows_per_chunk=1) == NONE


@pytest.mark.parametrize(("shape", "per_chunk"), [((10_000, 16), 1024), ((100, 16), 100), ((9, 0), 9), ((1, 70_000), 1)])
def test_small_rows_get_64_kib(shape: tuple[int, ...], per_chunk: int) -> None:
    assert choose_rows_per_chunk(Rows([np.zeros(shape, "f4")])) == per_chunk


def test_choices_are_the_same_every_time() -> None:
    rows = frames("fixed camera")
    assert encode_array(rows)[1] == encode_array(rows.copy())[1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.sampled_from(["u1", "f4", "?", "c16"]), st.lists(st.integers(0, 5), max_size=3))
def test_arrays_are_decoded_as_they_were(count: int, dtype: str, row_shape: list[int]) -> None:
    rows = np.random.default_rng(count).integers(0, 2, (count, *row_shape)).astype(dtype)
    stored, shard = encode_array(rows)
    found = decode_array(stored, shard)
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows)
    if shard:
        with pytest.raises(CorruptionError):
            decode_array(stored, shard[:-1] + bytes([shard[-1] ^ 1]))
