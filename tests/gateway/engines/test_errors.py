"""The reason in an engine's error body, of any shape."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.gateway.engines.errors import upstream_error


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[1]", "[1]"),
        (b'{"message":["l"]}', '{"message":["l"]}'),
        (b'{"error":{},"detail":"top"}', '"top"'),
        (b'{"error":{"detail":"inner"},"detail":"top"}', '"inner"'),
        (b'{"error":{"message":"a"},"detail":"top"}', "a"),
        (b"", "the engine answered 400"),
    ],
)
def test_the_agent_gets_the_reason_of_an_engines_error(body: bytes, reason: str) -> None:
    assert upstream_error(400, body).message == reason
