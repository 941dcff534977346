"""Paths, ids, headers and the event stream, checked against botocore's own parser where there is one."""

from __future__ import annotations

import botocore.eventstream
import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runtime.agents.agent import NAME, make_runtime_id, parse_agent_option, runtime_arn
from agentcore_rl_toolkit.runtime.http import commands as eventstream
from agentcore_rl_toolkit.runtime.wire import (
    SESSION_HEADER,
    Named,
    Target,
    WireError,
    forwarded_headers,
    named,
    parse_environment,
    session_id_of,
)

ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math-AbCdEf1234"


@pytest.mark.parametrize(
    ("name", "account", "found"),
    [
        (ARN, None, Named("math-AbCdEf1234", "123456789012", "us-west-2")),
        (f"{ARN}/runtime-endpoint/prod", None, Named("math-AbCdEf1234", "123456789012", "us-west-2", "prod")),
        ("math-AbCdEf1234", "123456789012", Named("math-AbCdEf1234", "123456789012")),
    ],
)
def test_runtime_is_named_by_arn_or_by_id_with_account(name: str, account: str | None, found: Named) -> None:
    assert named(name, account) == found


@pytest.mark.parametrize(
    ("name", "account"),
    [
        ("math-AbCdEf1234", None),
        ("math-AbCdEf1234", "12"),
        ("../x", "123456789012"),
        ("math", "123456789012"),
        (f"{ARN}/foo/bar", None),
    ],
)
def test_other_names_are_400(name: str, account: str | None) -> None:
    with pytest.raises(WireError) as error:
        named(name, account)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("arn", "query", "endpoint"),
    [
        (ARN, {}, "DEFAULT"),
        (ARN, {"qualifier": "prod"}, "prod"),
        (f"{ARN}/runtime-endpoint/prod", {}, "prod"),
        (f"{ARN}/runtime-endpoint/prod", {"qualifier": "prod"}, "prod"),
        (f"{ARN}/runtime-endpoint/prod", {"qualifier": "DEFAULT"}, None),
    ],
)
def test_endpoint_is_the_parameters_or_the_arns(arn: str, query: dict[str, str], endpoint: str | None) -> None:
    target = Target(arn, query)
    if endpoint is not None:
        assert target.qualifier == endpoint
    else:
        with pytest.raises(WireError, match="names endpoint"):
            _ = target.qualifier


@pytest.mark.parametrize(("length", "good"), [(32, False), (33, True), (256, True), (257, False)])
def test_session_id_length(length: int, good: bool) -> None:
    headers = {SESSION_HEADER: b"x" * length}
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
    data = eventstream.event({"contentDelta": {"stdout": "é" * 300}}) + eventstream.exception(
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
    assert named(runtime_arn("eu-west-1", "123456789012", a), None).runtime_id == a


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
