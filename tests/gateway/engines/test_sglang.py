"""What SGLang's /generate is asked for."""

from __future__ import annotations

import json

import pytest

from agentcore_rl_toolkit.gateway.dialects.canonical import Request
from agentcore_rl_toolkit.gateway.engines import TOKEN_ENGINES


@pytest.mark.parametrize(("engine", "experts"), [("sglang", False), ("sglang-experts", True)])
def test_expert_routing_is_asked_for_by_the_engine_that_is_named_for_it(engine: str, experts: bool) -> None:
    request = Request(dialect="chat", model="m")
    path, body = TOKEN_ENGINES[engine].request(b"[1,2]", request, max_tokens=4, stop_token_ids=[2], stream=True)
    asked = json.loads(body)
    assert path == b"/generate"
    assert asked["input_ids"] == [1, 2]
    assert asked.get("return_routed_experts", False) is experts
    assert TOKEN_ENGINES[engine].name == engine
