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

with Proof(example=Path(__file__).parent, framework="none") as proof:
    oracle = proof.run([{{"prompt": "a"}}, {{"prompt": "break"}}, {{"prompt": "b"}}], lambda messages, tools: "right")
    print([(r.payload["prompt"], r.outcome, r.reward, r.result.get("said"), r.error) for r in oracle])
    proof.row(rollouts=3, oracle_reward=mean(oracle), tool_calls=tool_calls(oracle))
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
    assert "('break', 'agent_error', None, None, 'LookupError: a fault of the agent')" in done.stdout
    assert "FAILED  every rollout ends ok with a reward: 2 (target: 3)" in done.stdout
    written = json.loads(report.read_text())
    [row] = written["rows"]
    assert (row["rollouts"], row["oracle_reward"], row["tool_calls"]) == (3, pytest.approx(2 / 3), 0)
    assert [check["ok"] for check in written["checks"]] == [True, False]
