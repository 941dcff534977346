"""`agentcore-rl eval` as a user runs it, on a local agent."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.runs import Query, RunReader
from agentcore_rl_toolkit.runs.folder import status

AGENT = """
import os, time
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
def run(payload):
    while os.path.exists(payload.get("held", "")):
        time.sleep(0.02)
    assert payload["_rollout"]["sampling_params"] == {"temperature": 0}
    if payload["answer"] is None:
        raise KeyError("lamp")
    return {"rewards": float(payload["answer"] == 4), "metrics": {"answer": payload["answer"]}}

if __name__ == "__main__":
    app.run()
"""

COLD = ("--sampling-params", '{"temperature": 0}')
COMMAND = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit.cli", "eval"]


def words(arguments: tuple[str, ...]) -> list[str]:
    given = ["--data", "data.jsonl"] if "--data" not in arguments else []
    if "agent.py" in arguments:
        given += ["--model", "none"]  # these agents call no model
    return [*given, *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words(arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"id": f"p{n}", "answer": 4 if n < 6 else 5} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


@pytest.mark.slow
def test_local_agent_is_scored_and_a_run_that_goes_on_starts_nothing_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any
) -> None:
    with (folder / "data.jsonl").open("a") as rows:
        rows.write('\n{"id": "p8", "answer": null}\n{"id": "p9", "answer": 4}')
    options = ("--agent", "agent.py", *COLD, "--concurrency", "4", "--for-training", "--limit", "9")
    monkeypatch.chdir(folder)
    done = command_line("eval", *words(options))
    assert done.returncode == 1, done.stderr
    assert f"reward {6 / 9:.4f}" in done.stdout
    assert "1 agent_error, 8 ok" in done.stdout
    assert "metrics, mean of ok rollouts: answer 4.25" in done.stdout
    assert "exceptions: 1 KeyError" in done.stdout
    assert "9/9 done" in done.stderr
    assert "failed: p8 (agent_error): KeyError: " in done.stderr
    out = folder / "runs/eval-data"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["failures"], summary["metrics"], summary["errors"]) == (1, {"answer": 4.25}, {"KeyError": 1})
    with (out / "results.csv").open() as file:
        table = {row["input_id"]: (row["metrics.answer"], row["error_type"]) for row in csv.DictReader(file)}
    assert (len(table), table["p0"], table["p8"]) == (9, ("4.0", ""), ("", "KeyError"))
    assert len((out / "results.jsonl").read_text().splitlines()) == 9
    with RunReader(out) as kept:
        assert {step["phase"]: step["rollouts"] for step in kept.steps()} == {"train": 9}
        durations = {row["session_id"]: (row["elapsed_s"], row["ended_s"]) for row in kept.rollouts()}
        assert [row["error"].split(":")[0] for row in kept.rollouts(Query(outcome="agent_error"))] == ["KeyError"]
    named = command_line("eval", *words((*options, "--out", "runs/eval-data")))
    assert named.returncode == 2
    assert "--resume" in named.stderr
    sessions = {json.loads(line)["session_id"] for line in (out / "results.jsonl").read_text().splitlines()}
    resumed = command_line("eval", *words((*options, "--resume")))
    assert resumed.returncode == 1, resumed.stderr
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert sessions == {result["session_id"] for result in results}
    with RunReader(out) as kept:  # the look-up of a finished rollout is not its duration
        assert durations == {row["session_id"]: (row["elapsed_s"], row["ended_s"]) for row in kept.rollouts()}
    assert {r["session_id"]: r["elapsed_s"] for r in results} == {name: d[0] for name, d in durations.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--agent", "arn:aws:bedrock-agentcore:us-west-2:1:runtime/x"), "--bucket is missing"),
        (("--agent", "nowhere.py"), "there is no agent file nowhere"),
        (
            ("--agent", "arn:aws:bedrock-agentcore:us-west-2:1:runtime/x", "--model", str(WEIGHTS_DIR)),
            "of a model as --base-url",
        ),
        (("--agent", "agent.py", "--judge", "nowhere.md"), "judge_url, judge_model missing"),
        (
            ("--agent", "agent.py", "--judge", "nowhere.md", "--judge-url", "http://h/v1", "--judge-model", "m"),
            "nowhere.md must be a file with text",
        ),
        (
            ("--judge", "data.jsonl", "--judge-url", "http://h/v1", "--judge-model", "m", "--resume"),
            "--resume does not work with --judge",
        ),
    ],
)
def test_wrong_options_end_with_code_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = command_line("eval", *words(arguments))
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("whom", ["group", pytest.param("process", marks=pytest.mark.nightly)])
def test_ctrl_c_ends_with_130_and_the_command_that_goes_on(folder: Path, whom: str) -> None:
    held = folder / "held"
    held.touch()
    rows = [{"id": f"p{n}", "answer": 4, "held": str(held) if n >= 2 else ""} for n in range(4)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = ["--agent", "agent.py", "--model", "none", *COLD, "--concurrency", "4", "--out", "kept here"]
    with subprocess.Popen(
        [*COMMAND, "--data", "data.jsonl", *options],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "AGENTCORE_RL_MODEL_API_KEY": "s3cret-key"},
    ) as process:
        assert process.stderr is not None
        answer = ""
        while "2/4 done" not in answer:
            line = process.stderr.readline()
            assert line, answer
            answer += line
        if whom == "group":  # as a terminal does
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        answer += process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in answer
    assert "s3cret-key" not in answer
    goes_on = answer.strip().splitlines()[-1].strip()
    assert re.match(r"\S*agentcore-rl eval ", goes_on)
    assert goes_on.endswith("--out 'kept here' --resume")
    held.unlink()
    done = run(folder, *shlex.split(goes_on)[2:])
    assert done.returncode == 0, done.stderr
    assert "4 ok" in done.stdout
    results = (folder / "kept here" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in results] == ["ok"] * 4


def test_a_resumed_evaluation_keeps_its_agent_and_model(folder: Path) -> None:
    (folder / "run").mkdir()
    arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/shop"
    before = {"kind": "eval", "agent": arn, "model_id": "one", "for_training": False, "repeat": 1, "shuffle": False}
    (folder / "run" / "config.json").write_text(json.dumps(before))
    (folder / "run" / "rollouts.sqlite").touch()
    words = ["--bucket", "bucket", "--data", str(folder / "data.jsonl"), "--out", str(folder / "run"), "--resume"]
    for more, named in ((["--agent", arn], "--model-id"), (["--agent", f"{arn}-2", "--model-id", "one"], "--agent")):
        with pytest.raises(ConfigError, match=f"began with another {named}:"):
            CliRunner().invoke(cli, ["eval", *words, *more], catch_exceptions=False, standalone_mode=False)
        assert status(folder / "run") == "stopped"  # and not failed


def test_the_folder_of_a_training_is_no_place_for_an_evaluation(folder: Path) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "config.json").write_text('{"data": "x"}')
    arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/shop"
    words = ["--agent", arn, "--bucket", "bucket", "--data", str(folder / "data.jsonl"), "--out", str(folder / "shop")]
    for more in ([], ["--resume"]):
        with pytest.raises(ConfigError, match="holds a run of another command; choose another --out"):
            CliRunner().invoke(cli, ["eval", *words, *more], catch_exceptions=False, standalone_mode=False)
