"""`agentcore-rl eval --check`: rewards that are given away, and answers that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

AGENT = """
from openai import AsyncOpenAI
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
async def run(payload):
    rollout = payload["_rollout"]
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"]) as client:
        messages = [{"role": "user", "content": payload["prompt"]}]
        reply = await client.chat.completions.create(model=rollout["model_id"], messages=messages)
    return {"rewards": float((reply.choices[0].message.content or "").strip() == payload["expected"])}


if __name__ == "__main__":
    app.run()
"""
ROWS = [
    {"id": "right", "prompt": "1", "answer": "one", "expected": "one"},
    {"id": "wrong-answer", "prompt": "2", "answer": "two", "expected": "three"},
    {"id": "given-away", "prompt": "3", "answer": "four", "expected": ""},
]


@pytest.mark.system
def test_rows_that_reward_nothing_and_rows_that_their_answer_does_not_solve_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    done = command_line("eval", "--agent", "agent.py", "--data", "rows.jsonl", "--check")
    assert done.returncode == 1
    nothing, known = done.stdout.splitlines()
    assert nothing.startswith(
        "an empty reply solves 1 of 3 rows. These rows give the full reward for an empty reply: given-away"
    )
    assert known.startswith("the known answer (answer) solves 1 of 3 rows. Not solved, because ")
    assert known.endswith("tool calls: wrong-answer, given-away")
    assert not (tmp_path / "runs").exists()


UNMODIFIED = """
import httpx
from bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()


@app.entrypoint
def invoke(payload):
    body = {"model": "fixed", "messages": [{"role": "user", "content": payload["prompt"]}]}
    reply = httpx.post("http://llm.invalid:9/v1/chat/completions", json=body).raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]
"""


@pytest.mark.system
def test_an_agent_with_a_model_host_of_its_own_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any
) -> None:
    (tmp_path / "app.py").write_text(UNMODIFIED)
    (tmp_path / "score.py").write_text("def score(payload, answer, reference, trajectory):\n    return answer == ''\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    words = (
        "--agent",
        "app.py",
        "--data",
        "rows.jsonl",
        "--check",
        "--score",
        "score.py",
        "--model-host",
        "llm.invalid",
    )
    assert command_line("eval", *words).stdout.startswith("an empty reply solves 1 of 1 rows")


def test_what_does_not_go_with_a_check_is_refused(tmp_path: Path, command_line: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    agent = tmp_path / "agent.py"
    agent.touch()
    words = ("eval", "--agent", str(agent), "--data", str(tmp_path / "rows.jsonl"))
    together = "--check needs --agent FILE, and does not go with "
    for more, error in (
        (("--answer", "expected"), "--answer FIELD needs --check"),
        (("--check", "--agent", "absent.py"), "there is no agent file"),
        *(
            (("--check", *words), f"{together}{words[0]}")
            for words in (
                ("--model", "none"),
                ("--resume",),
                ("--repeat", "4"),
                ("--sampling-params", '{"temperature": 0}'),
                ("--for-training",),
                ("--model-id", "x"),
                ("--json",),
            )
        ),
    ):
        done = command_line(*words, *more)
        assert done.returncode == 2
        assert error in done.stderr
