"""What a session of the deployed agent answers to the doctor."""

from __future__ import annotations

import io
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.doctor import aws


@pytest.mark.parametrize("reply", [b"[" * 5000, b'{"status": "' + b"x" * 2**24], ids=["deep", "endless"])
def test_a_session_that_answers_anything_costs_one_line(reply: bytes) -> None:
    class Client:
        def invoke_agent_runtime(self, **_: Any) -> dict[str, Any]:
            return {"response": io.BytesIO(reply)}

        def stop_runtime_session(self, **_: Any) -> None:
            return None

    [found] = aws.ask(Client(), "arn", "s", {"s3_bucket": "records"})
    assert found.level == "fail"
    assert len(found.text) <= 500
