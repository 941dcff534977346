"""Rollouts as OpenTelemetry spans: one trace a rollout, named after its session.

The trace id follows from the session id (`contract.trace_id_of`), so a span, a row of the run, a session of the gateway and the
agent's own spans find each other without passing an id on. Names are those of the GenAI conventions: `invoke_agent` for the
rollout, `chat` for a model call, `execute_tool` for the time between two of them; stages have this project's names.

Source: OpenTelemetry semantic conventions 1.38, gen-ai-spans and gen-ai-agent-spans.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .._installation import require
from ..contract import span_id_of, trace_id_of
from ..errors import MissingExtraError

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_MS = 10_000
_OURS = ["phase", "step", "grp", "place", "attempt", "outcome", "cause", "failure", "reward", "advantage", "weight_min"]


@dataclass(frozen=True)
class Span:
    """A span before it is OpenTelemetry's. An attribute that is None is left out. Units: unix seconds."""

    name: str
    id: str
    parent_id: str | None
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]
    client: bool = False  # a call to another service
    error: str | None = None


def spans_of(rollout: Mapping[str, Any]) -> Iterator[Span]:
    """Yield the spans of a rollout, given as `RunReader.rollout` returns it. A rollout without times has none."""
    facts = {**rollout, **(rollout.get("detail") or {})}
    calls = sorted((c for c in facts.get("calls") or () if c.get("started_s")), key=lambda c: c["started_s"])
    stages = facts.get("stages") or {}
    ended_s = facts.get("ended_s") or (calls[-1]["finished_s"] if calls else None)
    if ended_s is None:
        return
    session_id = facts["session_id"]
    root = span_id_of(session_id)
    began_s = min([ended_s - (facts.get("elapsed_s") or sum(stages.values())), *(c["started_s"] for c in calls)])
    attributes = {"gen_ai.operation.name": "invoke_agent", "session.id": session_id}
    facts.setdefault("grp", facts.get("group"))
    attributes |= {f"agentcore_rl.{name}": facts.get(name) for name in _OURS}
    failed = facts.get("outcome") != "ok"
    error = (facts.get("error") or facts.get("outcome")) if failed else None
    yield Span("invoke_agent", root, None, began_s, max(ended_s, began_s), attributes, error=error)
    at_s = ended_s - sum(stages.values())
    for stage, seconds in stages.items():
        ours = {"agentcore_rl.stage": stage}
        yield Span(f"stage {stage}", span_id_of(f"{session_id}/{stage}"), root, at_s, at_s + seconds, ours)
        at_s += seconds
    parent = span_id_of(f"{session_id}/run") if "run" in stages else root
    # Those before are examples in the prompt.
    answers = [m for m in facts.get("dialogue") or () if m.get("role") == "assistant"][-len(calls) :]
    for number, call in enumerate(calls):
        name, began_s = call.get("turn_id") or f"{session_id}/{number}", call["started_s"]
        ended_s = call["finished_s"] or began_s
        attributes = _of_call(call)
        model = attributes["gen_ai.request.model"]
        yield Span(f"chat {model}", span_id_of(name), parent, began_s, ended_s, attributes, client=True)
        if number + 1 == len(calls) or number >= len(answers):
            continue
        next_s = max(calls[number + 1]["started_s"], ended_s)
        for place, asked in enumerate(answers[number].get("tool_calls") or ()):
            asked = asked if isinstance(asked, Mapping) else {}
            function = asked.get("function")
            tool = str((isinstance(function, Mapping) and function.get("name")) or "unknown")
            attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
            attributes["gen_ai.tool.call.id"] = str(asked["id"]) if asked.get("id") else None
            yield Span(f"execute_tool {tool}", span_id_of(f"{name}/tool/{place}"), parent, ended_s, next_s, attributes)


def seconds_of_tools(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Sum the seconds of each tool's calls. Calls that run at the same time count for each of them."""
    found: dict[str, float] = {}
    for span in spans_of(rollout):
        if (tool := span.attributes.get("gen_ai.tool.name")) is not None:
            found[tool] = found.get(tool, 0.0) + span.end_s - span.start_s
    return found


def _of_call(call: Mapping[str, Any]) -> dict[str, Any]:
    first_s = call.get("first_token_s")
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentcore_rl",
        "gen_ai.request.model": call.get("model") or "policy",
        "gen_ai.response.id": call.get("turn_id"),
        "gen_ai.response.finish_reasons": [call["finish_reason"]] if call.get("finish_reason") else None,
        "gen_ai.usage.input_tokens": call.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": call.get("sampled_tokens"),
        "gen_ai.server.time_to_first_token": first_s - call["started_s"] if first_s else None,
        "agentcore_rl.turn_id": call.get("turn_id"),
        "agentcore_rl.weight_version": call.get("weight_first"),
    }


class SpanSender:
    """Sends spans. ``exporter`` is one of OpenTelemetry's, by default OTLP over HTTP to where the environment says.

    Raises: MissingExtraError.
    """

    def __init__(self, exporter: Any = None) -> None:
        self._sdk = require("opentelemetry.sdk.trace", extra="otel")
        self._api = require("opentelemetry.trace", extra="otel")
        export = require("opentelemetry.sdk.trace.export", extra="otel")
        resources = require("opentelemetry.sdk.resources", extra="otel")
        if exporter is None:
            exporter = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", extra="otel").OTLPSpanExporter()
        service = os.environ.get("OTEL_SERVICE_NAME", "agentcore-rl")
        self._resource = resources.Resource.create({"service.name": service})
        self._sending = export.BatchSpanProcessor(exporter)

    @classmethod
    def from_env(cls) -> SpanSender | None:
        """Return a sender if the environment names a collector. None otherwise, and (with a warning) without the libraries."""
        if not any(os.environ.get(name) for name in ENDPOINTS):
            return None
        try:
            return cls()
        except MissingExtraError as e:
            log.warning("spans are not sent: %s", e)
            return None

    def send(self, rollout: Mapping[str, Any]) -> None:
        """Queue the spans of a rollout, whose ids follow from its own."""
        api, trace_id = self._api, int(trace_id_of(rollout["session_id"]), 16)

        def context(span_id: str) -> Any:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            return api.SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=flags)

        for span in spans_of(rollout):
            status = api.Status() if span.error is None else api.Status(api.StatusCode.ERROR, span.error[:500])
            attributes = {"gen_ai.conversation.id": rollout["session_id"], **span.attributes}
            plain = (str, int, float, bool, list)
            known = {k: v if isinstance(v, plain) else json.dumps(v) for k, v in attributes.items() if v is not None}
            readable = self._sdk.ReadableSpan(
                span.name,
                context(span.id),
                parent=None if span.parent_id is None else context(span.parent_id),
                resource=self._resource,
                attributes=known,
                kind=api.SpanKind.CLIENT if span.client else api.SpanKind.INTERNAL,
                status=status,
                start_time=int(span.start_s * 1e9),
                end_time=int(span.end_s * 1e9),
            )
            self._sending.on_end(readable)

    def close(self) -> bool:
        """Send what waits. Returns whether all of it was taken."""
        done = bool(self._sending.force_flush(FLUSH_MS))
        self._sending.shutdown()
        return done
