"""`agentcore-rl train` with an agent of one's own, as a process: it trains, goes on, and says what is wrong with an agent."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import signal
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from agentcore_rl_toolkit.backends.collection.recording import open_recording
from agentcore_rl_toolkit.backends.training.settings import StepSettings
from agentcore_rl_toolkit.cli.init import write
from agentcore_rl_toolkit.cli.options import from_words, settings_of
from agentcore_rl_toolkit.cli.training.report import Report
from agentcore_rl_toolkit.cli.training.settings import LocalRun, new_run, old_run, read
from agentcore_rl_toolkit.cli.training.stack import Stack
from agentcore_rl_toolkit.cli.training.trackers import check_installed
from agentcore_rl_toolkit.errors import CaptureError, ConfigError, MissingExtraError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, loading
from agentcore_rl_toolkit.policy.loading import Sizes
from agentcore_rl_toolkit.runs import Query, RunReader, TokenSequence
from agentcore_rl_toolkit.runs.folder import status, write_config
from serving import wait_for

from ..conftest import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = ("--groups", "2", "--rollouts", "4")


def events(run: Path) -> list[dict[str, object]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A new agent with little data."""
    folder = write(tmp_path / "shop", "plain")
    for name, count in (("train", 20), ("eval", 3)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def words(tmp_path: Path) -> dict[str, Any]:
    """The options of a run with an empty agent and one row."""
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    return {"agent": str(tmp_path / "agent.py"), "data": str(tmp_path / "rows.jsonl")}


# A command line is a program that ends: what it leaves open goes with it.
@pytest.mark.system
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_new_agent_trains_with_nothing_else_typed_and_goes_on_after_ctrl_c(
    tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    words = ["--agent", "shop/agent.py", "--data", "shop/train.jsonl", "--eval-data", "shop/eval.jsonl"]
    words += ["--steps", "3", *SMALL, "--set", "hold_calls=yes", "--set", "eval_every=1", "--set", "dtype=bfloat16"]
    words += ["--set", "kl_penalty=0.01"]  # groups without spread are trained, too: each step has a gap
    words += ["--out", "run"]
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    wait_for(lambda: any(e["event"] == "step" for e in events(run)), within_s=400, process=process)
    monkeypatch.chdir(tmp_path)
    second = command_line("train", "--resume", "--out", "run")
    assert (second.returncode, f"in use by process {process.pid} " in second.stderr) == (1, True), second
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 130, output
    assert "Training shop" in output
    assert not psutil.wait_procs(below, timeout=30)[1]
    [line] = [line.strip() for line in output.splitlines() if "agentcore-rl train --resume" in line]
    assert line.endswith(" --out run")
    before = set(psutil.Process().children(recursive=True))
    done = command_line(*line.split()[1:])  # in this process, where torch is loaded already
    assert done.returncode == 0, done
    assert set(psutil.Process().children(recursive=True)) <= before
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["rollouts"] == 4 * 3 + 3 * 2 * 4
    assert set(summary["causes"]) <= {"policy"}  # an untrained one may ramble past its tokens, or never come to an end
    assert summary["held_out_scored_before"] == summary["held_out_scored_after"] == 3
    assert summary["usable_tokens"] == summary["sampled_tokens"]
    assert 1e-4 < summary["logprob_gap_max"] < 1.0  # engine and trainer round in bfloat16, and to other numbers
    assert [e["step"] for e in events(run) if e["event"] == "step"] == [0, 1, 2]
    # Each version was evaluated once, whatever Ctrl-C came between, and by its own weights.
    evaluations = [(e["when"], e["version"], e["scored"]) for e in events(run) if e["event"] == "evaluated"]
    assert evaluations == [("before", 0, 3), ("step-1", 1, 3), ("step-2", 2, 3), ("after", 3, 3)]
    low, high = summary["held_out_interval_after"]
    assert 0 <= low <= summary["held_out_reward_after"] <= high <= 1
    assert list(summary["held_out_rewards"]) == ["0", "1", "2", "3"]
    with RunReader(run) as kept:
        for version, phase in enumerate(("before", "eval", "eval", "after")):
            rows = kept.rollouts(Query(phase=phase, step=version))
            used = [kept.rollout(row["id"])["sequences"][0]["versions"] for row in rows]
            found = [set(array("i", base64.b64decode(versions))) - {-1} for versions in used]
            assert found == [{version}] * 3
    assert (run / "policy" / "model.safetensors").is_file()
    # Each row of the data was trained on at most once, in another order than the file's.
    prompts = [json.loads(line)["prompt"] for line in (shop / "train.jsonl").read_text().splitlines()]
    with RunReader(run) as kept:
        rows = sorted(kept.rollouts(Query(phase="train")), key=lambda row: (row["step"], row["grp"]))
        stored = [kept.rollout(row["id"])["dialogue"] for row in rows]
    asked = [next(message["content"] for message in dialogue if message["role"] == "user") for dialogue in stored]
    seen = list(dict.fromkeys(asked))
    assert len(seen) == 3 * 2
    assert set(seen) < set(prompts)
    assert seen != prompts[: len(seen)]
    assert most_at_once(run, ("before", "eval", "after", "train"), both=True) == 0


def most_at_once(run: Path, phases: Sequence[str], *, both: bool = False) -> int:
    """The most rollouts that ran at once; with ``both``, the most while training and evaluation overlapped."""
    with RunReader(run) as kept:
        rows = [row for phase in phases for row in kept.rollouts(Query(phase=phase), limit=1000)]
    spans = [(row["ended_s"] - row["elapsed_s"], row["ended_s"], row["phase"] == "train") for row in rows]
    most = 0
    for moment in (start for start, _, _ in spans):
        running = [trained for start, end, trained in spans if start <= moment < end]
        most = max(most, len(running) if not both or len(set(running)) == 2 else 0)
    return most


FAILS_LATER = """
import pathlib
from agentcore_rl_toolkit import AgentCoreRLApp
from openai import OpenAI

app = AgentCoreRLApp()


@app.rollout_entrypoint
def agent(payload):
    if pathlib.Path(__file__).with_name("broken").read_text():  # sessions see no new files
        raise RuntimeError("the tool's server is gone")
    rollout = payload["_rollout"]
    client = OpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"])
    message = [{"role": "user", "content": payload["prompt"]}]
    reply = client.chat.completions.create(model=rollout["model_id"], messages=message, max_tokens=8)
    return {"rewards": float(len(reply.choices[0].message.content or "") % 2)}


if __name__ == "__main__":
    app.run()
"""


@pytest.mark.system
def test_a_run_ends_after_three_steps_without_a_usable_rollout_and_keeps_to_its_slots(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FAILS_LATER)
    (tmp_path / "broken").touch()
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(4)))
    words = [
        "--agent",
        "agent.py",
        "--data",
        "train.jsonl",
        "--eval-data",
        "eval.jsonl",
        "--out",
        "run",
        "--steps",
        "50",
    ]
    words += ["--groups", "1", "--rollouts", "3"]
    for setting in ("eval_every=1", "max_concurrent=2", "staleness=1", "hold_calls=True"):
        words += ["--set", setting]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    run = tmp_path / "run"
    wait_for(lambda: sum(e["event"] == "step" for e in events(run)) >= 2, within_s=400, process=process)
    (tmp_path / "broken").write_text("now")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1, output
    assert "no rollout of the last 3 steps can be used; 3 of 3 in the last one: agent_error" in output, output
    assert "the tool's server is gone" in output
    assert most_at_once(run, ("before", "eval", "train")) <= 2


GREEDY = """
import json, urllib.request
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
def run(payload):
    if payload["fails"]:
        raise KeyError("lamp")
    rollout = payload["_rollout"]
    ask = {"model": rollout["model_id"], "messages": [{"role": "user", "content": "Lamps, please."}], "temperature": 0}
    headers = {"authorization": f"Bearer {rollout['api_key']}", "content-type": "application/json"}
    call = urllib.request.Request(f"{rollout['base_url']}/chat/completions", json.dumps(ask).encode(), headers)
    with urllib.request.urlopen(call) as reply:
        return {"rewards": 1.0, "metrics": {"sampled": json.load(reply)["usage"]["completion_tokens"]}}


if __name__ == "__main__":
    app.run()
"""


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_keeps_limits_in_evaluations_and_claims_no_more_than_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(GREEDY)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": n, "fails": n == 1}) + "\n" for n in range(2)))
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"held": n, "fails": False}) + "\n" for n in range(6)))
    words = ["--agent", "agent.py", "--data", "rows.jsonl", "--eval-data", "held.jsonl", "--steps", "1", *SMALL]
    limit = 6
    words += ["--set", f'sampling_params={{"max_tokens": {limit}}}', "--out", "run"]
    done = command_line("train", *words)
    assert done.returncode == 0, done
    said: dict[str, list[tuple[int, ...]]] = {}
    with RunReader(tmp_path / "run") as kept:
        for row in kept.rollouts(Query(outcome="ok")):
            [sequence] = map(TokenSequence.decoded, kept.rollout(row["id"])["sequences"])
            ids = tuple(token for token, mask in zip(sequence.ids, sequence.mask, strict=True) if mask)
            said.setdefault(row["phase"], []).append(ids)
    assert {phase: len(ids) for phase, ids in said.items()} == {"before": 6, "train": 4, "after": 6}
    assert {len(ids) for each in said.values() for ids in each} <= set(range(limit + 1))
    assert len(set(said["before"] + said["after"])) == 1  # the agent's temperature is 0
    assert len(set(said["train"])) > 1
    # Nothing was computed, and a rollout that failed does not hide that.
    assert "0 of 1 steps could teach something" in done.stdout
    assert "usable (100%), 0 with gradient (0%)" in done.stdout
    assert "Verdict: cannot tell: on the same 6 inputs the reward changed by +0.000" in done.stdout
    assert "agent_error: KeyError: 'lamp'" in done.stdout
    assert f"sampled {limit}" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["usable_tokens"], summary["gradient_tokens"]) == (summary["sampled_tokens"], 0)
    assert summary["held_out_metrics_after"] == {"sampled": limit}
    assert summary["held_out_change"]["verdict"] == "cannot tell"


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    (tmp_path / "train.toml").write_text(
        'agent = "agent.py"\ndata = "rows.jsonl"\nheld_out = 0.2\ngroups = 3\nsteps = 5\n'
        'judge = "rows.jsonl"\njudge_url = "http://h/v1"\njudge_model = "m"\njudge_price = [0.5, 1]\n'
    )
    found = read({"steps": 9, "judge_weight": 0.5}, tmp_path / "train.toml")
    judge = found.collect_config().judging
    assert judge is not None
    assert (judge.judge, judge.judge_weight, judge.judge_price) == (str(tmp_path / "rows.jsonl"), 0.5, (0.5, 1.0))
    assert (found.steps, found.groups, found.rollouts, found.learning_rate) == (9, 3, 8, 5e-4)
    assert (found.lora_rank, found.tokens_at_once, found.gradient_checkpointing) == (0, 4096, False)
    rows, held_out = found.rows()
    assert len(held_out) == 4
    assert {row["prompt"] for row in rows + held_out} == {str(n) for n in range(20)}
    assert [row["prompt"] for row in held_out] != ["0", "1", "2", "3"]  # data is often sorted
    assert found.rows() == (rows, held_out)
    given = read({"eval_data": str(tmp_path / "rows.jsonl")}, tmp_path / "train.toml")  # instead of the file's share
    assert given.held_out == 0


def test_a_resumed_run_finds_its_teacher_at_another_address(tmp_path: Path, words: dict[str, Any]) -> None:
    run = new_run(read({**words, "teacher_url": "http://old"}, None), tmp_path / "run")
    assert old_run(run, {"teacher_url": "http://new"})[1].teacher_url == "http://new"
    assert old_run(run, {})[1].teacher_url == "http://old"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CaptureError("logprobs differ\nby much"), "logprobs differ"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    ],
)
def test_a_run_that_fails_keeps_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: dict[str, Any],
    error: Exception,
    reason: str,
) -> None:
    settings = read(words, None)
    run = new_run(settings, tmp_path / "run")
    ends = importlib.import_module("agentcore_rl_toolkit.cli.training.run")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ends, "running_or_own", fail)
    with pytest.raises(SystemExit) as end:
        ends.carry_out(settings, run, Console(quiet=True), go_on="the command")
    assert end.value.code == 1
    assert events(run) == [{"event": "failed", "reason": reason}]
    assert status(run) == f"failed: {reason}"
    said = capsys.readouterr().err
    assert reason in said
    assert "Continue with:\n    the command" in said


def test_an_ended_run_continues_with_more_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any]
) -> None:
    run = new_run(read({**words, "steps": 3}, None), tmp_path / "run")
    with pytest.raises(ConfigError, match="drop steps"):
        old_run(run, {"steps": 2})
    assert old_run(run, {"steps": 5})[1].steps == 5
    assert old_run(run, {})[1].steps == 5, "it is stored"
    evaluation = tmp_path / "runs" / "eval-rows"  # it was killed
    evaluation.mkdir(parents=True)
    write_config(evaluation, {"kind": "eval", "agent": words["agent"], "data": words["data"]})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no unfinished run under runs/"):
        old_run(None, {})
    report = Report(run)
    for event, facts in (("evaluated", {"when": "after", "version": 3}), ("step", {"step": 2}), ("step", {"step": 3})):
        report.add(event, facts)
    (run / "summary.json").write_text('{"steps": 3}')
    with open_recording(run, {}) as recording:
        recording.resumed(3, 5)
    assert not (run / "summary.json").exists(), "the run has not ended"
    assert [(e["event"], e.get("when")) for e in events(run)] == [("evaluated", "step-3"), ("step", None)]


@pytest.mark.parametrize(
    ("parameters", "given", "expected"),
    [
        (300_000, {}, (5e-4, 0, 4096, False)),
        (135_000_000, {}, (1e-5, 0, 2048, False)),
        (135_000_000, {"lora_rank": 8}, (1e-4, 8, 2048, False)),
        (600_000_000, {"lora_rank": 0, "learning_rate": 3e-6}, (3e-6, 0, 2048, True)),
        (600_000_000, {}, (1e-4, 16, 2048, True)),
    ],
)
def test_settings_follow_from_the_size_of_the_model(
    parameters: int,
    given: dict[str, Any],
    expected: tuple[Any, ...],
    words: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "sizes_of", lambda folder: Sizes(family="llama", fast=True, parameters=parameters))
    monkeypatch.setattr(loading, "free_memory", lambda: 10**12)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    words |= {"model": str(WEIGHTS_DIR), **given}
    found = read(words, None)
    assert (found.learning_rate, found.lora_rank, found.tokens_at_once, found.gradient_checkpointing) == expected
    assert found.dtype == "float32"
    monkeypatch.setattr(loading, "free_memory", lambda: 4 * parameters)
    with pytest.raises(ConfigError, match=r"training .* million parameters .* needs .* has .* [GM]B free"):
        read(words, None)


def test_the_scorer_of_a_running_stack_is_the_default_for_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("agent", "other", "up", "mine"):
        (tmp_path / f"{name}.py").write_text("def score(payload, answer, reference, trajectory): return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    names = ("agent_arn", "store", "runtime_url", "gateway_url", "gateway_admin_key", "policy_url")
    up = Stack(
        **dict.fromkeys(names, ""), pid=1, agent=f"{tmp_path}/agent.py", model=None, score=f"{tmp_path}/up.py:score"
    )
    for agent, score, scorer in (
        ("agent.py", "", "up.py"),
        ("agent.py", 'score = "mine.py:score"\n', "mine.py"),
        ("other.py", "", None),
    ):
        (tmp_path / "run.toml").write_text(f'agent = "{agent}"\ndata = "rows.jsonl"\n{score}')
        for flags in ({}, {"agent": agent}):
            found = read(flags, tmp_path / "run.toml", up).scoring.score
            assert found == (scorer and f"{tmp_path}/{scorer}:score")
        given = read({"score": f"{tmp_path}/other.py:score"}, tmp_path / "run.toml", up).scoring.score
        assert given == f"{tmp_path}/other.py:score"
    words = {"agent": "agent.py", "data": "rows.jsonl", "credit": "turn"}  # which no scorer can give
    assert read(words, None, up).scoring.score is None
    with pytest.raises(ConfigError, match="a scorer gives one reward per rollout"):
        read({**words, "score": "mine.py:score"}, None)


def test_a_loss_without_a_clip_has_none_by_default_also_in_a_resumed_run(words: dict[str, Any]) -> None:
    settings = read({**words, "loss": "importance_sampling"}, None)
    assert settings.update.token_loss.options == {}
    assert LocalRun(**json.loads(json.dumps(settings.kept(), default=str))).kept() == settings.kept()
    clip = read(words, None).update.token_loss.options
    assert clip == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}


@pytest.mark.parametrize(
    ("stored", "word"),
    [
        ({"credit": "turn", "discount": 0.95, "normalize": "group"}, "credit=episode"),
        ({"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}, "loss=importance_sampling"),
        ({"lora_rank": 16, "lora_alpha": 32}, "lora_rank=0"),
        ({"judge_weight": 0.5, "judge_price": [1, 2], "reward_weight": 0.5}, "seed=1"),
    ],
)
def test_a_setting_that_another_one_leaves_unused_is_no_error_over_a_file_or_in_a_resumed_run(
    tmp_path: Path, words: dict[str, Any], stored: dict[str, Any], word: str
) -> None:
    (tmp_path / "train.json").write_text(json.dumps({**words, **stored}))
    option = from_words([word], LocalRun)
    settings = read(option, tmp_path / "train.json")
    run = new_run(settings, tmp_path / "run")
    (run / "config.json").write_text(json.dumps({**json.loads((run / "config.json").read_text()), **stored, **option}))
    assert old_run(run, {})[1].kept() == settings.kept()


def test_null_takes_back_a_value_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "train.toml").write_text(
        'agent = "agent.py"\ndata = "rows.jsonl"\neval_data = "rows.jsonl"\nclip_low = 0.3\nmax_turns = 3\n'
    )
    words = from_words(["clip_low=null", "max_turns=null", "eval_data=null"], LocalRun)
    found = read(words, tmp_path / "train.toml")
    assert (found.clip_low, found.max_turns, found.eval_data_path) == (None, None, None)


def test_a_tracker_that_is_not_installed_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[mlflow\]"):
        check_installed(["mlflow"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--data", "rows.jsonl"], "--agent FILE is missing"),
        (["--agent", "agent.py"], "--data ROWS.jsonl is missing"),
        (["--agent", "absent.py", "--data", "rows.jsonl"], "there is no agent file"),
        (["--agent", "agent.py", "--data", "absent.jsonl"], "there is no data file"),
        (["--agent", "agent.py", "--data", "empty.jsonl"], "no row"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--model", "absent"], "there is no model folder"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--set", "held_out=1.5"], "held_out"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--set", "learning_rate=-1"], "learning_rate"),
        (
            ["--agent", "agent.py", "--data", "rows.jsonl", "--set", "learning_rate=fast"],
            "`learning_rate` must be a valid number, got 'fast'",
        ),
        (["--set", "seed"], "--set seed: write the setting as NAME=VALUE"),
        (["--config", "typo.toml"], "did you mean `groups`"),
        (["--set", "gruops=3"], "--set gruops=3: there is no such setting; did you mean `groups`?"),
        (["--backend", "verl", "--agent", "agent.py"], "backend verl trains a deployed agent"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--method", "distill"], "distillation needs --teacher-url"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--teacher-url", "http://t"], "is for `agentcore-rl distill`"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--set", "discount=0"], "discount"),
        (
            ["--agent", "agent.py", "--data", "rows.jsonl", "--set", 'loss_options={"clip_hi": 2}'],
            "'clip_hi' is unknown",
        ),
        (["--backend", "verl", "--credit", "turn"], "all settings from --config"),
        (["--backend", "slime"], "all settings from --config"),
        (["--resume", "--out", "nothing"], "no run to continue"),
        (
            ["--backend", "trl", "--agent", "agent.py", "--data", "rows.jsonl"],
            "backend trl trains a deployed agent",
        ),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine, options: list[str], expected: str
) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "typo.toml").write_text('agent = "agent.py"\ndata = "rows.jsonl"\ngruops = 3\n')
    monkeypatch.chdir(tmp_path)
    done = command_line("train", *options)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert not (tmp_path / "runs").exists()


def test_every_spelling_of_a_boolean_setting_means_the_same() -> None:
    for words, value in ((("True", "YES", "on", "1", "y"), True), (("False", "NO", "off", "0", "n"), False)):
        assert [settings_of([f"hold_calls={word}"], StepSettings).hold_calls for word in words] == [value] * 5
    with pytest.raises(ConfigError, match="`hold_calls` must be a valid boolean"):
        settings_of(["hold_calls=maybe"], StepSettings)


def test_a_mapping_is_written_as_json_and_a_list_with_commas() -> None:
    found = from_words(['sampling_params={"temperature": 0.7}', "tracker=mlflow,wandb"], LocalRun)
    assert found == {"sampling_params": {"temperature": 0.7}, "tracker": ["mlflow", "wandb"]}
