"""A proxy of the environment is not used for a runtime of this machine."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from serving import Asked, answering

from .conftest import MakeClient, script


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_rollouts_at_a_runtime_of_this_machine_use_no_proxy(make_client: MakeClient) -> None:
    future = make_client().submit(script(result={"rewards": 1.0}))
    assert future.exception(60) is None
    assert future.outcome is Outcome.OK


def test_a_runtime_of_another_machine_is_reached_by_the_proxy(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(request: Asked) -> tuple[Any, ...]:
        asked.append(request.path)
        return 403, {"message": "no"}, {"x-amzn-ErrorType": "AccessDeniedException"}

    with answering(answer) as url:
        monkeypatch.setenv("http_proxy", url)
        assert make_client(endpoint_url="http://runtime.example").submit(script()).exception(60) is not None
    assert asked[0].startswith("http://runtime.example/runtimes/")


def test_the_command_line_uses_no_proxy() -> None:
    def answer(asked: Asked) -> tuple[int, dict[str, list[str]]]:
        return 200, {"sessions": [], "ended": []}

    with answering(answer) as url:
        assert RuntimeView(url).sessions() == []
