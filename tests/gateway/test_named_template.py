"""Another chat template and output parser than the model's directory brings, as `--template` and `--parser` name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig
from agentcore_rl_toolkit.messages.render import Renderer
from scripted_engine import ScriptedEngine

from .asking import MODEL, Start, opened
from .asking import message_of as ask

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"  # as GLM writes one


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """The model's own, with another beginning."""
    path = tmp_path / "other.jinja"
    path.write_text("<|im_start|>system\nother<|im_end|>\n" + (MODEL / "chat_template.jinja").read_text())
    return path


async def test_prompts_and_answers_are_those_of_the_named_template_and_parser(
    engine: ScriptedEngine, start_gateway: Start, template: Path
) -> None:
    engine.first_id, engine.last_id = 300, 500
    renderer = Renderer.from_path(MODEL)
    gateway = await start_gateway(engine, model_dir=str(MODEL), template=str(template), parser="glm")
    session = await opened(gateway)
    engine.replies.append({"token_ids": [*renderer.encode(CALL), min(renderer.stop_token_ids)]})
    message = await ask(session, [{"role": "user", "content": "What is 2 + 3?"}], tools=[TOOL])
    assert renderer.decode(engine.calls[-1].prompt_ids).startswith("<|im_start|>system\nother<|im_end|>")
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2})


def test_a_parser_that_does_not_exist_is_an_error_that_names_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no output parser 'hermse'; known: deepseek, gemma, glm"):
        Gateway(GatewayConfig(model_dir=str(MODEL), parser="hermse", store_dir=str(tmp_path)))
