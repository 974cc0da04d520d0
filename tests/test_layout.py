"""Rows, frames and plans, against slow and obvious computations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trajstore.index import Selection
from trajstore.layout import Field, Places, array_name, array_ranges, differing_rows, plan_pool, rows_of
from trajstore.layout import Schema as LayoutSchema
from trajstore.reader import plan_chunks
from trajstore.sampler import split_samples


def places(steps: int, envs: int, *, rows: int = 0, env: int = 0, frames: int = 0, frame: int = 0) -> Places:
    return Places(*(np.array([value]) for value in (steps, envs, frames, rows, env, frame)))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4), st.booleans())
def test_rows_follow_one_another_without_gap(shapes: list[tuple[int, int, int]], extra_first: bool) -> None:
    extra = 2
    field = Field("x", "float32", (), extra, extra_first, "x")
    expected, row_start, env_start, position = [], 0, 0, 0
    for epoch_steps, envs, _ in shapes:
        steps = epoch_steps * extra
        at = places(steps, envs, rows=row_start, env=env_start)
        assert array_ranges(LayoutSchema((field,)), at)["x"] == (position, position + envs * (steps + extra))
        for env in range(envs):
            stored = [step for step in range(steps + extra) if not extra_first or step % (epoch_steps + 1)][:steps]
            expected += [position + row for row in stored]
            found = rows_of(field, at, steps=np.arange(steps), envs=np.full(steps, env))
            assert found.tolist() == expected[-steps:]
            position += steps + extra
        row_start += steps * envs
        env_start += envs
    assert len(set(expected)) == len(expected)


@given(hnp.arrays(np.bool_, st.tuples(st.integers(1, 4), st.integers(1, 8))))
def test_the_next_frame_is_the_one_after(inserted: np.ndarray) -> None:
    inserted[:, -1] = True
    frames, count = plan_pool(inserted)
    assert frames.dtype == np.int32
    used = np.zeros(count, int)
    for env in range(len(inserted)):
        for step in range(inserted.shape[1]):
            used[frames[env, step]] += 1
            if inserted[env, step]:
                used[frames[env, step] + 1] += 1
            else:
                assert frames[env, step + 1] == frames[env, step] + 1
    assert (used == 1).all()


@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 6, 8, 12])
def test_rows_that_differ_in_any_bit(width: int) -> None:
    left = np.random.default_rng(0).integers(0, 256, (5, 3, width), np.uint8)
    right = left.copy()
    expected = np.zeros((5, 3), bool)
    for byte in range(width):
        right[byte % 5, byte % 3, byte] ^= 128
        expected[byte % 5, byte % 3] = True
    np.testing.assert_array_equal(differing_rows(left, right), expected)


def test_bits_count_and_not_values() -> None:
    nan, zero = np.full((1, 1, 1), np.nan, "f4"), np.zeros((1, 1, 1), "f4")
    assert not differing_rows(nan, nan).any()
    assert differing_rows(zero, -zero).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 8), st.booleans())
def test_a_plan_serves_every_row_once(rows: list[int], per_chunk: int, whole: bool) -> None:
    dest = None if whole else np.arange(len(rows))[::-1] * 2
    plan = plan_chunks(np.array(rows), dest=dest, rows_per_chunk=per_chunk)
    assert plan.chunks.tolist() == sorted({row // per_chunk for row in rows})
    served = {}
    for number, chunk in enumerate(plan.chunks.tolist()):
        for at in range(plan.bounds[number], plan.bounds[number + 1]):
            assert 0 <= plan.rows[at] < per_chunk
            served[int(plan.dest[at])] = chunk * per_chunk + int(plan.rows[at])
    expected = range(len(rows)) if dest is None else dest.tolist()
    assert served == dict(zip(expected, rows, strict=True))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4), st.booleans())
def test_sample_numbers(shapes: list[tuple[int, int]], alike: bool) -> None:
    shapes = shapes[:1] * 3 if alike else shapes
    steps, envs = (np.array(column) for column in zip(*shapes, strict=True))
    zero = np.zeros(len(shapes), np.int64)
    selection = Selection(zero, zero, zero, Places(steps, envs, zero, zero, zero, zero), ())
    expected = [(which, t, b) for which, (T, B) in enumerate(shapes) for t in range(T) for b in range(B)]
    assert selection.num_samples == len(expected)
    found = split_samples(selection, np.arange(len(expected)))
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected


@given(st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=2, unique=True))
def test_array_names_are_safe_and_distinct(keys: list[str]) -> None:
    try:
        names = [array_name(key) for key in keys]
    except UnicodeEncodeError:
        return
    assert names[0] != names[1] or "/" in "".join(keys)
    for name in names:
        assert name.isascii()
        assert not name.startswith("__")
        assert name != "zarr.json"
