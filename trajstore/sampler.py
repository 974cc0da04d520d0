"""What to draw, and from which trajectories: a window, a seed, a batch."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from trajstore.cache import Cache
from trajstore.errors import CorruptionError, EmptyBufferError, InvalidRequestError
from trajstore.index import Selection
from trajstore.layout import Field, Ints, Places, to_step_env
from trajstore.reader import Group, Source, gather, resolve_fields
from trajstore.trajectory import from_stored, nest

logger = logging.getLogger(__name__)


class Trajectories(Protocol):
    """What a sampler needs from a store."""

    @property
    def version(self) -> int:
        """Changes whenever a selection may be out of date."""

    @property
    def epoch(self) -> int:
        """Changes when ids get new meanings."""

    def newest(self, count: int) -> Selection:
        """The newest trajectories, oldest first; 0: all."""

    def locate(self, selection: Selection, row: int) -> tuple[Source, Places]:
        """The source that holds one of them, and its place there."""

    def groups(self, selection: Selection, which: Ints, *, steps: Ints, envs: Ints) -> list[Group]:
        """The sources that serve draws of (row of the selection, step, environment)."""

    def moved(self, version: int) -> bool:
        """Called when an object was not found: whether the index has changed since `version`, which explains it."""


class Sampler:
    """Draws transitions uniformly, with replacement, from the newest trajectories. Thread-safe.

    Same data, window and seed give the batches of RLinf 0.3.0's `TrajectoryReplayBuffer`, bit for bit.

    Args:
        source: The store to draw from.
        window: Draw from the newest `window` trajectories; 0: from all.
        seed: Of the private generator; None: from the operating system.
        cache_size: Newest trajectories that are kept decoded.
        cache_bytes: Bytes they may take together; None: any.
    """

    def __init__(
        self, source: Trajectories, *, window: int = 0, seed: int | None = 0, cache_size: int = 0, cache_bytes: int | None = None
    ) -> None:
        if window < 0 or cache_size < 0 or (cache_bytes or 0) < 0:
            raise InvalidRequestError(f"window={window}, cache_size={cache_size}, cache_bytes={cache_bytes}: none may be negative")
        self.window = window
        self.cache = Cache(max_trajectories=cache_size, max_bytes=cache_bytes)
        self.generator = torch.Generator()
        self.seed(seed)
        self._source = source
        self._cache_size = cache_size
        self._lock = threading.RLock()
        self._version = -1
        self._selection: Selection | None = None
        self._resolved: dict[Any, tuple[Field, ...]] = {}
        self._has_warned = False

    def seed(self, seed: int | None) -> None:
        """Starts the generator anew."""
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """The generator's state: with the same data, a sampler that loads it draws what this one would have drawn."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a `state_dict` over.

        Raises:
            InvalidRequestError: It is none.
        """
        try:
            self.generator.set_state(state["generator"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise InvalidRequestError(f"not a sampler's state: {error!r}") from error

    def sample(self, count: int, *, fields: Sequence[str] | str | None = None) -> dict[str, Any]:
        """Draws a batch.

        Args:
            count: Transitions to draw; more than the window holds is clamped to it, with one warning.
            fields: None: all, which must agree over the window. "common": those that agree. Else paths such as
                `curr_obs/main_images`, or parents such as `curr_obs`.

        Returns:
            Nested dict of tensors [count, ...].

        Raises:
            EmptyBufferError: There are no trajectories.
            SchemaMismatchError: Trajectories of the window disagree on a field asked for.
            InvalidRequestError: `count` is below 1.
        """
        if count < 1:
            raise InvalidRequestError(f"asked for {count} transitions; ask for at least 1")
        with self._lock:
            while True:
                state = self.generator.get_state()
                try:
                    return self._sample(count, fields)
                except FileNotFoundError as error:
                    self.generator.set_state(state)
                    version, self._version = self._version, -1
                    if not self._source.moved(version):
                        raise CorruptionError(f"an object of the store is gone: {error}") from error

    @property
    def num_cached(self) -> int:
        """Trajectories in the cache."""
        return len(self.cache)

    def clear_cache(self) -> None:
        """Frees the cache; the next batch fills it again."""
        with self._lock:
            self.cache.clear()
            self._version = -1

    def _sample(self, count: int, fields: Sequence[str] | str | None) -> dict[str, Any]:
        selection = self._current()
        total = selection.num_samples
        if total == 0:
            raise EmptyBufferError("there is nothing to sample from; add trajectories first")
        if count > total:
            if not self._has_warned:
                logger.warning("asked for %d transitions where the window holds %d; batches are of that size", count, total)
                self._has_warned = True
            count = total
        resolved = self._resolve(selection, fields)
        which, steps, envs = draw(selection, count, generator=self.generator)
        groups, rest = self.cache.groups(which, steps=steps, envs=envs)
        if rest is not None:
            uncached = self._source.groups(selection, which[rest], steps=steps[rest], envs=envs[rest])
            groups += [g._replace(draws=rest if g.draws is None else rest[g.draws]) for g in uncached] if groups else uncached
        return to_batch(gather(groups, resolved, count), resolved)

    def _current(self) -> Selection:
        """The window, with the cache brought up to it."""
        version = self._source.version
        if self._selection is None or version != self._version:
            self._version = version
            self._selection = selection = self._source.newest(self.window)
            self._resolved = {}
            if self._cache_size:
                self.cache.update(selection, epoch=self._source.epoch, locate=lambda row: self._source.locate(selection, row))
        return self._selection

    def _resolve(self, selection: Selection, fields: Sequence[str] | str | None) -> tuple[Field, ...]:
        key = fields if fields is None or isinstance(fields, str) else tuple(fields)
        if key not in self._resolved:
            self._resolved[key] = resolve_fields(selection.ids, selection.schemas, selection.known_schemas, fields=fields)
        return self._resolved[key]


def draw(selection: Selection, count: int, *, generator: torch.Generator) -> tuple[Ints, Ints, Ints]:
    """Uniform draws with replacement: one `torch.randint` over all samples of the selection, as RLinf 0.3.0 does.

    Returns:
        Row of the selection, step and environment of each draw, int64[count] each.
    """
    samples = torch.randint(0, selection.num_samples, (count,), generator=generator).numpy()
    which = np.searchsorted(selection.ends, samples, side="right")
    num_envs = selection.places.num_envs[which]
    local = samples - selection.ends[which] + selection.places.num_steps[which] * num_envs
    return which, *to_step_env(local, num_envs)


def to_batch(arrays: Mapping[str, np.ndarray[Any, Any]], fields: Sequence[Field]) -> dict[str, Any]:
    """Arrays by path -> nested dict of tensors."""
    return nest({field.path: from_stored(arrays[field.path], field.dtype) for field in fields})
