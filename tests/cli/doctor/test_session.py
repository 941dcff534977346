"""What a session of the deployed agent answers to the doctor."""

from __future__ import annotations

import io
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.doctor import session


@pytest.mark.parametrize("reply", [b"[" * 5000, b'{"status": "' + b"x" * 2**24], ids=["deep", "endless"])
def test_a_session_that_answers_anything_costs_one_line(reply: bytes) -> None:
    class Client:
        def invoke_agent_runtime(self, **_: Any) -> dict[str, Any]:
            return {"response": io.BytesIO(reply)}

        def stop_runtime_session(self, **_: Any) -> None:
            return None

    [found] = session.ask(Client(), "arn", "s", session.block("records", base_url=None, api_key=None))
    assert (found.level, found.text[:9]) == ("fail", "no answer")
    assert len(found.text) <= 500
