"""`init --from`: what the source of an agent shows, and what is written beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.backends.scorer import scorer_at
from agentcore_rl_toolkit.cli.agents.existing import inspect_agent
from agentcore_rl_toolkit.client.evaluation import read_rows

from ...conftest import CommandLine

AGENT = """
from bedrock_agentcore import BedrockAgentCoreApp
from strands import Agent
from model.load import load_model

app = BedrockAgentCoreApp()

@app.entrypoint
async def invoke(request, context):
    async for event in Agent(model=load_model()).stream_async(request["question"] + request.get("hint", "")):
        yield event
"""
API = """
import boto3
from fastapi import FastAPI

app = FastAPI()
client = boto3.client("bedrock-runtime")

@app.post("/invocations")
def answer(body: dict):
    return client.converse(modelId="m", messages=body["messages"])
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "load.py").write_text(
        "from strands.models import BedrockModel\nload_model = lambda: BedrockModel()\n"
    )
    (folder / "main.py").write_text(AGENT)
    return folder / "main.py"


def test_the_source_shows_entrypoint_framework_model_and_payload(agent: Path) -> None:
    found = inspect_agent(agent)
    assert found == {
        "entrypoint": ["invoke"],
        "framework": ["strands"],
        "model": ["BedrockModel"],
        "payload": ["question", "hint"],
    }
    (agent.parent / "api.py").write_text(API)
    (agent.parent / "texts.py").write_text(f"TEXT = {' + '.join(['x'] * 2_000)}\n")  # too deep for `ast`
    other = inspect_agent(agent.parent / "api.py")
    assert other["entrypoint"] == ["answer"]
    assert other["payload"] == ["messages"]
    assert "client of bedrock-runtime" in other["model"]


@pytest.mark.parametrize("packaged", [False, True])
def test_a_scorer_its_test_and_data_are_written_and_nothing_is_overwritten(
    agent: Path, command_line: CommandLine, packaged: bool
) -> None:
    if packaged:
        (agent.parent / "__init__.py").touch()
    done = command_line("init", "--from", str(agent))
    assert done.returncode == 0, done.stderr
    assert "model      BedrockModel" in done.stdout
    assert "eval --agent" in done.stdout
    assert read_rows(agent.with_name("rows.jsonl"))[0].payload.keys() == {"question", "hint", "_reference"}
    assert scorer_at(str(agent.with_name("score.py"))).name == "score.py:score"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{agent.parent.name}/test_score.py"]
    subprocess.run(tests, cwd=agent.parent.parent, check=True, timeout=120)
    again = command_line("init", "--from", str(agent))
    assert (again.returncode, "score.py, test_score.py, rows.jsonl" in again.stderr) == (2, True)
    assert agent.read_text() == AGENT


def test_init_takes_a_name_or_an_agent(agent: Path, command_line: CommandLine) -> None:
    for words in ((), ("shop", "--from", str(agent))):
        done = command_line("init", *words)
        assert done.returncode == 2
        assert "give either the NAME of a new agent, or --from FILE" in done.stderr
    agent.write_text("def (")
    assert "cannot be read" in command_line("init", "--from", str(agent)).stderr
