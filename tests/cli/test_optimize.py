"""`agentcore-rl optimize`, against an agent, a data plane and a reflection model over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from agentcore_rl_toolkit import AgentCoreRLApp, rollout_text
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.runs import RunReader
from agentcore_rl_toolkit.runs.folder import read_metrics
from scripted_runtime import ARN, TEST_CREDENTIALS, ScriptedRuntime
from serving import hosted

from ..conftest import CommandLine

OWN = "Add the numbers."
RULES = {"tax": "Add the tax.", "cents": "Round to cents."}


def agent(payload: dict[str, Any]) -> dict[str, Any]:
    """An agent that follows a rule if its prompt has it."""
    if payload.get("reads") == "nothing":
        return {"rewards": 1.0}
    system = rollout_text(payload, "system", OWN)
    if payload.get("lost") and system != OWN:
        raise ConnectionError("the model's endpoint hung up")
    rule = RULES[payload["rule"]]
    if payload.get("judged"):
        return {"did": "followed the rule" if rule in system else f"missed the rule {rule}"}
    return {"rewards": 1.0} if rule in system else {"rewards": 0.0, "feedback": f"A rule says: {rule}"}


@pytest.fixture(scope="module")
def runtime() -> Iterator[ScriptedRuntime]:
    """A data plane with the agent behind it."""
    app = AgentCoreRLApp()
    app.rollout_entrypoint(agent)
    with hosted(app) as url, ScriptedRuntime() as runtime:
        runtime.agent_url = url
        yield runtime


def copies_the_rule(messages: list[dict[str, Any]], tools: Any) -> str:
    """Adds the first rule of the feedback to the text of today."""
    now, *shown = re.findall(r"```\n(.*?)\n```", messages[-1]["content"], re.DOTALL)
    rules = re.findall(r"A rule says: (.*)", "".join(shown))
    return f"```\n{now} {rules[0]}\n```"


Optimize = Callable[..., Any]


@pytest.fixture
def optimize(
    runtime: ScriptedRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> Optimize:
    """Run the command in a folder, with the answers of a reflection model."""
    for name, value in {**TEST_CREDENTIALS, "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": runtime.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, "train", 8, lost=1)
    write_rows(tmp_path, "eval", 4)
    words = f"optimize --agent {ARN} --bucket file://{tmp_path}/store --data train.jsonl --eval-data eval.jsonl"

    def run(decide: Any, *more: str, url: str | None = None) -> Any:
        with ScriptedModel(lambda messages, tools: answer(decide, messages, tools)) as model:
            at = ["--reflect-url", url or f"{model.url}/v1", "--reflect-model", "scripted"]
            return command_line(*words.split(), *at, "--out", "run", *more)

    return run


def answer(decide: Any, messages: list[dict[str, Any]], tools: Any) -> str:
    return "ready" if "```" not in messages[-1]["content"] else decide(messages, tools)


def write_rows(folder: Path, name: str, number: int, **more: Any) -> None:
    rows = [{"id": f"{name}-{n}", "rule": ["tax", "cents"][n % 2]} for n in range(number)]
    rows[-1] |= more
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_planted_better_text_is_found_and_a_lost_rollout_counts_against_none(
    optimize: Optimize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # a run that cannot start may start again, with other rows too
        patch.setattr("agentcore_rl_toolkit.deploy.quotas.before_a_run", Mock(side_effect=ConfigError("no quota")))
        assert "no quota" in optimize(copies_the_rule, "--set", "seed=9").stderr
    done = optimize(copies_the_rule, "--max-rollouts", "90")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    facts = json.loads((run / "summary.json").read_text())
    assert (facts["before"]["mean"], facts["after"]["mean"]) == (0.0, 1.0)
    gain = facts["gain"]
    assert (gain["mean"], gain["inputs"], gain["better"], gain["worse"]) == (1.0, 4, 4, 0)
    assert gain["verdict"] == "cannot tell"  # four inputs may have become better by chance
    assert "Verdict: cannot tell: on the same 4 inputs the reward changed by +1.000" in done.stdout
    assert facts["texts"]["system"].startswith(OWN)
    assert all(rule in facts["texts"]["system"] for rule in RULES.values())
    assert json.loads((run / "rollout_texts.json").read_text()) == facts["texts"]
    candidates = json.loads((run / "candidates.json").read_text())
    assert candidates[0]["texts"] == {"system": OWN}
    assert (candidates[-1]["texts"], candidates[-1]["mean"]) == (facts["texts"], 1.0)
    lost = [
        score for e in read_metrics(run) if e["event"] == "tried" for name, score in e["scores"] if name == "train-7"
    ]
    assert lost[0] == 0.0  # with the first text
    assert set(lost[1:]) == {None}
    with RunReader(run) as reader:
        phases = {step["phase"]: step for step in reader.steps()}
        assert (phases["before"]["rollouts"], phases["after"]["rollouts"]) == (4, 4)
        assert sum(step["rollouts"] for step in reader.steps()) == facts["spent"]["rollouts"] <= 90


def test_a_run_that_ended_early_goes_on_and_repeats_nothing_that_is_known(optimize: Optimize, tmp_path: Path) -> None:
    proposals: list[str] = []

    def fails_later(messages: list[dict[str, Any]], tools: Any) -> str:
        if proposals:
            raise RuntimeError("the endpoint is gone")  # an answer of status 400
        proposals.append(copies_the_rule(messages, tools))
        return proposals[0]

    stopped = optimize(fails_later)
    assert stopped.returncode == 1
    assert "the reflection model scripted at http" in stopped.stderr
    assert "--resume continues" in stopped.stderr
    known = read_metrics(tmp_path / "run")
    again = optimize(copies_the_rule)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    done = optimize(copies_the_rule, "--resume")
    assert done.returncode == 0, done.stderr
    facts, events = json.loads((tmp_path / "run/summary.json").read_text()), read_metrics(tmp_path / "run")
    assert events[: len(known)] == known
    assert facts["after"]["mean"] == 1.0
    assert [event["event"] for event in events].count("before") == 1
    whole = [e for e in events if e["event"] == "tried" and e["texts"] == {"system": OWN} and len(e["scores"]) == 4]
    assert len(whole) == 1
    with RunReader(tmp_path / "run") as reader:
        assert sum(step["rollouts"] for step in reader.steps()) == facts["spent"]["rollouts"]


def test_a_text_that_hardly_a_rollout_ends_with_stops_the_search(optimize: Optimize, tmp_path: Path) -> None:
    rows = [{"id": f"t{n}", "rule": "tax", "lost": 1} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = optimize(copies_the_rule)
    assert done.returncode == 1
    assert re.search("no score for most of 3 rollouts; --resume continues.*the model's endpoint hung up", done.stderr)
    assert not (tmp_path / "run" / "rollout_texts.json").exists()


def test_proposals_that_are_rubbish_leave_the_agent_its_text(optimize: Optimize, tmp_path: Path) -> None:
    done = optimize(lambda messages, tools: "As a language model I cannot help.", "--max-rollouts", "40")
    assert done.returncode == 0, done.stderr
    assert "the search found no better text" in done.stdout
    assert not (tmp_path / "run" / "rollout_texts.json").exists()
    tried = [e["texts"]["system"] for e in read_metrics(tmp_path / "run") if e["event"] == "tried"]
    assert set(tried) == {OWN, "As a language model I cannot help."}


def test_only_the_named_texts_change_and_money_is_a_budget(optimize: Optimize, tmp_path: Path) -> None:
    prices = ("max_usd=3.2", "usd_per_rollout=0.1", "usd_per_million_output=1")
    done = optimize(copies_the_rule, "--text", "system", *(word for price in prices for word in ("--set", price)))
    assert done.returncode == 0, done.stderr
    spent = json.loads((tmp_path / "run/summary.json").read_text())["spent"]
    assert spent["rollouts"] <= 32
    assert spent["usd"] == pytest.approx(0.1 * spent["rollouts"], abs=0.001)


def scores_by_the_rule(messages: list[dict[str, Any]], tools: Any) -> str:
    """A judge that gives no point for a missed rule, and names it."""
    attempts = json.loads(messages[-1]["content"])["attempts"]
    found = [(attempt["id"], re.search(r"missed the rule ([\w ]+\.)", attempt["dialogue"])) for attempt in attempts]
    scores = [
        {"id": i, "score": float(not missed), "reason": f"A rule says: {missed[1]}" if missed else "All is well."}
        for i, missed in found
    ]
    return json.dumps({"scores": scores})


def test_a_judge_gives_rewards_and_words_where_the_agent_gives_none(optimize: Optimize, tmp_path: Path) -> None:
    for name, number in (("train", 8), ("eval", 4)):
        rows = [{"id": f"{name}-{n}", "rule": ["tax", "cents"][n % 2], "judged": True} for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rubric.md").write_text("The rules of the shop are followed.")
    with ScriptedModel(scores_by_the_rule) as judge:
        settings = ("judge=rubric.md", f"judge_url={judge.url}/v1", "judge_model=j", "judge_price=1,1")
        done = optimize(copies_the_rule, *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "run/summary.json").read_text())
    assert (facts["before"]["mean"], facts["after"]["mean"]) == (0.0, 1.0)
    assert facts["spent"]["judge_calls"] == facts["spent"]["rollouts"]
    assert facts["spent"]["usd"] == pytest.approx(facts["spent"]["judge_usd"])
    assert facts["spent"]["judge_usd"] > 0


@pytest.mark.parametrize(
    ("more", "code", "message", "rollouts"),
    [
        (("--text", "nope"), 2, r"does not read the text 'nope' \(it reads: system\): .*rollout_text", 1),
        (("--data", "silent.jsonl"), 2, r"it reads: none\): .*rollout_text", 1),
        (("--data", "empty.jsonl"), 2, "empty.jsonl has no rows", 0),
        (("--eval-data", "empty.jsonl"), 2, "empty.jsonl has no rows", 0),
        (("--data", "eval.jsonl"), 2, "4 rows of --eval-data are in --data too", 0),
        (("--max-rollouts", "22"), 2, "23 rollouts for one proposal", 0),
        (("--set", "max_usd=1", "--set", "usd_per_rollout=0.1"), 2, "23 rollouts for one proposal", 0),
        (("--reflect-key", "secret"), 2, "AGENTCORE_RL_REFLECT_KEY", 0),
    ],
)
def test_what_cannot_be_searched_is_refused_with_the_reason(
    optimize: Optimize,
    tmp_path: Path,
    runtime: ScriptedRuntime,
    more: tuple[str, ...],
    code: int,
    message: str,
    rollouts: int,
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "silent.jsonl").write_text('{"reads": "nothing", "n": 1}\n{"reads": "nothing", "n": 2}\n')
    before = runtime.requests["invoke"]
    done = optimize(copies_the_rule, *more)
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert runtime.requests["invoke"] - before == rollouts


def test_an_endpoint_that_refuses_costs_no_rollout(optimize: Optimize, runtime: ScriptedRuntime) -> None:
    before = runtime.requests["invoke"]
    done = optimize(copies_the_rule, url=f"{runtime.url}/v1")  # it speaks another API
    assert done.returncode == 1
    assert re.search(rf"reflection model scripted at {runtime.url}/v1: status 404.*--reflect-url", done.stderr), (
        done.stderr
    )
    assert runtime.requests["invoke"] == before
