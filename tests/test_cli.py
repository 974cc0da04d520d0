"""The commands, as a person runs them."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from conftest import make
from typer.testing import CliRunner

import trajstore
from trajstore.cli import app, main

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line in this process, which has torch already."""
    out, err = io.StringIO(), io.StringIO()
    given = [str(argument) for argument in arguments]
    environment = mock.patch.dict(os.environ, {"COLUMNS": "120", "NO_COLOR": "1"})
    arguments_given = mock.patch.object(sys, "argv", ["trajstore", *given])
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with environment, arguments_given, streams[0], streams[1], pytest.raises(SystemExit) as ended:
        main()
    return subprocess.CompletedProcess(given, int(ended.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with trajstore.TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([make(seed=seed, steps=6 + seed) for seed in range(3)])
        buffer.save_checkpoint(tmp_path / "pt")
    return tmp_path / "store"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "bench"])  # which has a help of its own
def test_help_ends_in_an_example(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert shown.output.strip().split("\n\n")[-1].strip().startswith("Example: trajstore")


@pytest.mark.parametrize("form", ["store", "pt"])
def test_info(store: Path, form: str) -> None:
    shown = run("info", store.parent / form)
    assert shown.returncode == 0, shown.stderr
    assert "3 trajectories, 63 transitions" in shown.stdout
    assert "ids 0 to 2, T 6 to 8, B 3" in shown.stdout
    assert re.search(r"curr_obs/main_images +uint8 +\[5, 5, 3\]", shown.stdout)
    assert re.search(r"prev_values +float32 +\[1\] +1", shown.stdout)
    summary = json.loads(run("info", store.parent / form, "--json").stdout)
    assert (summary["num_samples"], len(summary["fields"])) == (63, 15)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("--version").stdout)


def test_info_of_an_empty_store(tmp_path: Path) -> None:
    trajstore.open(tmp_path / "s").close()
    assert "0 trajectories, 0 transitions" in run("info", tmp_path / "s").stdout


@pytest.mark.parametrize("form", ["store", "pt"])
def test_sample(store: Path, form: str) -> None:
    shown = run("sample", store.parent / form, "--num", 4, "--fields", "actions", "--fields", "curr_obs")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["actions", "curr_obs/main_images", "curr_obs/states"]
    assert lines[1].endswith("[4, 5, 5, 3]")
    assert re.fullmatch(r"[\d.]+ B in [\d.]+ ms \(.+/s\)", lines[-1])
    described = json.loads(run("sample", store.parent / form, "--num", 4, "--json", "--repeat", 3, "--cache-size", 2).stdout)
    assert described["fields"]["forward_inputs/hidden"] == {"dtype": "bfloat16", "shape": [4, 3]}


def test_verify(store: Path) -> None:
    assert run("verify", store).stdout.endswith("3 trajectories, 0 faults\n")
    shard = next((store / "segments").glob("*/actions/c.0.0"))
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    assert run("verify", store, "--quick").returncode == 0
    broken = run("verify", store)
    assert broken.returncode == 1
    assert "array 'actions'" in broken.stdout
    (fault,) = json.loads(run("verify", store, "--json").stdout)
    assert fault["array"] == "actions"
    assert fault["trajectory_ids"]


def test_bench_is_for_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("bench", "--quick")
    assert (refused.returncode, "source checkout" in refused.stderr) == (1, True)
    monkeypatch.chdir(Path(__file__).parents[1])
    assert "--workloads" in run("bench", "--help").stdout


def test_compact(tmp_path: Path) -> None:
    with trajstore.open(tmp_path / "s", segment_bytes=1) as store:
        store.extend([make(seed=seed) for seed in range(4)])
    assert "4 segments replaced" in run("compact", tmp_path / "s").stdout


def test_the_demo_does_what_it_says(tmp_path: Path) -> None:
    shown = run("demo", tmp_path / "demo", "--trajectories", 2, "--steps", 8)
    assert shown.returncode == 0, shown.stderr
    assert "made      2 trajectories [8, 2]" in shown.stdout
    assert len(trajstore.open(tmp_path / "demo" / "buffer", mode="r")) == 2
    assert len(list((tmp_path / "demo" / "pt").glob("trajectory_*_demo_*.pt"))) == 2
    again = run("demo", tmp_path / "demo")
    assert (again.returncode, again.stderr) == (1, f"trajstore: {tmp_path / 'demo'} is not an empty folder; choose another\n")


@pytest.mark.parametrize("arguments", [["info", "/nowhere"], ["sample", "/nowhere"], ["verify", "/nowhere"], ["compact", "/nowhere"]])
def test_a_failure_is_one_line(arguments: list[str]) -> None:
    failed = run(*arguments)
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("trajstore: no store or zarr checkpoint at /nowhere")
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["info"], ["frobnicate"], ["sample", "x", "--num", "0"], ["sample", "x", "--num", "many"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


@pytest.mark.parametrize("form", ["pt", "store"])
def test_the_module_of_the_buffer_runs(store: Path, form: str) -> None:
    command = [sys.executable, "-m", "trajstore.replay_buffer", "--load-path", str(store.parent / form), "--num-chunks", "9"]
    shown = subprocess.run([*command, "--cache-size", "10", "--enable-cache"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert len(shown.stdout.splitlines()) == 15
    assert re.search(r"^dones +bool +\[9, 1\]$", shown.stdout, re.MULTILINE)
    failed = subprocess.run([*command[:3], "--load-path", "/nowhere"], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stderr) == (1, "trajstore: no checkpoint at /nowhere\n")


def test_the_real_input(lift: Path) -> None:
    for rank in ("rank_0", "rank_1"):
        assert "3 trajectories, 384 transitions" in run("info", lift / rank).stdout
        shown = run("sample", lift / rank, "--num", 256)
        assert re.search(r"forward_inputs/model_hidden +bfloat16 +\[256, 64\]", shown.stdout)
        assert re.search(r"next_obs/wrist_images +uint8 +\[256, 128, 128, 3\]", shown.stdout)
