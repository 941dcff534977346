"""A session that could not make a good call is refused when it is opened, not when its agent calls."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.http.client import request

BAD_PARAMS: list[dict[str, Any]] = [
    {"stream": True},
    {"messages": []},
    {"prompt": "x"},
    {"model": "x"},
    {"return_token_ids": False},
    {"n": "x"},
    {"n": 0},
    {"n": 1000},
    {"stop": 5},
    {"stop": [5]},
    {"max_tokens": -5},
    {"temperature": "hot"},
    {"temperature": -1},
    {"top_p": 2},
    {"seed": 1.5},
    {"chat_template_kwargs": 5},
    {"response_format": "json"},
    {"stop_token_ids": ["x"]},
    {"logit_bias": []},
]
BAD_SETTINGS: list[dict[str, Any]] = [
    {"max_turns": -1},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"model_id": ""},
]


async def test_a_bad_setting_is_named_when_the_session_is_opened(client: GatewayClient) -> None:
    for params in BAD_PARAMS:
        with pytest.raises(GatewayError, match=rf"sampling_params\.{next(iter(params))}") as caught:
            await client.create_sessions_async([new_session_id()], sampling_params=params)
        assert caught.value.status == 400
        status, body = await request("POST", client.url + "/sessions", body={"sampling_params": params})
        assert (status, next(iter(params)).encode() in body) == (400, True)
    for settings in BAD_SETTINGS:
        with pytest.raises(GatewayError, match=next(iter(settings))) as caught:
            await client.create_sessions_async([new_session_id()], **settings)
        assert caught.value.status == 400
    assert (await client.stats_async())["sessions"] == 0


async def test_what_engines_take_passes(client: GatewayClient) -> None:
    params = {
        "temperature": 1,
        "top_k": -1,
        "n": 2,
        "stop": ["a"],
        "seed": None,
        "logprobs": True,
        "vllm_xargs": {"a": 1},
    }
    await client.create_sessions_async([new_session_id()], sampling_params=params, max_turns=0, max_tokens=1)
