"""Calls of Anthropic's dialect as chat completions and back, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentcore_rl_toolkit.app.sagemaker.runtime import JobCallError
from agentcore_rl_toolkit.app.sagemaker.translation import TranslatedCall

THINKING = {"type": "enabled", "budget_tokens": 1024}
ASK = {"model": "m", "max_tokens": 2048, "messages": [{"role": "user", "content": "hi"}], "thinking": THINKING}
CALL = {"name": "add", "arguments": '{"a": 2}'}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": "so", "refusal": "no"}, [{"type": "text", "text": "so"}]),
        ({"content": None, "refusal": "no"}, [{"type": "text", "text": "no"}]),
        ({"reasoning_content": "hm", "content": "so"}, ["thinking", {"type": "text", "text": "so"}]),
        (
            {"tool_calls": [{"id": "call_1", "function": CALL}, {"function": CALL}]},
            [{"type": "tool_use", "id": id_, "name": "add", "input": {"a": 2}} for id_ in ("call_1", "toolu_7-1")],
        ),
    ],
)
def test_a_reply_is_translated_with_all_its_parts(message: dict[str, Any], content: list[Any]) -> None:
    call = TranslatedCall(b"messages")
    assert call.read(json.dumps(ASK).encode())["messages"] == ASK["messages"]
    reply: dict[str, Any] = {"choices": [{"message": message, "finish_reason": "stop"}], "id": "chatcmpl-7"}
    found = json.loads(call.answer(json.dumps(reply).encode()))
    assert [block["type"] if block["type"] == "thinking" else block for block in found["content"]] == content
    assert (found["id"], found["usage"]["input_tokens"], call.media_type) == ("msg_7", 0, "application/json")
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    found = json.loads(call.answer(json.dumps({**reply, "id": None, "usage": usage}).encode()))
    assert (len(found["id"]), found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (28, 3, 2)


def test_a_call_that_cannot_be_translated_has_a_status() -> None:
    with pytest.raises(JobCallError, match=f"^a multi-turn RL job has no {'x' * 80}$") as unknown:
        TranslatedCall(b"x" * 81)
    with pytest.raises(JobCallError, match="model: Expected `str`") as wrong:
        TranslatedCall(b"messages").read(b'{"model": 5}')
    assert [error.value.status for error in (unknown, wrong)] == [404, 400]
    for status, kind in ((404, "not_found_error"), (499, "invalid_request_error"), (500, "api_error")):
        body, found, _ = TranslatedCall(b"messages").failure(JobCallError("why", status=status))
        assert (found, json.loads(body)["error"]) == (status, {"type": kind, "message": "why"})
