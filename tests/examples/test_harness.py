"""The harness of the proofs, by a proof of an agent made here: it runs the real stack once, as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.system
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
