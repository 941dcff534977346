"""A proxy of the environment is not used for a runtime of this machine."""

from __future__ import annotations

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


def test_the_command_line_uses_no_proxy() -> None:
    def answer(asked: Asked) -> tuple[int, dict[str, list[str]]]:
        return 200, {"sessions": [], "ended": []}

    with answering(answer) as url:
        assert RuntimeView(url).sessions() == []
