"""Blocks are used again, and never while anything refers to them."""

import gc

import numpy as np
import pytest
import torch
from conftest import make

import trajstore
from trajstore import memory
from trajstore.packing import prepare
from trajstore.storage import MemoryStorage


@pytest.fixture(autouse=True)
def no_blocks() -> None:
    memory.BATCHES.release()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_block_comes_back_when_the_last_view_is_gone() -> None:
    block = memory.BATCHES.lend(100_000)
    where = address(block)
    tensor = torch.from_numpy(np.ndarray((10, 10), np.float32, block, 400))[3:].view(-1)
    del block
    gc.collect()
    assert address(memory.BATCHES.lend(100_000)) != where
    del tensor
    again = [memory.BATCHES.lend(90_000) for _ in range(2)]
    assert where in map(address, again)
    assert all(block.flags.writeable for block in again)


def test_a_block_much_too_large_is_not_used() -> None:
    block = memory.BATCHES.lend(1_000_000)
    del block
    assert len(memory.BATCHES.idle) == 1
    assert memory.BATCHES.lend(100_000).nbytes < 200_000


def test_few_blocks_are_kept() -> None:
    blocks = [memory.BATCHES.lend(10_000) for _ in range(9)]
    blocks.clear()
    assert len(memory.BATCHES.idle) == memory.BATCHES.max_blocks
    memory.BATCHES.release()
    assert not memory.BATCHES.idle


def test_batches_that_are_kept_are_not_written_over() -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.extend([make(seed=seed, image=200, steps=20) for seed in range(3)])
        for sampler in (store.sampler(seed=1), store.sampler(seed=1, cache_size=3)):
            kept = [sampler.sample(60) for _ in range(6)]
            copies = [batch["curr_obs"]["main_images"].clone() for batch in kept]
            state = sampler.state_dict()
            for _ in range(6):
                sampler.sample(60)
            assert all(torch.equal(batch["curr_obs"]["main_images"], copy) for batch, copy in zip(kept, copies, strict=True))
            pieces = [batch["next_obs"]["main_images"][7] for batch in kept]
            expected = [piece.clone() for piece in pieces]
            kept.clear()
            sampler.load_state_dict(state)
            for _ in range(6):
                sampler.sample(60)
            assert all(torch.equal(piece, copy) for piece, copy in zip(pieces, expected, strict=True))


def test_no_more_bytes_are_kept_than_allowed() -> None:
    pool = memory.BlockPool(max_blocks=9, max_bytes=50_000)
    blocks = [pool.lend(20_000) for _ in range(3)]
    blocks.clear()
    assert sum(block.nbytes for block in pool.idle) == 2 * 20_480


def test_an_idle_store_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.writer.IDLE_S", 0.05)
    memory.TRAJECTORIES.release()
    with trajstore.open(MemoryStorage()) as store:
        store.append(make(image=200, steps=20))
        thread = store._writer._thread
        assert thread is not None
        thread.join(20)
        assert not thread.is_alive()
        assert len(store) == 1
        assert not memory.TRAJECTORIES.idle


def test_a_copy_that_is_written_makes_room_for_the_next() -> None:
    memory.TRAJECTORIES.release()
    large = [make(seed=seed, image=100, steps=30) for seed in range(2)]
    kept = prepare(large[0]).pack()
    expected = kept.arrays["obs/main_images"].copy()
    where = address(kept.arrays["obs/main_images"])
    assert address(prepare(large[1]).pack().arrays["obs/main_images"]) != where
    np.testing.assert_array_equal(kept.arrays["obs/main_images"], expected)
    del kept
    gc.collect()
    addresses = {address(prepare(large[1]).pack().arrays["obs/main_images"]) for _ in range(2)}
    assert where in addresses
