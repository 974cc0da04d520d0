"""The ring: whatever comes and goes, a cached batch equals an uncached one, and memory stays bounded."""

import random

import pytest
from conftest import assert_same, make

import trajstore
from trajstore.storage import MemoryStorage


@pytest.mark.parametrize("seed", range(6))
def test_cached_and_uncached_batches_agree_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    with trajstore.open(MemoryStorage(), segment_bytes=rng.choice([1, 10**5])) as store:
        store.append(make(seed=99))
        cached = store.sampler(
            window=rng.choice([0, 3]), seed=1, cache_size=rng.choice([1, 2, 4, 50]), cache_bytes=rng.choice([None, 9000])
        )
        plain = store.sampler(window=cached.window, seed=1)
        for step in range(60):
            match rng.randrange(6):
                case 0 | 1:
                    steps, envs = rng.choice([(2, 1), (6, 3), (20, 2), (64, 5)])
                    store.append(make(seed=step, steps=steps, envs=envs, extra=rng.choice([1, 2])))
                case 2 if len(store) > 2:
                    store.delete([rng.choice(store.ids)])
                case 3:
                    store.flush()
                case 4 if rng.random() < 0.3:
                    cached.clear_cache()
                case 5 if rng.random() < 0.2:
                    store.clear()
                    store.append(make(seed=step + 100))
            assert_same(cached.sample(8, fields="common"), plain.sample(8, fields="common"))


def test_only_the_newest_are_cached() -> None:
    with trajstore.open(MemoryStorage()) as store:
        sampler = store.sampler(cache_size=3)
        for seed in range(8):
            store.append(make(seed=seed))
            sampler.sample(2)
            assert sampler.num_cached == min(seed + 1, 3)
        bound = sampler.cache.nbytes
        for seed in range(30):
            store.append(make(seed=seed))
            sampler.sample(2)
            assert sampler.cache.nbytes == bound
        sampler.clear_cache()
        assert (sampler.num_cached, sampler.cache.nbytes) == (0, 0)
        sampler.sample(1)
        assert sampler.num_cached == 3


def test_a_cache_bounded_in_bytes() -> None:
    with trajstore.open(MemoryStorage()) as store:
        store.extend([make(seed=seed) for seed in range(10)])
        one = store.sampler(cache_size=1)
        one.sample(1)
        sampler = store.sampler(cache_size=10, cache_bytes=int(3.5 * one.cache.nbytes))
        sampler.sample(4)
        assert sampler.num_cached == 3
        assert sampler.cache.nbytes <= 3.5 * one.cache.nbytes
        nothing = store.sampler(cache_size=10, cache_bytes=1)
        nothing.sample(4)
        assert nothing.num_cached == 0


def test_what_is_in_the_cache_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    with trajstore.open(storage) as store:
        store.extend([make(seed=seed) for seed in range(4)])
        store.flush()
        sampler = store.sampler(cache_size=4)
        first = sampler.sample(30)
        monkeypatch.setattr(storage, "fetch", lambda _: pytest.fail("read"))
        sampler.sample(30)
        fresh = store.sampler(cache_size=4)
        with pytest.raises(pytest.fail.Exception):
            fresh.sample(30)
        assert first["actions"].shape == (30, 2)
