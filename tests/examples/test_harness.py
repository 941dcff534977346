"""The harness of the proofs, by a proof of an agent made here: it runs the real stack once, as a process."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

AGENT = """
from openai import AsyncOpenAI
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
async def invoke_agent(payload):
    rollout = payload["_rollout"]
    if payload["prompt"] == "break":
        raise LookupError("a fault of the agent")
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"]) as client:
        messages = [{"role": "user", "content": payload["prompt"]}]
        reply = await client.chat.completions.create(model=rollout["model_id"], messages=messages)
    said = reply.choices[0].message
    return {"rewards": float(said.content == "right"), "said": said.content}

app.run() if __name__ == "__main__" else None
"""

PROOF = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES)!r})
from harness import Proof, mean, tool_calls
from agentcore_rl_toolkit.gateway.testing import ToolCall

with Proof(example=Path(__file__).parent, framework="none") as proof:
    oracle = proof.run([{{"prompt": "a"}}, {{"prompt": "break"}}, {{"prompt": "b"}}], lambda messages, tools: "right")
    print([(r.payload["prompt"], r.outcome, r.reward, r.result.get("said"), r.error) for r in oracle])
    calls = proof.run([{{"prompt": "c"}}], lambda messages, tools: [ToolCall("x"), ToolCall("y")])
    try:
        proof.run([{{"prompt": "d"}}], lambda messages, tools: 1 / 0)
    except ZeroDivisionError:
        print("the script's own error")
    proof.row(rollouts=4, oracle_reward=mean(oracle), tool_calls=tool_calls(oracle, calls), note=f"quick {{proof.quick}}")
    proof.check("a check that holds", value=1, target=1, ok=True)
    proof.check_all_ok(oracle)
"""


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import harness
    finally:
        sys.path.remove(str(EXAMPLES))
    return harness


@pytest.mark.timeout(600)
def test_a_proof_runs_solvers_through_the_stack_and_fails_with_its_checks(tmp_path: Path) -> None:
    example = tmp_path / "made_here"
    example.mkdir()
    (example / "rl_app.py").write_text(AGENT)
    (example / "proof.py").write_text(PROOF)
    report = tmp_path / "report.json"
    command = [sys.executable, "-W", "ignore", str(example / "proof.py"), "--quick", "--here", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360)
    assert done.returncode == 1, done.stderr
    results, script = done.stdout.splitlines()[:2]
    assert results == str(
        [
            ("a", "ok", 1.0, "right", None),
            ("break", "agent_error", None, None, "LookupError: a fault of the agent"),
            ("b", "ok", 1.0, "right", None),
        ]
    )
    assert script == "the script's own error"
    assert "FAILED  every rollout ends ok with a reward: 2 (target: 3)" in done.stdout
    assert 'raise LookupError("a fault of the agent")' in done.stderr
    written = json.loads(report.read_text())
    [row] = written["rows"]
    seconds = row.pop("seconds")
    assert seconds > 0
    assert row == {
        "example": "made_here",
        "framework": "none",
        "rollouts": 4,
        "oracle_reward": pytest.approx(2 / 3),
        "noop_reward": None,
        "policy_before": None,
        "policy_after": None,
        "tool_calls": 2,
        "note": "quick True",
    }
    assert [check["ok"] for check in written["checks"]] == [True, False]


def result(harness: ModuleType, reward: float | None) -> Any:
    return harness.Result(
        payload={},
        outcome="ok",
        reward=reward,
        result={},
        tool_calls=1,
        turns=1,
        error=None,
        traceback=None,
        dialogue=[],
    )


def test_the_mean_counts_what_has_no_reward_as_zero(harness: ModuleType) -> None:
    assert harness.mean([result(harness, 1.0), result(harness, None)]) == 0.5
    with pytest.raises(ValueError, match="no rollouts"):
        harness.mean([])


def test_the_table_shows_a_dash_for_what_a_row_does_not_have(harness: ModuleType) -> None:
    head, row = harness.table([{"example": "math", "rollouts": 3, "oracle_reward": 2 / 3}]).splitlines()
    assert head.split()[:2] == ["example", "framework"]
    assert row.split() == ["math", "-", "3", "0.667", "-", "-", "-", "-", "-", "-"]


def test_a_proof_without_a_check_fails(harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = harness.parser().parse_args(["--json", str(tmp_path / "report.json")])
    proof = harness.Proof(example=tmp_path, framework="none", options=options)
    with pytest.raises(SystemExit):
        proof.__exit__(None, None, None)
    assert "FAILED  the proof checks something" in capsys.readouterr().out


def test_a_proof_that_raises_reports_it(harness: ModuleType, tmp_path: Path) -> None:
    options = harness.parser().parse_args(["--json", str(tmp_path / "report.json")])
    error = RuntimeError("oops")
    harness.Proof(example=tmp_path, framework="none", options=options).__exit__(RuntimeError, error, None)
    [check] = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert (check["ok"], check["value"]) == (False, "RuntimeError: oops")


def test_a_failure_is_shown_and_commands_no_terminal(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = harness.parser().parse_args(["--json", str(tmp_path / "report.json")])
    proof = harness.Proof(example=tmp_path, framework="none", options=options)
    bad = dataclasses.replace(
        result(harness, None), outcome="agent_error", error="\x1b]0;owned\x07", traceback="\x9b2J"
    )
    assert not proof.check_all_ok([bad])
    assert capsys.readouterr().err == "agent_error: \\e]0;owned\\a\n\\x9b2J\n"


def test_a_proof_that_cannot_run_here_says_why_and_ends_well(harness: ModuleType, tmp_path: Path) -> None:
    options = harness.parser().parse_args(["--json", str(tmp_path / "report.json")])
    with pytest.raises(SystemExit) as ended:
        harness.skip(tmp_path, options, "no Maven")
    assert ended.value.code == 0
    assert json.loads((tmp_path / "report.json").read_text()) == {"rows": [], "checks": [], "skipped": "no Maven"}


def training_that_leaves(run: Path, **facts: Any) -> list[str]:
    """A command that leaves such a run."""
    summary = {"rollouts": 8, "lost_rollouts": 0, "trained_token_share": 1.0, **facts}
    run.mkdir()
    words = f"open({str(run / 'summary.json')!r}, 'w').write({json.dumps(summary)!r})"
    return [sys.executable, "-c", words]


@pytest.fixture
def proof(harness: ModuleType, tmp_path: Path) -> Any:
    return harness.Proof(example=tmp_path, framework="none", options=harness.parser().parse_args([]))


def test_a_trainings_row_is_what_its_run_says(proof: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = training_that_leaves(run, held_out_reward_before=0.25, held_out_reward_after=0.5)
    proof.train(command, run, note="a task", must_gain=True)
    [row] = proof.rows
    assert (row["rollouts"], row["policy_before"], row["policy_after"], row["note"]) == (8, 0.25, 0.5, "a task")
    assert [check["ok"] for check in proof.checks] == [True, True, True]


@pytest.mark.parametrize(
    ("facts", "ok"),
    [
        ({"held_out_reward_before": 0.5, "held_out_reward_after": 0.5}, [True, True, False]),
        ({"held_out_reward_before": None, "held_out_reward_after": 0.5}, [True, True, False]),
        ({"held_out_reward_before": 0.1, "held_out_reward_after": 0.5, "lost_rollouts": 1}, [False, True, True]),
        (
            {"held_out_reward_before": 0.1, "held_out_reward_after": 0.5, "trained_token_share": None},
            [True, False, True],
        ),
    ],
    ids=["no gain", "not evaluated", "a rollout lost", "nothing trained"],
)
def test_a_training_that_went_wrong_fails_its_check(
    proof: Any, tmp_path: Path, facts: dict[str, Any], ok: list[bool]
) -> None:
    run = tmp_path / "run"
    proof.train(training_that_leaves(run, **facts), run, note="a task", must_gain=True)
    assert [check["ok"] for check in proof.checks] == ok


def test_a_training_that_fails_is_an_error_with_its_command(proof: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit\\(3\\) ended with code 3"):
        proof.train([sys.executable, "-c", "exit(3)"], tmp_path, note="a task", must_gain=False)


def test_a_proof_that_is_ended_ends_its_training_in_order(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    training = (
        f"import pathlib, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        f"print('trains', flush=True)\nsignal.sigwait([signal.SIGTERM])\npathlib.Path({str(ended)!r}).touch()"
    )
    words = (
        f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nimport harness\nharness.end_in_order_on_sigterm()\n"
        f"harness._run_to_its_end([sys.executable, '-c', {training!r}])"
    )
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert ended.exists()


def test_a_proof_that_is_ended_while_its_training_starts_leaves_none(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        signal.raise_signal(signal.SIGTERM)
        return started[-1]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    usual = signal.getsignal(signal.SIGTERM)
    try:
        harness.end_in_order_on_sigterm()
        with pytest.raises(SystemExit) as end:
            harness._run_to_its_end([sys.executable, "-c", "import time; time.sleep(600)"])
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert end.value.code == 128 + signal.SIGTERM
    [training] = started
    with training:
        ended = training.returncode
        training.kill()
    assert ended == -signal.SIGTERM
