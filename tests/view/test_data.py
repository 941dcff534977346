"""The page's data: whatever is in a run, JSON comes out, and every number leads to the rollouts that it counts."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agentcore_rl_toolkit._servers.host_check import HostCheck
from agentcore_rl_toolkit.runs import Query, Rollout, RunReader, RunWriter, TokenSequence, write_config
from agentcore_rl_toolkit.runs.folder import ROLLOUTS
from agentcore_rl_toolkit.view import data
from agentcore_rl_toolkit.view.export import sample
from agentcore_rl_toolkit.view.server import app


def rollout(n: int, **facts: Any) -> Rollout:
    defaults = {"phase": "eval", "step": None, "group": f"g{n}", "input_key": f"k{n}", "outcome": "ok"}
    defaults |= {"reward": float(n % 2), "score": float(n % 2), "dialogue": [{"role": "user", "content": f"null {n}"}]}
    return Rollout(session_id=f"session-{n}", **{**defaults, **facts})


def write(folder: Path, *rollouts: Rollout) -> Path:
    with RunWriter(folder) as run:
        for each in rollouts:
            run.rollout(each)
    return folder


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    runs = data.Runs([], tmp_path)
    served = app(runs, HostCheck(("localhost", "localhost"), ()), "key")
    with TestClient(served, base_url="http://localhost", raise_server_exceptions=False) as found:
        assert found.get("/?key=key").status_code == 200  # sets the cookie
        yield found


def test_numbers_that_json_does_not_have_are_null(client: TestClient, tmp_path: Path) -> None:
    tokens = TokenSequence(ids=[1, 2], mask=[0, 1], logprobs=[None, -0.5], trainer_logprobs=[None, -math.inf])
    odd = rollout(0, phase="train", step=0, record={"x": math.nan}, elapsed_s=math.inf, sequences=[tokens])
    with RunWriter(write(tmp_path / "odd", odd)) as run:
        run.event("step", {"step": 0, "loss": math.nan, "why": "half a character \ud800"})
    found = client.get("/api/runs/odd").json()
    assert found["metrics"][0]["loss"] is None
    assert found["steps"][0]["gap_max"] is None
    assert client.get("/api/runs/odd/rollouts").json()["rows"][0]["elapsed_s"] is None
    assert client.get("/api/runs/odd/rollouts/1").json()["detail"]["record"] == {"x": None}


@pytest.mark.parametrize(
    ("words", "total"),
    [("text=null", 3), ("tool=null", 0), ("text=%00%00", 0), ("reward_from=nan", 0), ("text=%22%22", 0)],
)
def test_a_text_is_never_anything_else(client: TestClient, tmp_path: Path, words: str, total: int) -> None:
    write(tmp_path / "run", *map(rollout, range(3)))
    assert client.get(f"/api/runs/run/rollouts?{words}").json()["total"] == total


@pytest.mark.parametrize(
    "path",
    [
        *("rollouts?number=99999999999999999999", "rollouts?offset=99999999999999999999", "rollouts?limit=x"),
        *("rollouts?text=a", "rollouts?sort=evil", "rollouts?evil=1", "rollouts?usable=maybe", "evaluation?phase=evil"),
        *("rollouts/99999999999999999999", "groups/99999999999999999999", "rollouts/7", "groups/7"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(client: TestClient, tmp_path: Path, path: str) -> None:
    write(tmp_path / "run", *map(rollout, range(3)))
    found = client.get(f"/api/runs/run/{path}")
    assert found.status_code == 404
    assert found.json()["error"]["message"]


def test_a_damaged_run_says_so_and_keeps_no_other_from_the_list(client: TestClient, tmp_path: Path) -> None:
    write(tmp_path / "whole", rollout(0))
    file = write(tmp_path / "damaged", *(rollout(n, stage="x" * 300) for n in range(400))) / ROLLOUTS
    content = bytearray(file.read_bytes())
    with RunReader(tmp_path / "whole") as run:
        page = int(run._all("PRAGMA page_size")[0][0])
    content[30 * page :] = b"\xab" * (len(content) - 30 * page)
    file.write_bytes(content)
    found = {run["name"]: run["problem"] for run in client.get("/api/runs").json()}
    assert found["whole"] is None
    assert "malformed" in found["damaged"]
    assert "malformed" in client.get("/api/runs/damaged").json()["error"]["message"]


def test_a_tool_has_the_mean_reward_of_rollouts_with_and_without_it() -> None:
    def step(scored: int, score: float | None, **tools: tuple[float | None, ...]) -> dict[str, Any]:
        names = ("calls", "errors", "seconds", "rollouts", "score", "scored")
        every = {name: dict(zip(names, of, strict=True)) for name, of in tools.items()}
        return {"scored": scored, "score": score, "tools": every}

    steps = [step(3, 2.0, a=(3, 1, 0.5, 2, 1.5, 2)), step(2, 1.5, a=(1, 0, None, 1, 0.0, 0), b=(1, 0, 1.0, 1, 1.0, 1))]
    a = {"calls": 4, "errors": 1, "seconds": 0.5, "rollouts": 3, "reward_with": 0.75, "reward_without": 2 / 3}
    b = {"calls": 1, "errors": 0, "seconds": 1.0, "rollouts": 1, "reward_with": 1.0, "reward_without": 0.625}
    assert data.tools([*steps, step(0, None)]) == [{"name": "a", **a}, {"name": "b", **b}]
    unscored = {"calls": 1, "errors": 0, "seconds": None, "rollouts": 2, "reward_with": None, "reward_without": None}
    assert data.tools([step(0, None, c=(1, 0, None, 2, None, 0))]) == [{"name": "c", **unscored}]


def test_the_end_of_the_last_log_is_shown(tmp_path: Path) -> None:
    assert data.log_tail(tmp_path) is None
    (tmp_path / "logs").mkdir()
    for age, (name, text, shown) in enumerate(
        (("old.log", "ab", "ab"), ("logs/new.log", "abcd" + "x" * 3998, "cd" + "x" * 3998))
    ):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
        assert data.log_tail(tmp_path) == {"name": Path(name).name, "text": shown}


def test_every_bar_of_a_histogram_leads_to_its_rollouts(tmp_path: Path) -> None:
    rollouts = [rollout(n, reward=1 + n / 41, score=1 + n / 41) for n in range(42)]
    failed = rollout(99, outcome="agent_error", reward=None, score=1.0)
    with RunReader(write(tmp_path / "run", *rollouts, failed)) as run:
        bars = data.evaluation(run, Query(phase="eval"))["histogram"]
        assert sum(bar["n"] for bar in bars) == 43
        assert [bar["at"] for bar in bars] == pytest.approx([1 + k / 12 for k in range(12)])
        assert [bar["at"] for bar in data.histogram([float(n) for n in range(12)])] == list(range(12))
        for bar in bars:
            assert run.count(Query(reward_from=bar["from"], reward_to=bar["to"])) == bar["n"]


def test_all_inputs_are_counted_and_solved_ones_are_those_of_the_list(client: TestClient, tmp_path: Path) -> None:
    rollouts = [
        rollout(n, phase="train", step=0, input_key=None, score=float(n >= 1000), reward=float(n >= 1000))
        for n in range(1500)
    ]
    write(tmp_path / "run", *rollouts)
    assert client.get("/api/runs/run").json()["inputs"] == {"never": 1000, "sometimes": 0, "always": 500}
    rates = [entry["rate"] for entry in client.get("/api/runs/run/inputs?phase=train").json()]
    assert (rates.count(0), rates.count(1)) == (1000, 500)


def test_runs_of_one_name_are_two_and_a_dead_process_has_nothing_in_flight(tmp_path: Path) -> None:
    folders = [write(tmp_path / place / "run", rollout(0)) for place in ("a", "b")]
    (folders[1] / "run.lock").write_text("")
    (folders[1] / "in_flight.json").write_text(json.dumps({"at_s": 1.0, "pid": 1, "count": 3, "rollouts": []}))
    found = data.Runs(folders, None).overview("run~2")
    assert (found["name"], found["status"], found["in_flight"]) == ("run~2", "stopped", None)


def test_a_run_has_another_version_when_it_grows_and_none_when_its_folder_is_removed(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "FOLDERS_S", 0.0)
    folder = write(tmp_path / "run", rollout(0))
    paths = ["/api/version", "/api/version?run=run"]
    before = [client.get(path).json() for path in paths]
    assert [found["status"] for found in before] == ["", "running"]  # it has no lock, and was just written
    assert [client.get(path).json() for path in paths] == before
    for name in ("metrics.jsonl", "in_flight.json"):
        (folder / name).write_text("{}")
        now = [client.get(path).json() for path in paths]
        assert all(one["version"] != other["version"] for one, other in zip(before, now, strict=True))
        before = now
    shutil.rmtree(folder)
    assert [client.get(path).status_code for path in (paths[1], "/api/runs/run")] == [404, 404]


def test_an_address_leads_to_the_same_run_whichever_was_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "FOLDERS_S", 0.0)
    both = [write(tmp_path / place / "run", rollout(0)) for place in (".", "runs")]
    runs = data.Runs([], tmp_path)
    first = runs.folder("run")
    for newest in both:
        for folder in both:
            os.utime(folder / ROLLOUTS, (1.0 + (folder == newest),) * 2)
        assert runs.folder("run") == first
        assert next(iter(runs.folders().values())) == newest


@pytest.mark.parametrize(("steps", "held", "steps_held"), [(1, 8, 1), (2, 8, 2), (16, 32, 16), (17, 8, 4)])
def test_a_file_holds_every_step_but_of_a_very_long_run(tmp_path: Path, steps: int, held: int, steps_held: int) -> None:
    rollouts = [rollout(n, phase="train", step=n // 8, group=str(n // 2)) for n in range(8 * steps)]
    with RunReader(write(tmp_path / "run", *rollouts)) as run:
        ids, text = sample(run, 8)
        assert (len(ids), len({row["step"] for row in run.rows(ids)})) == (held, steps_held), text
        assert text.startswith("This file holds all") == (held == 8 * steps)


def test_the_run_before_is_the_last_that_was_written_earlier_whatever_the_order_of_the_arguments(
    tmp_path: Path,
) -> None:
    folders = [write(tmp_path / name, rollout(n)) for n, name in enumerate(("first", "second", "third"))]
    for n, folder in enumerate(folders):
        for file in folder.iterdir():
            os.utime(file, (n, n + 1000))
    for given in (folders, folders[::-1]):
        runs = data.Runs(given, None)
        before = [runs.overview(folder.name)["before"] for folder in folders]
        assert [None if found is None else found["name"] for found in before] == [None, "first", "second"]


def test_a_run_is_in_the_list_as_soon_as_its_database_is_there(tmp_path: Path) -> None:
    runs = data.Runs([], tmp_path)
    (tmp_path / "new").mkdir()
    assert runs.heads() == []
    trained = (rollout(n, phase="train", step=step) for n, step in ((1, 0), (2, None)))
    write_config(write(tmp_path / "new", rollout(0), *trained), {"model": "models/m"})
    [head] = runs.heads()
    assert [head[name] for name in ("name", "steps", "rewards", "model", "data")] == ["new", 1, [1.0], "m", None]
