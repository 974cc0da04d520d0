"""How fast is fast enough: ratios that a run is held against. They are reported, never asserted."""

from dataclasses import dataclass

from benchmarks.results import Results
from benchmarks.rivals import OURS

LOSSLESS = ("rlinf", "torchrl-memmap", "torchrl-tensor", "diffusion-policy-zarr", "h5py", "h5py-gzip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One ratio to reach: theirs divided by ours, of medians of one pair.

    Attributes:
        workload: Letter.
        what: In words.
        mode: Our mode.
        metric: Our metric.
        rival: Whose number it is compared with.
        rival_mode: The rival's mode.
        at_least: The smallest ratio that meets the bar; 1 / 1.5 means at most 1.5 times theirs.
    """

    workload: str
    what: str
    mode: str
    metric: str
    rival: str
    rival_mode: str
    at_least: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar held against a run: `ratio` is None where a number is missing."""

    bar: Bar
    ours: float | None
    theirs: float | None

    @property
    def ratio(self) -> float | None:
        """Theirs divided by ours."""
        return self.theirs / self.ours if self.ours and self.theirs is not None else None

    @property
    def outcome(self) -> str:
        """`"met"`, `"not met"` or `"not measured"`."""
        if self.ratio is None:
            return "not measured"
        return "met" if self.ratio >= self.bar.at_least else "not met"


def _sampling(workload: str, rows: int, *, mode: str, rival: str, rival_mode: str, at_least: float) -> Bar:
    what = f"sample({rows}) {mode}, beside {rival} {rival_mode}"
    metric = f"sample_{rows}"
    return Bar(workload=workload, what=what, mode=mode, metric=metric, rival=rival, rival_mode=rival_mode, at_least=at_least)


def _stored(workload: str, what: str, *, metric: str, rival: str, at_least: float) -> Bar:
    return Bar(workload=workload, what=what, mode="", metric=metric, rival=rival, rival_mode="", at_least=at_least)


BARS: tuple[Bar, ...] = (
    _sampling("A", 256, mode="cached", rival="rlinf", rival_mode="cached", at_least=5.0),
    _sampling("A", 256, mode="cached", rival="torchrl-tensor", rival_mode="cached", at_least=2.5),
    _sampling("A", 256, mode="cached", rival="floor-take", rival_mode="cached", at_least=1 / 1.5),
    _sampling("A", 256, mode="uncached", rival="rlinf", rival_mode="cached", at_least=1.3),
    _sampling("A", 256, mode="uncached", rival="torchrl-memmap", rival_mode="uncached", at_least=1.0),
    _sampling("A", 256, mode="uncached", rival="rlinf", rival_mode="uncached", at_least=15.0),
    _sampling("A", 256, mode="uncached", rival="zarr-python", rival_mode="uncached", at_least=50.0),
    _sampling("C", 256, mode="cached", rival="rlinf", rival_mode="cached", at_least=50.0),
    Bar(
        workload="C",
        what="peak memory within cache, one batch and 300 MiB",
        mode="cached",
        metric="peak_rss",
        rival="bound",
        rival_mode="cached",
        at_least=1.0,
    ),
    _sampling("B", 256, mode="cached", rival="rlinf", rival_mode="cached", at_least=15.0),
    _sampling("B", 256, mode="cached", rival="torchrl-tensor", rival_mode="cached", at_least=2.0),
    _sampling("B", 256, mode="cached", rival="cpprb", rival_mode="cached", at_least=1.0),
    _sampling("B", 4096, mode="cached", rival="rlinf", rival_mode="cached", at_least=40.0),
    _sampling("B", 4096, mode="cached", rival="torchrl-tensor", rival_mode="cached", at_least=2.0),
    _sampling("B", 4096, mode="cached", rival="cpprb", rival_mode="cached", at_least=2.0),
    _stored("A", "bytes on disk, a sixth of rlinf", metric="disk_bytes", rival="rlinf", at_least=6.0),
    *(_stored("A", f"bytes on disk, beside {name}", metric="disk_bytes", rival=name, at_least=1.0) for name in LOSSLESS if name != "rlinf"),
    _stored("A", "ingest until durable, beside rlinf", metric="ingest_durable", rival="rlinf", at_least=1.0),
)


def judge(results: Results) -> list[Verdict]:
    """Every bar held against the medians of its pair."""
    return [_judge(bar, results) for bar in BARS]


def _judge(bar: Bar, results: Results) -> Verdict:
    # Memory is measured in a process of our own, not in a pair.
    pair = OURS.name if bar.rival == "bound" else bar.rival
    ours = results.median(bar.workload, OURS.name, bar.mode, bar.metric, pair)
    return Verdict(bar, ours, results.median(bar.workload, bar.rival, bar.rival_mode, bar.metric, pair))
