"""Agents whose client is made when their file is loaded, with no key in the environment: evaluated and trained as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ...conftest import ROOT

COMMAND = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit.cli"]
DATA = ROOT / "examples" / "deployed_agent" / "eval.jsonl"
SCORE = """
from agentcore_rl_toolkit import answer_text

def score(payload, answer, reference, trajectory):
    text = answer_text(answer)
    tools = sum(len(m.get("tool_calls") or ()) for m in trajectory)
    return {"reward": float(text.endswith(reference)), "text": float(bool(text)), "tools": tools, "calls": len(trajectory)}
"""
CALCULATOR = '''
def calculator(expression: str) -> str:
    """Evaluate one arithmetic expression.

    Args:
        expression: Like 2 + 3
    """
    try:
        left, operator, right = expression.split()
        a, b = int(left), int(right)
        return str({"+": a + b, "-": a - b, "*": a * b}[operator])
    except (ValueError, KeyError):
        return "give one expression, like 2 + 3"
'''
ANTHROPIC = """
import anthropic
from bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()
client = anthropic.AsyncAnthropic()
schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
tools = [{"name": "calculator", "description": "Evaluate one expression, like 2 + 3", "input_schema": schema}]

@app.entrypoint
async def invoke(payload):
    messages = [{"role": "user", "content": payload["prompt"]}]
    for _ in range(3):
        async with client.messages.stream(
            model="claude-sonnet-4-5", max_tokens=64, system="Solve the problem. Use the calculator.",
            tools=tools, messages=messages,
        ) as stream:
            async for text in stream.text_stream:
                yield text
            reply = await stream.get_final_message()
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": calculator(str(c.input.get("expression")))} for c in calls
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]

if __name__ == "__main__":
    app.run()
"""
PYDANTIC_AI = """
from bedrock_agentcore import BedrockAgentCoreApp
from pydantic_ai import Agent, UsageLimits, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel

app = BedrockAgentCoreApp()
model = OpenAIChatModel("gpt-4.1-mini")
agent = Agent(model, instructions="Solve the problem. Use the calculator.", model_settings={"max_tokens": 64})
agent.tool_plain(calculator)

@app.entrypoint
async def invoke(payload):
    try:
        return {"result": (await agent.run(payload["prompt"], usage_limits=UsageLimits(request_limit=3))).output}
    except UsageLimitExceeded:
        return {"result": "too many steps"}

if __name__ == "__main__":
    app.run()
"""
AGENTS = {
    "anthropic": (ANTHROPIC, "anthropic"),
    "pydantic-ai": (PYDANTIC_AI, "pydantic-ai-slim[openai]>=1,<3"),
}


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_with_a_client_at_module_level_is_evaluated_and_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, package = AGENTS[name]
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "app.py").write_text(CALCULATOR + source)
    (tmp_path / "requirements.txt").write_text(f"bedrock-agentcore\n{package}\n")
    (tmp_path / "score.py").write_text(SCORE)
    shared = ("--agent", "app.py", "--data", str(DATA), "--score", "score.py", "--json")

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run([*COMMAND, *words, *shared], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr + done.stdout
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    evaluated = run("eval", "--limit", "8")
    assert evaluated["outcomes"] == {"ok": 8}
    assert evaluated["metrics"]["text"] == 1.0
    assert evaluated["metrics"]["tools"] > 0
    trained = run("train", "--steps", "3", "--groups", "2", "--rollouts", "2", "--set", "replace_up_to=1")
    assert (trained["lost_rollouts"], trained["steps"]) == (0, 3), trained
    assert trained["rollouts"] >= 12
