"""`agentcore-rl train` with an agent of one's own, as a process: it trains, goes on, and says what is wrong with an agent."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentcore_rl_toolkit.cli.init import write
from agentcore_rl_toolkit.cli.training.job import load_loop
from agentcore_rl_toolkit.cli.training.settings import new_run, old_run, read
from agentcore_rl_toolkit.cli.training.trackers import check_installed
from agentcore_rl_toolkit.errors import ConfigError, MissingExtraError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, loading
from agentcore_rl_toolkit.policy.loading import Sizes
from agentcore_rl_toolkit.runs import Query, RunReader
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


# A command line is a program that ends: what it leaves open goes with it.
@pytest.mark.system
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_new_agent_trains_with_nothing_else_typed_and_goes_on_after_ctrl_c(
    tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    words = ["--agent", "shop/agent.py", "--data", "shop/train.jsonl", "--eval-data", "shop/eval.jsonl"]
    words += ["--steps", "3", *SMALL, "--set", "hold_calls=yes", "--set", "eval_every=1", "--set", "dtype=bfloat16"]
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
    wait_for(lambda: any(e["event"] == "step" for e in events(run)), within_s=200, process=process)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 130, output
    assert "Training shop" in output
    assert not psutil.wait_procs(below, timeout=30)[1]
    [line] = [line.strip() for line in output.splitlines() if "agentcore-rl train --resume" in line]
    assert line.endswith(" --out run")
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    done = command_line(*line.split()[1:])  # in this process, where torch is loaded already
    assert done.returncode == 0, done
    assert set(psutil.Process().children(recursive=True)) <= before
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["rollouts"] == 4 * 3 + 3 * 2 * 4
    assert set(summary["causes"]) <= {"policy"}  # an untrained one may ramble past its tokens, or never come to an end
    assert summary["held_out_scored_before"] == summary["held_out_scored_after"] == 3
    assert summary["trained_token_share"] == 1.0
    assert 1e-4 < summary["logprob_gap_max"] < 1.0  # engine and trainer round in bfloat16, and to other numbers
    assert [e["step"] for e in events(run) if e["event"] == "step"] == [0, 1, 2]
    # Each version was evaluated once, whatever Ctrl-C came between, and by its own weights.
    evaluations = [(e["when"], e["version"], e["scored"]) for e in events(run) if e["event"] == "evaluated"]
    assert evaluations == [("before", 0, 3), ("version-1", 1, 3), ("version-2", 2, 3), ("after", 3, 3)]
    low, high = summary["held_out_interval_after"]
    assert 0 <= low <= summary["held_out_reward_after"] <= high <= 1
    assert list(summary["held_out_rewards"]) == ["0", "1", "2", "3"]
    with RunReader(run) as kept:
        for version, phase in enumerate(("before", "eval", "eval", "after")):
            rows = kept.rollouts(Query(phase=phase, step=version))
            used = [kept.rollout(row["id"])["sequences"][0]["versions"] for row in rows]
            assert [{v for v, _ in spans if v is not None} for spans in used] == [{version}] * 3
    assert (run / "policy" / "model.safetensors").is_file()
    # What it was given is what it was trained on.
    prompts = [json.loads(line)["prompt"] for line in (shop / "train.jsonl").read_text().splitlines()]
    with RunReader(run) as kept:
        stored = [kept.rollout(row["id"]) for row in kept.rollouts(Query(phase="train", step=1))]
    seen = {message["content"] for rollout in stored for message in rollout["dialogue"] if message["role"] == "user"}
    assert seen == set(prompts[2:4])


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    (tmp_path / "train.toml").write_text(
        'agent = "agent.py"\ndata = "rows.jsonl"\nheld_out = 0.2\ngroups = 3\nsteps = 5\n'
        'judge = "rows.jsonl"\njudge_url = "http://h/v1"\njudge_model = "m"\njudge_price = [0.5, 1]\n'
    )
    found = read({"steps": 9, "tracker": (), "judge_weight": 0.5}, tmp_path / "train.toml")
    loop = load_loop()
    judge = loop.collect_config(found.loop_config(loop)).judged_by
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


def test_a_resumed_run_finds_its_teacher_at_another_address(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    words = {"agent": str(tmp_path / "agent.py"), "data": str(tmp_path / "rows.jsonl"), "teacher_url": "http://old"}
    run = new_run(read(words, None), tmp_path / "run")
    assert old_run(run, {"teacher_url": "http://new"})[1].teacher_url == "http://new"
    assert old_run(run, {})[1].teacher_url == "http://old"


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
    parameters: int, given: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "sizes_of", lambda folder: Sizes(family="llama", fast=True, parameters=parameters))
    monkeypatch.setattr(loading, "free_memory", lambda: 10**12)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    words = {
        "agent": str(tmp_path / "agent.py"),
        "data": str(tmp_path / "rows.jsonl"),
        "model": str(WEIGHTS_DIR),
        **given,
    }
    found = read(words, None)
    assert (found.learning_rate, found.lora_rank, found.tokens_at_once, found.gradient_checkpointing) == expected
    assert found.dtype == "float32"
    monkeypatch.setattr(loading, "free_memory", lambda: 4 * parameters)
    with pytest.raises(ConfigError, match=r"training .* million parameters .* needs .* GB are free here"):
        read(words, None)


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
        (["--config", "typo.toml"], "did you mean `groups`"),
        (["--set", "gruops=3"], "'gruops' is no setting"),
        (["--backend", "verl", "--agent", "agent.py"], "backend verl takes an agent that is deployed"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--method", "distill"], "needs --teacher-url URL"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--teacher-url", "http://t"], "is for --method distill"),
        (["--agent", "agent.py", "--data", "rows.jsonl", "--set", "discount=0"], "discount"),
        (["--backend", "verl", "--credit", "turn"], "all its settings from --config"),
        (["--backend", "slime"], "all its settings from --config"),
        (["--resume", "--out", "nothing"], "no run to go on with"),
        (
            ["--backend", "trl", "--agent", "agent.py", "--data", "rows.jsonl"],
            "backend trl takes an agent that is deployed",
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


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        *((word, "drop steps") for word in ("True", "YES", "on", "1", "y")),
        *((word, "drop steps, hold_calls") for word in ("False", "NO", "off", "0", "n")),
        ("maybe", "hold_calls must be a valid boolean"),
    ],
)
def test_every_spelling_of_a_boolean_setting_means_the_same(
    tmp_path: Path, command_line: CommandLine, word: str, refused: str
) -> None:
    (tmp_path / "config.json").write_text('{"hold_calls": true, "steps": 3}')
    options = ["--set", f"hold_calls={word}", "--set", "steps=4"]
    done = command_line("train", "--resume", "--out", str(tmp_path), *options)
    assert done.returncode == 2
    assert refused in done.stderr
