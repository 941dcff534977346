"""The agents of `init` and of the examples: one process answers production calls and rollouts, one after another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.init import FRAMEWORKS, write
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from serving import Asked, answering

from .test_production import send

EXAMPLES = Path(__file__).parents[2] / "examples"
MATH = ("strands_math_agent", "plain_agent", "anthropic_agent", "langgraph_agent", "openai_agents_agent")
OF_NIGHTS = {"langgraph", "openai-agents", "langgraph_agent", "openai_agents_agent"}  # whose frameworks are not here
SEVERAL = (
    "langchain>=1",
    "langchain-openai>=1",
    "langgraph>=1",
    "openai-agents>=0.6",
)  # as tests/cli/test_templates.py

LOADED = """
import runpy
sys.path.insert(0, {folder!r})
module = runpy.run_path({file!r})
app = module["app"]
"""
# In a process of its own: LangChain keeps one client, which belongs to the first loop that uses it.
SDKS = f"""{LOADED}
from bedrock_agentcore.runtime import BedrockAgentCoreApp
app = BedrockAgentCoreApp()
app.entrypoint(module["invoke_agent"])
"""


def says(text: str) -> Any:
    return ScriptedModel(lambda messages, tools: text)


def speaks_anthropic(text: str) -> Any:
    reply = {"id": "1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
    reply |= {"content": [{"type": "text", "text": text}], "usage": {"input_tokens": 1, "output_tokens": 1}}

    def answer(asked: Asked) -> tuple[int, Any, dict[str, str]]:
        assert asked.path == "/v1/messages"
        return 200, reply, {"content-type": "application/json"}

    return answering(answer)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "plain" else [pytest.mark.nightly]) for name in (*FRAMEWORKS, *MATH)],
)
def test_one_process_answers_production_calls_and_rollouts(
    name: str, tmp_path: Path, start_agent: Any, make_environment: Any
) -> None:
    file = EXAMPLES / name / "rl_app.py" if name in MATH else write(tmp_path / "shop", name) / "agent.py"
    python = make_environment("templates", *SEVERAL, upon_this=True) if name in OF_NIGHTS else sys.executable
    model = speaks_anthropic if name.startswith("anthropic") else says
    with model("There are 35 left. #### 35") as hosted, model("There are 36 left. #### 36") as policy:
        urls = [f"{found if isinstance(found, str) else found.url}/v1" for found in (hosted, policy)]
        env = {"AGENTCORE_RL_MODEL_URL": urls[0], "AGENTCORE_RL_MODEL_ID": "hosted", "AGENTCORE_RL_ROLLOUTS": "on"}
        where = {"folder": str(file.parent), "file": str(file)}
        how = {"env": env, "python": python, "within_s": 240}
        ours, theirs = (start_agent(text.format(**where), **how) for text in (LOADED, SDKS))
        bodies = [json.dumps({"prompt": "How many are left?"}).encode(), b'{"question": 5}', b"{", b"[]"]
        for _ in range(2):
            answers = [send(ours.port, "/invocations", body) for body in bodies]
            assert answers == [send(theirs.port, "/invocations", body) for body in bodies]
            assert (answers[0][0], "35" in json.loads(answers[0][2])["answer"]) == (200, True)
            row = {"prompt": "How many are left?", "answer": "36"}
            record = ours.run(row, base_url=urls[1], model_id="policy", api_key="a-key-of-the-session")
            assert record["rewards"] == 1.0, record
