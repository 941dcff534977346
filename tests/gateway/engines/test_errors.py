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
    ("status", "body", "kind", "shown", "message"),
    [
        (399, b"x", "upstream", 502, "the engine answered 399"),
        (400, b"x", "invalid_request", 400, "x"),
        (400, b"prompt is too long", "context_overflow", 400, "prompt is too long"),
        (422, b"prompt is too long", "invalid_request", 422, "prompt is too long"),
        (401, b"x", "upstream", 502, "AGENTCORE_RL_GATEWAY_UPSTREAM_KEY"),
        (403, b"x", "upstream", 502, "the engine refused the gateway (403): x"),
        (403, b"", "upstream", 502, "it gives no reason"),
        (404, b"x", "not_found", 404, "x"),
        (499, b"x", "invalid_request", 499, "x"),
        (500, b"x", "internal", 500, "x"),
        (503, b"x", "overloaded", 503, "x"),
    ],
)
def test_the_status_of_an_engine_decides_the_kind_of_error(
    status: int, body: bytes, kind: str, shown: int, message: str
) -> None:
    found = upstream_error(status, body)
    assert (found.kind, found.status) == (kind, shown)
    assert message in found.message


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (b'{"message":"busy","code":429}', "rate_limit", 429),
        (b'{"message":"m","code":"model_error"}', "upstream", 502),  # a word of another provider
        (b'{"message":"m","code":400}', "invalid_request", 400),
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
