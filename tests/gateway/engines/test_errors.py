"""The reason in an engine's error body, of any shape."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.gateway.engines.errors import event_error, upstream_error


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[1]", "[1]"),
        (b'{"message":["l"]}', '{"message":["l"]}'),
        (b'{"detail":"top"}', "top"),
        (b'{"error":"words"}', "words"),
        (b'{"error":{"message":"a"},"detail":"top"}', "a"),
        (b"", "the engine answered 400"),
    ],
)
def test_the_agent_gets_the_reason_of_an_engines_error(body: bytes, reason: str) -> None:
    assert upstream_error(400, body).message == reason


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (b'{"message":"busy","code":429}', "rate_limit", 429),
        (b'{"message":"m","code":"model_error"}', "upstream", 502),  # a word of another provider
        (b'{"message":"m","code":200}', "upstream", 502),
        (b'{"message":"m","code":600}', "upstream", 502),
        (b'{"message":"the prompt is too long","code":"x"}', "context_overflow", 400),
        (b'"a text"', "upstream", 502),
    ],
)
def test_an_error_in_a_stream_has_the_status_that_it_names(error: bytes, kind: str, status: int) -> None:
    found = event_error(error)
    assert (found.kind, found.status) == (kind, status)
    assert "200" not in found.message
