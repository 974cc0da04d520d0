"""The harness: what it measures is the same everywhere, and what it writes can be read. No timing is asserted."""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from benchmarks import bars, cli, files, memory, plots, report, run, timing
from benchmarks.episodes import LiftSource, RenderedSource, make_source
from benchmarks.pair import Pair, entrants
from benchmarks.requests import AnswerFile, Request, read_answer
from benchmarks.results import Measurement, Results, Skip, from_json, to_json
from benchmarks.rivals import OURS, RIVALS, Mode, find_rival, select_rivals
from benchmarks.scaling import SampledBatches, worker_seconds
from benchmarks.specs import SPECS, WorkloadSpec, numpy_dtype, quick_spec
from benchmarks.workloads import WEIGHTS_UUID, concatenated_rows, flat_rows, nested_tensors, trajectories

STATE = WorkloadSpec(
    name="B",
    title="tiny states",
    num_trajectories=3,
    num_steps=6,
    num_envs=2,
    episode_steps=4,
    num_states=5,
    cache=3,
    window=3,
    add_size=2,
)
IMAGES = dataclasses.replace(STATE, name="A", title="tiny images", cameras=("main_images", "wrist_images"), image_size=8)
BY_NAME = pytest.mark.parametrize("name", [OURS.name, *RIVALS])


def made(spec: WorkloadSpec) -> list:
    return [trajectory for batch in trajectories(spec, RenderedSource(spec)) for trajectory in batch]


# ---- workloads


@pytest.mark.parametrize("name", SPECS)
def test_raw_bytes_are_those_of_the_data(name):
    spec = quick_spec(SPECS[name])
    first = next(trajectories(spec, RenderedSource(spec)))[0]
    num_bytes = sum(values.nbytes for values in first.fields.values())
    assert num_bytes * spec.num_trajectories == spec.raw_bytes
    for field in spec.fields:
        values = first.fields[field.path]
        assert values.shape == (spec.num_steps + field.extra_rows, spec.num_envs, *field.row_shape)
        assert values.dtype == numpy_dtype(field.dtype)


def test_full_workloads_have_the_sizes_they_are_known_by():
    assert SPECS["A"].raw_bytes == pytest.approx(606e6, rel=0.01)
    assert SPECS["A"].batch_bytes(256) == pytest.approx(50.5e6, rel=0.01)
    assert len(SPECS["B"].fields) == 9
    assert SPECS["C"].window > SPECS["C"].cache
    assert (SPECS["D"].num_steps, SPECS["D"].num_envs) == (500, 16)
    assert SPECS["E"].num_trajectories == 100_000
    assert SPECS["A"].batch_bytes(4096) == SPECS["A"].num_samples * SPECS["A"].row_bytes


@pytest.mark.parametrize("spec", [STATE, IMAGES], ids=["state", "images"])
def test_data_is_the_same_each_time_and_whatever_the_group(spec):
    again = [t for batch in trajectories(spec, RenderedSource(spec)) for t in batch]
    for one, two in zip(made(spec), again, strict=True):
        assert one.weights_id == two.weights_id
        for path, values in one.fields.items():
            np.testing.assert_array_equal(values, two.fields[path], err_msg=path)


def test_no_two_environments_have_equal_frames():
    frames = np.concatenate([flat_rows(t)["curr_obs/wrist_images"] for t in made(IMAGES)])
    assert len(np.unique(frames.reshape(len(frames), -1), axis=0)) == len(frames)


def test_next_observation_is_the_following_one_within_an_episode():
    for trajectory in made(IMAGES):
        for key in ("states", "main_images"):
            current, following = trajectory.fields[f"curr_obs/{key}"], trajectory.fields[f"next_obs/{key}"]
            for step in range(IMAGES.num_steps - 1):
                same = np.array_equal(following[step], current[step + 1])
                assert same == ((step + 1) % IMAGES.episode_steps != 0)


def test_flags_lose_their_first_row_and_rows_are_time_major():
    trajectory = made(STATE)[0]
    rows = flat_rows(trajectory)
    np.testing.assert_array_equal(rows["dones"].reshape(6, 2, 1), trajectory.fields["dones"][1:])
    np.testing.assert_array_equal(rows["actions"][1 * 2 + 1], trajectory.fields["actions"][1, 1])
    assert trajectory.fields["dones"][4].all()
    assert trajectory.weights_id == f"{WEIGHTS_UUID}_0"


def test_nested_tensors_have_the_named_dtypes():
    nested = nested_tensors(made(IMAGES)[0])
    assert nested["forward_inputs"]["model_hidden"].dtype == torch.bfloat16
    assert nested["curr_obs"]["main_images"].shape == (6, 2, 8, 8, 3)


def write_recording(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for rank in range(2):
        values = {}
        for field in dataclasses.replace(SPECS["A"], num_envs=2).fields:
            shape = (64 + field.extra_rows, 2, *field.row_shape)
            tensor = torch.from_numpy(rng.integers(0, 200, shape, dtype=np.uint8)).to(getattr(torch, field.dtype))
            name, _, key = field.path.partition("/")
            if key:
                values.setdefault(name, {})[key] = tensor
            else:
                values[name] = tensor
        (folder / f"rank_{rank}").mkdir(parents=True)
        torch.save(values, folder / f"rank_{rank}" / "trajectory_0_x_0.pt")


def test_recorded_frames_are_used_and_no_two_slots_share_one(tmp_path):
    assert isinstance(make_source(SPECS["A"], tmp_path), RenderedSource)
    write_recording(tmp_path)
    source = make_source(SPECS["A"], tmp_path)
    assert isinstance(source, LiftSource)
    frames = source.episodes(range(48))["curr_obs/main_images"][:, 0]
    assert frames.shape == (48, 128, 128, 3)
    assert len({frame.tobytes() for frame in frames}) == 48
    halved = make_source(SPECS["D"], tmp_path).episodes(range(3))
    assert halved["next_obs/main_images"].shape == (3, 64, 64, 64, 3)
    assert isinstance(make_source(SPECS["B"], tmp_path), RenderedSource)


def test_a_workload_without_steps_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        dataclasses.replace(STATE, num_steps=0)


# ---- rivals


def written(name: str, spec: WorkloadSpec, root: Path):
    """The rival, and the folder it wrote `spec` to; skips the test where it can't."""
    rival = find_rival(name)
    author = find_rival(rival.store_of) if rival.store_of else rival
    reason = rival.unavailable() or author.unavailable() or rival.unsuited(spec)
    if reason:
        pytest.skip(reason)
    writer = author.writer(root, spec)
    for batch in trajectories(spec, RenderedSource(spec)):
        writer.add(batch)
    writer.commit()
    writer.close()
    return rival


def as_paths(batch, prefix: str = "") -> dict[str, np.ndarray]:
    """A batch of any rival as path -> numpy array, bfloat16 as bits."""
    if isinstance(batch, list):
        return {field.path: values for field, values in zip(IMAGES.fields, batch, strict=True)}
    found = {}
    for key, value in batch.items():
        if isinstance(value, np.ndarray):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
        else:
            found |= as_paths(value, f"{prefix}{key}/")
    return found


@BY_NAME
def test_every_row_of_a_batch_is_a_transition_that_was_added(name, tmp_path):
    spec = STATE if name == "cpprb" else IMAGES
    rival = written(name, spec, tmp_path)
    rows = concatenated_rows(made(spec))
    by_action = {action.tobytes(): row for row, action in enumerate(rows["actions"])}
    for mode in rival.modes:
        reader = rival.reader(tmp_path, spec, mode)
        try:
            batch = reader.sample(16)
            if name == "floor-memcpy":
                assert batch.nbytes == spec.batch_bytes(16)
                continue
            found = as_paths(batch)
            assert set(found) == {field.path for field in spec.fields}
            sources = [by_action[action.tobytes()] for action in found["actions"]]
            assert len(set(sources)) > 1
            for path, values in found.items():
                np.testing.assert_array_equal(values, rows[path][sources], err_msg=path)
        finally:
            reader.close()


@BY_NAME
def test_a_batch_larger_than_the_window_is_clamped(name, tmp_path):
    rival = written(name, STATE, tmp_path)
    reader = rival.reader(tmp_path, STATE, rival.modes[0])
    batch = reader.sample(1000)
    reader.close()
    sizes = {len(batch)} if isinstance(batch, np.ndarray) else set()
    if isinstance(batch, dict):
        sizes = {len(values) for values in as_paths(batch).values()}
        assert sizes == {STATE.num_samples}


def test_rivals_are_found_by_name_and_by_the_first_part_of_it():
    assert [rival.name for rival in select_rivals("torchrl, cpprb")] == ["torchrl-tensor", "cpprb", "torchrl-memmap"]
    assert [rival.name for rival in select_rivals("")] == list(RIVALS)
    with pytest.raises(ValueError, match="no rival 'nobody'"):
        select_rivals("nobody")


def test_entrants_of_a_mode_follow_each_other_ours_first():
    labels = [entrant.label for entrant in entrants([OURS, RIVALS["rlinf"]])]
    assert labels == [
        ("trajstore", "cached"),
        ("rlinf", "cached"),
        ("trajstore", "uncached"),
        ("rlinf", "uncached"),
    ]


# ---- reading a store by its specification


def write_store(root: Path) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """A store made with zarr and json alone, one listed segment and one that the index lacks: [4, 2] trajectories."""
    zarr = pytest.importorskip("zarr")
    rng = np.random.default_rng(3)
    store = root / "store"
    fields = [
        field("actions", array="actions", row_shape=[2]),
        field("dones", array="dones", dtype="bool", extra_rows=1, extra_first=True),
        field("prev_values", array="prev_values", extra_rows=1),
        field("curr_obs/states", array="obs/states", row_shape=[3], frame=0),
        field("next_obs/states", array="obs/states", row_shape=[3], frame=1),
    ]
    expected, entries = [], {}
    for segment, count in ((0, 2), (1, 1)):
        parts, entries[segment] = {}, []
        for position in range(count):
            arrays = {
                "actions": rng.random((8, 2), np.float32),  # [B * T]
                "dones": rng.random((10, 1)) < 0.5,  # [B * (T + 1)]
                "prev_values": rng.random((10, 1), np.float32),
                "obs/states": rng.random((10, 3), np.float32),  # five frames an environment
                "curr_frame": np.array([0, 1, 2, 3, 5, 6, 7, 8], np.int32),
            }
            entries[segment].append(
                {"num_steps": 4, "num_envs": 2, "row_start": 8 * position, "env_start": 2 * position}
                | {"frame_start": 10 * position, "num_frames": 10, "id": len(expected)}
            )
            expected.append(time_major(arrays))
            for name, values in arrays.items():
                parts.setdefault(name, []).append(values)
        for name, values in parts.items():
            array = np.concatenate(values)
            zarr.create_array(store / "segments" / str(segment) / name, data=array, chunks=(4, *array.shape[1:]))
        write_attributes(
            store / "segments" / str(segment),
            {"fields": fields, "trajectories": entries[segment], "recover": True},
        )
    columns = ["segment", "schema", "num_steps", "num_envs", "row_start", "env_start", "frame_start"]
    table = [[entry.get(name, 0) for entry in entries[0]] for name in columns]
    write_attributes(store / "index", {"generation": 4})
    zarr.create_array(
        store / "index" / "4",
        data=np.array(table, np.int64),
        attributes={"trajstore": {"columns": columns, "schemas": [fields], "next_segment": 1}},
    )
    return root, expected


def field(path, *, array, dtype="float32", row_shape=(1,), extra_rows=0, extra_first=False, frame=None):
    return {"path": path, "array": array, "dtype": dtype, "row_shape": list(row_shape)} | {
        "extra_rows": extra_rows,
        "extra_first": extra_first,
        "frame": frame,
    }


def write_attributes(folder: Path, attributes: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"trajstore": attributes}}
    (folder / "zarr.json").write_text(json.dumps(document))


def time_major(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a batch of all samples, in order, must hold."""

    def steps(values, rows, start=0):
        # [B * rows, ...] -> [T, B, ...] -> [T * B, ...]
        return np.moveaxis(values.reshape(2, rows, -1), 1, 0)[start : start + 4].reshape(8, -1)

    return {
        "actions": steps(arrays["actions"], 4),
        "dones": steps(arrays["dones"], 5, 1),
        "prev_values": steps(arrays["prev_values"], 5),
        "curr_obs/states": steps(arrays["obs/states"], 5),
        "next_obs/states": steps(arrays["obs/states"], 5, 1),
    }


@pytest.mark.parametrize("name", ["zarr-python", "tensorstore"])
def test_store_is_read_by_its_specification(name, tmp_path):
    if reason := RIVALS[name].unavailable():
        pytest.skip(reason)
    root, expected = write_store(tmp_path)
    reader = RIVALS[name].reader(root, STATE, Mode.UNCACHED)
    samples = np.array([23, 0, 9, 9, 5, 16, 15])
    batch = reader.gather(samples)
    for path in expected[0]:
        rows = np.concatenate([trajectory[path] for trajectory in expected])
        np.testing.assert_array_equal(batch[path], rows[samples], err_msg=path)


# ---- measuring


def test_turns_are_taken_and_every_call_is_kept():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    budget = dataclasses.replace(timing.QUICK, max_calls=6, turn_calls=3, turn_s=60.0, sampling_s=60.0)
    samples = timing.take_turns(calls, budget)
    assert "".join(order) == "ab" + "aaabbb" * 2
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": 6, "b": 6}


def test_a_call_that_uses_up_its_time_is_warmed_up_and_counted_once():
    order = []
    calls = {"slow": lambda: (order.append("slow"), time.sleep(0.02)), "fast": lambda: order.append("fast")}
    budget = dataclasses.replace(timing.QUICK, sampling_s=0.01, max_calls=2)
    samples = timing.take_turns(calls, budget)
    assert (order.count("slow"), len(samples["slow"])) == (2, 1)
    assert len(samples["fast"]) >= 2


def test_rounds_end_by_number_and_by_time():
    assert list(timing.Rounds(dataclasses.replace(timing.QUICK, rounds=3, rounds_s=60.0))) == [0, 1, 2]
    assert list(timing.Rounds(dataclasses.replace(timing.QUICK, rounds=3, rounds_s=-1.0))) == [0]


def test_links_count_once_and_dropping_leaves_the_bytes(tmp_path):
    (tmp_path / "one").write_bytes(b"x" * 100_000)
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert files.tree_bytes(tmp_path) == 100_000
    files.sync_tree(tmp_path)
    outcome = files.drop_page_cache(tmp_path)
    assert outcome.method in ("posix_fadvise", "none")
    assert outcome.resident_fraction is None or 0.0 <= outcome.resident_fraction <= 1.0
    assert (tmp_path / "one").read_bytes() == b"x" * 100_000


@pytest.mark.skipif(not memory.STATUS.exists(), reason="no /proc")
def test_peak_memory_sees_what_was_freed_again():
    with memory.PeakMemory() as peak:
        before = memory.status_bytes("VmRSS")
        np.ones(64 << 20, np.uint8).sum()
    assert peak.resident >= before + (60 << 20)


def test_loader_workers_give_batches(tmp_path):
    rival = written("h5py", STATE, tmp_path)
    dataset = SampledBatches(rival, tmp_path, STATE, Mode.UNCACHED)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=2)
    assert len(worker_seconds(loader, num_batches=2, num_blocks=2)) == 2


# ---- results


def measurement(rival: str, mode: str, metric: str, *samples: float, pair: str = "rlinf", workload: str = "A") -> Measurement:
    unit = "bytes" if metric.endswith(("bytes", "rss")) else "s"
    return Measurement(workload=workload, pair=pair, rival=rival, mode=mode, metric=metric, unit=unit, samples=tuple(samples))


CANNED = Results(
    machine={"processor": "Abacus 9", "cores": 2, "memory_bytes": 8e9, "system": "X 1", "python": "3.11"}
    | {"packages": {"numpy": "2"}},
    settings={"quick": False, "threads": 2, "rivals": ["rlinf"]},
    workloads={
        "A": {"title": "images", "data": "canned", "num_samples": 3072, "raw_bytes": 606e6}
        | {"batch_256_bytes": 50.5e6, "cache": 6, "window": 6}
    },
    measurements=(
        measurement("trajstore", "cached", "sample_256", 0.003, 0.004, 0.005, 0.004, 0.004),
        measurement("rlinf", "cached", "sample_256", 0.024, 0.026, 0.022, 0.024, 0.024),
        measurement("trajstore", "cached", "sample_256", 0.006, pair="floor-take"),
        measurement("floor-take", "cached", "sample_256", 0.005, pair="floor-take"),
        measurement("trajstore", "", "disk_bytes", 90e6),
        measurement("rlinf", "", "disk_bytes", 606e6),
        measurement("trajstore", "", "ingest_durable", 4.0),
        measurement("rlinf", "", "ingest_durable", 3.0),
        measurement("trajstore", "cached", "peak_rss", 9e8, pair="trajstore"),
        measurement("trajstore", "uncached", "threads_1_sample_256", 0.02),
        measurement("trajstore", "uncached", "threads_2_sample_256", 0.01),
    ),
    skips=(Skip(workload="A", rival="cpprb", reason="state only"),),
)  # fmt: skip


def test_results_come_back_from_json():
    text = to_json(CANNED)
    assert from_json(text) == CANNED
    entry = json.loads(text)["measurements"][0]
    assert set(entry) == {"workload", "pair", "rival", "mode", "metric", "unit", "samples", "note", "spread"}
    assert entry["spread"] == pytest.approx({"median": 0.004, "p10": 0.0034, "p90": 0.0046, "min": 0.003})
    with pytest.raises(ValueError, match="schema version 0"):
        from_json(text.replace('"schema_version": 1', '"schema_version": 0'))


def test_a_measurement_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        measurement("rlinf", "cached", "sample_256")


def test_bars_take_both_numbers_from_one_pair():
    verdicts = {v.bar.what: v for v in bars.judge(CANNED) if v.bar.workload == "A"}
    assert verdicts["sample(256) cached, beside rlinf cached"].ratio == pytest.approx(6.0)
    assert verdicts["sample(256) cached, beside rlinf cached"].outcome == "met"
    assert verdicts["sample(256) cached, beside floor-take cached"].ratio == pytest.approx(5 / 6)
    assert verdicts["bytes on disk, a sixth of rlinf"].outcome == "met"
    assert verdicts["ingest until durable, beside rlinf"].outcome == "not met"
    assert verdicts["sample(256) uncached, beside zarr-python uncached"].outcome == "not measured"


def test_bars_name_rivals_and_workloads_that_exist():
    for bar in bars.BARS:
        assert bar.workload in SPECS
        assert bar.rival == "bound" or Mode(bar.rival_mode or bar.mode or "cached") in (
            *RIVALS[bar.rival].modes,
            Mode.CACHED,
        )


def test_report_shows_medians_ratios_bars_and_who_is_missing():
    page = report.report(CANNED)
    assert "Abacus 9, 2 cores, 2 used, 8.00 GB memory" in page
    assert "| rlinf cached | 24.0 ms (22.8 ms to 25.2 ms) | 6.00 x |" in page
    assert "| **trajstore** | 90.0 MB | - | 4.00 s | - | - |" in page
    assert "| A | sample(256) cached, beside rlinf cached | 5.00 | 6.00 | met |" in page
    assert "| A trajstore uncached | threads | 2 | 10.0 ms | 2.00 x |" in page
    assert "| A | cpprb | state only |" in page
    widths = [line.count("|") for line in page.splitlines() if line.startswith("|")]
    assert min(widths) >= 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(37e-6, "37.0 us"), (999.7e-6, "1.00 ms"), (0.29, "290 ms"), (1.5, "1.50 s"), (1234.0, "1,234 s")],
)
def test_seconds_are_shown_in_the_unit_that_fits(seconds, text):
    assert report.format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(12, "12.0 B"), (76e6, "76.0 MB"), (2.5e9, "2.50 GB")])
def test_bytes_are_shown_in_the_unit_that_fits(count, text):
    assert report.format_bytes(count) == text


def test_plots_are_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    saved = plots.save_plots(CANNED, tmp_path)
    assert [path.name for path in saved] == ["sample_A.png", "disk_A.png", "scaling.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in saved)


# ---- the whole


def test_a_pair_is_measured_from_ingest_to_cold(tmp_path, monkeypatch):
    if reason := RIVALS["torchrl-memmap"].unavailable():
        pytest.skip(reason)
    monkeypatch.setitem(SPECS, "B", dataclasses.replace(STATE))
    monkeypatch.setattr("benchmarks.requests.quick_spec", lambda spec: spec)
    request = Request(task="pair", workload="B", rival="torchrl-memmap", quick=True, root=str(tmp_path / "data"), threads=1)
    assert Request.from_json(request.to_json()) == request
    Pair(request, AnswerFile(tmp_path / "answer.json", request)).run()
    answer = read_answer(tmp_path / "answer.json")
    assert not answer.skips
    metrics = {m.metric for m in answer.measurements if m.rival == "torchrl-memmap"}
    assert metrics == {
        *("ingest_acknowledged", "ingest_durable", "disk_bytes", "open", "sample_256"),
        *("checkpoint_save", "checkpoint_load", "cold_open", "cold_sample_256"),
    }
    clamped = next(m for m in answer.measurements if m.metric == "sample_256")
    assert clamped.note == "clamped to the window's 36 rows"


def test_a_stage_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(SPECS, "B", dataclasses.replace(STATE))
    monkeypatch.setattr("benchmarks.requests.quick_spec", lambda spec: spec)
    monkeypatch.setattr(Pair, "checkpoint", lambda pair: 1 / 0)
    request = Request(task="pair", workload="B", rival="floor-take", quick=True, root=str(tmp_path), threads=1)
    Pair(request, AnswerFile(tmp_path / "answer.json", request)).run()
    answer = read_answer(tmp_path / "answer.json")
    assert [skip.reason for skip in answer.skips] == ["checkpoint failed: ZeroDivisionError: division by zero"]
    assert any(m.metric == "sample_256" for m in answer.measurements)


def test_command_writes_json_page_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--quick", "--workloads", "B", "--rivals", "floor-take", "--output", str(tmp_path), "--threads", "1"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    results = from_json((tmp_path / "results.json").read_text())
    assert ("floor-take", "cached") in results.series("B")
    assert not [skip for skip in results.skips if "failed" in skip.reason]
    assert "## Bars" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "sample_B.png").exists()


def test_a_process_that_fails_is_named(tmp_path, monkeypatch):
    def unable(request):
        return run.read_answer(tmp_path / "absent"), "ended with code 1: no such thing"

    monkeypatch.setattr(run, "ask", unable)
    plan = run.Plan(workloads=("B",), rivals=(RIVALS["floor-take"],), quick=True, threads=1)
    *_, results = run.Runner(plan, tell=lambda line: None).run()
    assert "no such thing" in results.skips[-1].reason


def test_a_quick_run_begins_nothing_after_its_time(monkeypatch):
    monkeypatch.setattr(run, "ask", lambda request: pytest.fail("begun too late"))
    clock = itertools.chain([0.0], itertools.repeat(1e6))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    plan = run.Plan(workloads=("B",), rivals=(RIVALS["floor-take"],), quick=True, threads=1)
    *_, results = run.Runner(plan, tell=lambda line: None).run()
    assert results.skips[-1] == Skip(workload="B", rival="floor-take", reason="out of time (quick)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "Z"], "no workload Z"),
        (["--rivals", "nobody"], "no rival"),
        (["--lift", "nowhere"], "no recorded"),
    ],
)
def test_wrong_usage_ends_with_code_two(arguments, message):
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


def test_help_ends_with_an_example():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "Example: python -m benchmarks" in result.output.strip().splitlines()[-1]
