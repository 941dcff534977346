"""Paths, ids, headers and the event stream, checked against botocore's own parser where there is one."""

from __future__ import annotations

import botocore.eventstream
import pytest

from agentcore_rl_toolkit import _event_stream
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runtime.agents.agent import NAME, make_runtime_id, parse_agent_option, runtime_arn
from agentcore_rl_toolkit.runtime.wire import (
    SESSION_HEADER,
    Target,
    WireError,
    forwarded_headers,
    parse_environment,
    parse_target,
    session_id_of,
)

ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math-AbCdEf1234"


@pytest.mark.parametrize(
    ("name", "query", "found"),
    [
        (ARN, {}, Target("math-AbCdEf1234", "123456789012", "us-west-2")),
        (ARN, {"qualifier": "prod"}, Target("math-AbCdEf1234", "123456789012", "us-west-2", "prod")),
        (f"{ARN}/runtime-endpoint/prod", {}, Target("math-AbCdEf1234", "123456789012", "us-west-2", "prod")),
    ],
)
def test_target_is_an_arn(name: str, query: dict[str, str], found: Target) -> None:
    assert parse_target(name, query) == found


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("math-AbCdEf1234", {}),
        (f"{ARN}/foo/bar", {}),
        (f"{ARN}/runtime-endpoint/prod", {"qualifier": "DEFAULT"}),
    ],
)
def test_other_targets_are_400(name: str, query: dict[str, str]) -> None:
    with pytest.raises(WireError) as error:
        parse_target(name, query)
    assert error.value.status == 400


@pytest.mark.parametrize(("length", "good"), [(32, False), (33, True), (256, True), (257, False)])
def test_session_id_length(length: int, good: bool) -> None:
    headers = [(SESSION_HEADER, b"x" * length)]
    if good:
        assert session_id_of(headers) == "x" * length
    else:
        with pytest.raises(WireError):
            session_id_of(headers)


def test_headers_that_an_agent_sees() -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"authorization", b"secret"),
        (b"x-mine", b"1"),
        (b"x-amzn-bedrock-agentcore-runtime-custom-a", b"2"),
    ]
    assert [k for k, _ in forwarded_headers(headers, frozenset({b"x-mine"}))] == [
        b"content-type",
        b"x-mine",
        b"x-amzn-bedrock-agentcore-runtime-custom-a",
    ]


def test_event_stream_is_what_botocore_reads_at_every_chunk_boundary() -> None:
    data = _event_stream.event({"contentDelta": {"stdout": "é" * 300}}) + _event_stream.exception(
        "ThrottlingException", "slow"
    )
    for size in (1, 7, len(data)):
        buffer = botocore.eventstream.EventStreamBuffer()
        messages = []
        for start in range(0, len(data), size):
            buffer.add_data(data[start : start + size])
            messages += list(buffer)
        assert [m.headers[":message-type"] for m in messages] == ["event", "exception"]
        assert messages[0].headers[":event-type"] == "chunk"
        assert messages[1].headers[":exception-type"] == "ThrottlingException"
        assert "é".encode() not in messages[0].payload  # JSON is ASCII


def test_runtime_ids_are_stable_and_of_the_right_form() -> None:
    a = make_runtime_id("math", "/x/app.py")
    assert a == make_runtime_id("math", "/x/app.py") != make_runtime_id("math", "/y/app.py")
    assert parse_target(runtime_arn("eu-west-1", "123456789012", a), {}).runtime_id == a


@pytest.mark.parametrize(
    "text", ["math", "=x.py", "1math=x.py", "ma-th=x.py", f"{'m' * 49}=x.py", "math=/does/not/exist.py"]
)
def test_agent_option_is_checked(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_agent_option(text)
    assert NAME.fullmatch("m" * 48)


def test_environment_pairs() -> None:
    assert parse_environment(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    with pytest.raises(ConfigError):
        parse_environment(["novalue"])
