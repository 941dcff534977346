"""Rollouts as spans: names and numbers of the GenAI conventions, one trace a session, taken by a real OTLP receiver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends import open_recording
from agentcore_rl_toolkit.contract import span_id_of, trace_id_of
from agentcore_rl_toolkit.runs import Rollout
from agentcore_rl_toolkit.runs.spans import seconds_of_tools, spans_of
from serving import Asked, answering

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


def rollout(session_id: str = "session-1", **facts: Any) -> Rollout:
    call = {"id": "c1", "function": {"name": "calculator", "arguments": "{}"}}
    calls = [
        {"turn_id": "t1", "started_s": 100.5, "finished_s": 101.0, "first_token_s": 100.75, "prompt_tokens": 20}
        | {"sampled_tokens": 5, "finish_reason": "tool_calls", "weight_first": 3},
        {"turn_id": "t2", "started_s": 102.0, "finished_s": 102.5, "first_token_s": None, "prompt_tokens": 30}
        | {"sampled_tokens": 2, "finish_reason": "stop", "weight_first": 3},
    ]
    values: dict[str, Any] = {
        "phase": "train",
        "step": 7,
        "group": "g",
        "outcome": "ok",
        "reward": 0.5,
        "stages": {"queue": 0.25, "start": 0.25, "run": 2.5},
        "calls": calls,
        "dialogue": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2"},
        ],
        "elapsed_s": 3.0,
        "ended_s": 103.0,
    }
    return Rollout(session_id=session_id, **{**values, **facts})


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The spans that an OTLP receiver was sent."""
    spans: list[Any] = []

    def keep(asked: Asked) -> tuple[Any, ...]:
        assert asked.path == "/v1/traces"
        request = service.ExportTraceServiceRequest()
        request.ParseFromString(asked.body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                spans.extend(scope.spans)
        return 200, service.ExportTraceServiceResponse().SerializeToString(), {"content-type": "application/x-protobuf"}

    with answering(keep) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield spans


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_rollout_is_sent_as_it_ends_and_its_trace_is_that_of_its_session(sent: list[Any], tmp_path: Path) -> None:
    with open_recording(tmp_path, {}) as recording:
        recording.run.rollout(rollout())
        recording.run.rollout(rollout("session-2", outcome="agent_error", error="ValueError: no lamp", reward=None))
    spans = [s for s in sent if s.trace_id.hex() == trace_id_of("session-1")]
    by_name = {s.name: s for s in spans}
    assert sorted(s.name for s in spans) == sorted(
        [
            "invoke_agent",
            "stage queue",
            "stage start",
            "stage run",
            "chat policy",
            "chat policy",
            "execute_tool calculator",
        ]
    )
    root = by_name["invoke_agent"]
    assert (root.span_id.hex(), root.parent_span_id) == (span_id_of("session-1"), b"")
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (100_000_000_000, 103_000_000_000)
    reply = attributes(root)
    assert reply["gen_ai.operation.name"] == "invoke_agent"
    assert reply["gen_ai.conversation.id"] == "session-1"
    assert (reply["agentcore_rl.step"], reply["agentcore_rl.reward"], reply["agentcore_rl.outcome"]) == (7, 0.5, "ok")
    assert by_name["stage run"].parent_span_id == root.span_id
    first = next(s for s in spans if s.span_id.hex() == span_id_of("t1"))
    assert first.parent_span_id == by_name["stage run"].span_id
    reply = attributes(first)
    assert (reply["gen_ai.usage.input_tokens"], reply["gen_ai.usage.output_tokens"]) == (20, 5)
    assert reply["gen_ai.response.id"] == reply["agentcore_rl.turn_id"] == "t1"  # what the run and the gateway call it
    assert reply["gen_ai.server.time_to_first_token"] == 0.25
    tool = by_name["execute_tool calculator"]
    assert (tool.start_time_unix_nano, tool.end_time_unix_nano) == (101_000_000_000, 102_000_000_000)
    failed = next(s for s in sent if s.span_id.hex() == span_id_of("session-2"))
    assert (failed.status.code, failed.status.message) == (2, "ValueError: no lamp")


def test_unknown_times_follow_from_the_calls_and_the_stages() -> None:
    whole = {span.name: (span.start_s, span.end_s) for span in spans_of(vars(rollout(elapsed_s=5.0)))}
    stages = {"stage queue": (100.0, 100.25), "stage start": (100.25, 100.5), "stage run": (100.5, 103.0)}
    assert whole["invoke_agent"] == (98.0, 103.0)
    assert {name: times for name, times in whole.items() if name.startswith("stage")} == stages
    root = next(spans_of(vars(rollout(elapsed_s=None, ended_s=None))))
    assert (root.start_s, root.end_s) == (99.5, 102.5)
    assert list(spans_of(vars(rollout(calls=[], ended_s=None)))) == []


def test_two_calls_of_one_tool_are_two_spans() -> None:
    asked = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "calculator"}}]}
    calls = [{"turn_id": f"t{i}", "started_s": 100.0 + i, "finished_s": 100.5 + i} for i in range(3)]
    found = list(spans_of(vars(rollout(calls=calls, dialogue=[asked, asked, asked]))))
    assert len({span.id for span in found}) == len(found)
    tools = [(span.start_s, span.end_s) for span in found if span.name == "execute_tool calculator"]
    assert tools == [(100.5, 101.0), (101.5, 102.0)]
    assert seconds_of_tools(vars(rollout(dialogue=[]))) == {}


def test_an_example_in_the_prompt_and_a_call_of_another_form_are_no_tools_of_the_rollout() -> None:
    call = {"id": "c", "function": {"name": "calculator"}}
    example: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    own: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "2"}]
    assert seconds_of_tools(vars(rollout(dialogue=[*example, *own]))) == {"calculator": 1.0}
    assert seconds_of_tools(
        vars(rollout(dialogue=[{"role": "assistant", "tool_calls": [{"function": "x"}]}, *own[1:]]))
    ) == {"unknown": 1.0}
