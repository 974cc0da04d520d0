"""What to draw, and from which trajectories: a window, a seed, a batch."""

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from trajstore.cache import Cache
from trajstore.errors import CorruptionError, EmptyBufferError, InvalidRequestError
from trajstore.gather import RowTable, gather, resolve_fields
from trajstore.index import Selection
from trajstore.layout import Ints, Places, Schema
from trajstore.reader import Group, Source

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 20
"""Reads that are tried while trajectories are being moved under them."""
TABLE_AFTER = 8
"""Once an eighth of a cached window was drawn since it changed, the rows of all its samples are worth a table."""


class Trajectories(Protocol):
    """What a sampler needs from a store."""

    @property
    def version(self) -> int:
        """Changes whenever a selection may be out of date."""

    def newest(self, count: int) -> Selection:
        """The newest trajectories, oldest first; 0: all."""

    def locate(self, selection: Selection, row: int) -> tuple[Source, Places]:
        """The source that holds one of them, and its place there."""

    def groups(self, selection: Selection, which: Ints, *, steps: Ints, envs: Ints) -> list[Group]:
        """The sources that serve draws of (row of the selection, step, environment)."""

    def moved(self, version: int) -> bool:
        """Called when an object was not found: whether the index has changed since `version`, which explains it."""


_samplers: "weakref.WeakSet[Sampler]" = weakref.WeakSet()


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
        self._resolved: dict[Any, Schema] = {}
        self._tables: dict[Schema, RowTable] = {}
        self._num_drawn = 0
        self._has_warned = False
        _samplers.add(self)

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
            drawn: tuple[Ints, Selection] | None = None
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    selection = self._current()
                    if drawn is None or not selection.holds_what(drawn[1]):
                        drawn = self._draw(selection, count), selection
                    return self._gather(selection, drawn[0], fields)
                except FileNotFoundError as error:  # trajectories were moved; where the same are there still, so are the draws
                    version, self._version = self._version, -1
                    if not self._source.moved(version) or attempt == MAX_ATTEMPTS:
                        raise CorruptionError(f"an object of the store is gone: {error}") from error
            raise AssertionError("the last attempt returns or raises")

    @property
    def num_cached(self) -> int:
        """Trajectories in the cache."""
        return len(self.cache)

    def clear_cache(self) -> None:
        """Frees the cache; the next batch fills it again."""
        with self._lock:
            self.cache.clear()
            self._version = -1

    def _after_fork(self) -> None:
        """A forked child has no thread that would give the lock back, or finish the cache."""
        self._lock = threading.RLock()
        self.clear_cache()

    def _draw(self, selection: Selection, count: int) -> Ints:
        """Uniform draws with replacement: one `torch.randint` over all samples of the window, as RLinf 0.3.0 does."""
        total = selection.num_samples
        if total == 0:
            raise EmptyBufferError("there is nothing to sample from; add trajectories first")
        if count > total:
            if not self._has_warned:
                logger.warning("asked for %d transitions where the window holds %d; batches are of that size", count, total)
                self._has_warned = True
            count = total
        samples: Ints = torch.randint(0, total, (count,), generator=self.generator).numpy()
        return samples

    def _gather(self, selection: Selection, samples: Ints, fields: Sequence[str] | str | None) -> dict[str, Any]:
        resolved = self._resolve(selection, fields)
        self._num_drawn += len(samples)
        if self.cache.holds_all and self._num_drawn * TABLE_AFTER > selection.num_samples:
            return self._table(selection, resolved).gather(samples)
        which, steps, envs = split_samples(selection, samples)
        groups, rest = self.cache.groups(which, steps=steps, envs=envs)
        if rest is not None:
            uncached = self._source.groups(selection, which[rest], steps=steps[rest], envs=envs[rest])
            groups += [g._replace(draws=rest if g.draws is None else rest[g.draws]) for g in uncached] if groups else uncached
        return gather(groups, resolved, len(samples))

    def _table(self, selection: Selection, fields: Schema) -> RowTable:
        table = self._tables.get(fields)
        if table is None:
            which, steps, envs = split_samples(selection, np.arange(selection.num_samples))
            ((group,), _) = self.cache.groups(which, steps=steps, envs=envs)
            table = self._tables[fields] = RowTable(group, fields)
        return table

    def _current(self) -> Selection:
        """The window, with the cache brought up to it."""
        version = self._source.version
        if self._selection is None or version != self._version:
            self._version, self._selection = version, None
            selection = self._source.newest(self.window)
            self._resolved, self._tables, self._num_drawn = {}, {}, 0
            if self._cache_size:
                self.cache.update(selection, locate=lambda row: self._source.locate(selection, row))
            self._selection = selection
        return self._selection

    def _resolve(self, selection: Selection, fields: Sequence[str] | str | None) -> Schema:
        key = fields if fields is None or isinstance(fields, str) else tuple(fields)
        if key not in self._resolved:
            self._resolved[key] = resolve_fields(selection.ids, selection.schemas, selection.known_schemas, fields=fields)
        return self._resolved[key]


def split_samples(selection: Selection, samples: Ints) -> tuple[Ints, Ints, Ints]:
    """Samples are numbered trajectory after trajectory, in each one `t * B + b` (RLinf 0.3.0).

    Returns:
        Row of the selection, step and environment of each sample, int64[n] each.
    """
    places = selection.places
    if selection.is_uniform:
        num_envs: Any = int(places.num_envs[0])
        num_samples = int(places.num_steps[0]) * num_envs
        which = samples // num_samples
        local = samples - which * num_samples
    else:
        which = np.searchsorted(selection.ends, samples, side="right")
        num_envs = places.num_envs[which]
        local = samples - selection.ends[which] + places.num_steps[which] * num_envs
    steps = local // num_envs
    return which, steps, local - steps * num_envs


def _after_fork() -> None:
    for sampler in list(_samplers):
        sampler._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
