"""The README's examples run and give the output shown."""

import doctest
import re
from pathlib import Path

import pytest
from conftest import make

import trajstore

README = Path(__file__).parents[1] / "README.md"


def test_the_session_gives_the_output_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (session,) = re.findall(r"```python\n(>>> .*?)```", README.read_text(), re.DOTALL)
    test = doctest.DocTestParser().get_doctest(session, {}, "README", str(README), 0)
    results = doctest.DocTestRunner().run(test)
    assert (results.failed, results.attempted) == (0, session.count(">>>"))


def test_the_drop_in_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(from trajstore import.*?)```", README.read_text(), re.DOTALL)
    namespace = {"trajectories": [make(seed=seed, steps=30, envs=4) for seed in range(8)]}
    exec(example, namespace)
    assert len(namespace["batch"]["actions"]) == 256
    assert len(namespace["buffer"].store) == 2  # one rank's share of eight
    assert len(trajstore.open("runs/buffer", mode="r")) == 2
