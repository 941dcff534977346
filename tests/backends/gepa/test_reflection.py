"""The reflection model: what is taken of its answers, and that a failing one is asked no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentcore_rl_toolkit.backends import chat
from agentcore_rl_toolkit.backends.gepa.reflection import Reflection
from agentcore_rl_toolkit.errors import TrainingServiceError
from serving import Asked, answering


def completion(text: str | None, usage: Any) -> str:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


USAGE = {"prompt_tokens": 30, "completion_tokens": 4, "total_tokens": 34}


@dataclass
class Endpoint:
    """Answers every request with the same status and body, and keeps their keys."""

    url: str = ""
    status: int = 200
    body: str = ""
    kind: str = "application/json"
    keys: list[str | None] = field(default_factory=list)

    def answer(self, asked: Asked) -> tuple[Any, ...]:
        self.keys.append(asked.headers.get("authorization"))
        return self.status, self.body.encode(), {"content-type": self.kind}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    with answering(endpoint.answer) as url:
        endpoint.url = f"{url}/v1"
        yield endpoint


def test_an_answer_is_text_and_its_tokens_are_counted(endpoint: Endpoint) -> None:
    endpoint.body = completion("a better text", USAGE)
    spent: list[dict[str, int]] = []
    reflection = Reflection(endpoint.url, "m", "a-key", spent=lambda **cost: spent.append(cost))
    assert reflection("improve this") == "a better text"
    assert spent == [{"reflections": 1, "input_tokens": 30, "output_tokens": 4}]
    assert endpoint.keys == ["Bearer a-key"]


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (401, "application/json", '{"error": {"message": "wrong key"}}', "wrong key"),
        (404, "text/plain", "no such page", "no such page"),
        (200, "text/html", "<html>hello</html>", "not a chat completion"),
        (200, "application/json", completion(None, USAGE), "no text"),
        (200, "application/json", completion("text", None), "count of its tokens"),
    ],
)
def test_rubbish_and_refusals_are_errors_and_it_is_asked_no_more(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, status: int, kind: str, body: str, said: str
) -> None:
    monkeypatch.setattr(chat, "backoff_s", lambda *_, **__: 0.0)
    endpoint.status, endpoint.kind, endpoint.body = status, kind, body
    reflection = Reflection(endpoint.url, "m", None, spent=lambda **cost: pytest.fail("nothing was answered"))
    for _ in range(2):
        with pytest.raises(TrainingServiceError, match=rf"(?s){endpoint.url}.*{said}.*--reflect-url"):
            reflection("improve this")
    assert len(endpoint.keys) == (1 if status >= 400 else chat.TRIES)
