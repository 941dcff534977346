"""Rollouts as OpenTelemetry spans: one trace a rollout, named after its session.

The trace id follows from the session id (`contract.trace_id_of`), so a span, a row of the run, a session of the gateway and the
agent's own spans find each other without anything being handed on. Names are those of the GenAI conventions: `invoke_agent` for
the rollout, `chat` for a model call, `execute_tool` for what lies between two of them; stages have names of our own.

Source: OpenTelemetry semantic conventions 1.38, gen-ai-spans and gen-ai-agent-spans.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._installation import require
from ..contract import span_id_of, trace_id_of
from ..errors import MissingExtraError

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_MS = 10_000


@dataclass(frozen=True, kw_only=True)
class SpanFacts:
    """A span before it is one. Units: unix seconds."""

    name: str
    start_s: float
    end_s: float
    span_id: str
    parent_id: str | None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    client: bool = False  # a call to another service
    error: str | None = None


def spans_of(rollout: Mapping[str, Any]) -> list[SpanFacts]:
    """The spans of a rollout, of which `RunReader.rollout` gives the facts (``detail`` among the others). None without times."""
    facts = {**rollout, **(rollout.get("detail") or {})}
    calls = sorted((c for c in facts.get("calls") or () if c.get("started_s")), key=lambda c: c["started_s"])
    stages = facts.get("stages") or {}
    ended_s = facts.get("ended_s") or (calls[-1]["finished_s"] if calls else None)
    if ended_s is None:
        return []
    session_id = facts["session_id"]
    root = span_id_of(session_id)
    began_s = min([ended_s - (facts.get("elapsed_s") or sum(stages.values())), *(c["started_s"] for c in calls)])
    ours = (
        "phase",
        "step",
        "grp",
        "place",
        "attempt",
        "outcome",
        "cause",
        "failure",
        "reward",
        "advantage",
        "weight_min",
    )
    attributes = {f"agentcore_rl.{name}": facts[name] for name in ours if facts.get(name) is not None}
    attributes |= {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": session_id,
        "session.id": session_id,
    }
    made = [
        SpanFacts(
            name="invoke_agent",
            start_s=began_s,
            end_s=max(ended_s, began_s),
            span_id=root,
            parent_id=None,
            attributes=attributes,
            error=None
            if facts.get("outcome") in ("ok", "open", "closed")
            else facts.get("error") or facts.get("outcome"),
        )
    ]
    at_s = ended_s - sum(stages.values())
    for stage, seconds in stages.items():
        here = {"agentcore_rl.stage": stage, "gen_ai.conversation.id": session_id}
        made.append(
            SpanFacts(
                name=f"stage {stage}",
                start_s=at_s,
                end_s=at_s + seconds,
                span_id=span_id_of(f"{session_id}/{stage}"),
                parent_id=root,
                attributes=here,
            )
        )
        at_s += seconds
    made += _calls(
        session_id, span_id_of(f"{session_id}/run") if "run" in stages else root, calls, facts.get("dialogue") or ()
    )
    return made


def _calls(
    session_id: str, parent_id: str, calls: Sequence[Mapping[str, Any]], dialogue: Sequence[Mapping[str, Any]]
) -> Iterator[SpanFacts]:
    answers = [m for m in dialogue if m.get("role") == "assistant"]
    for number, call in enumerate(calls):
        name = call.get("turn_id") or f"{session_id}/{number}"
        facts = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "agentcore_rl",
            "gen_ai.request.model": call.get("model") or "policy",
            "gen_ai.conversation.id": session_id,
            "gen_ai.response.id": call.get("turn_id"),
            "gen_ai.response.finish_reasons": [call["finish_reason"]] if call.get("finish_reason") else None,
            "gen_ai.usage.input_tokens": call.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": call.get("sampled_tokens"),
            "agentcore_rl.turn_id": call.get("turn_id"),
            "agentcore_rl.weight_version": call.get("weight_first"),
        }
        if call.get("first_token_s"):
            facts["gen_ai.server.time_to_first_token"] = call["first_token_s"] - call["started_s"]
        yield SpanFacts(
            name=f"chat {facts['gen_ai.request.model']}",
            start_s=call["started_s"],
            end_s=call["finished_s"] or call["started_s"],
            span_id=span_id_of(name),
            parent_id=parent_id,
            attributes={k: v for k, v in facts.items() if v is not None},
            client=True,
        )
        following = calls[number + 1] if number + 1 < len(calls) else None
        asked = answers[number].get("tool_calls") or () if number < len(answers) else ()
        for place, tool in enumerate(asked if following is not None else ()):
            function = (tool.get("function") or {}) if isinstance(tool, Mapping) else {}
            name = str(function.get("name") or "unknown")
            facts = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.conversation.id": session_id,
            }
            if isinstance(tool, Mapping) and tool.get("id"):
                facts["gen_ai.tool.call.id"] = str(tool["id"])
            assert following is not None
            yield SpanFacts(
                name=f"execute_tool {name}",
                start_s=call["finished_s"] or call["started_s"],
                end_s=max(following["started_s"], call["finished_s"] or call["started_s"]),
                span_id=span_id_of(f"{name}/tool/{place}"),
                parent_id=parent_id,
                attributes=facts,
            )


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
        """One, where the environment names a collector; None elsewhere, and (with a warning) without the libraries."""
        if not any(os.environ.get(name) for name in ENDPOINTS):
            return None
        try:
            return cls()
        except MissingExtraError as e:
            log.warning("no spans are sent: %s", e)
            return None

    def send(self, rollout: Mapping[str, Any]) -> int:
        """Queue the spans of a rollout, whose ids follow from its own. Returns how many."""
        api, trace_id = self._api, int(trace_id_of(rollout["session_id"]), 16)

        def context(span_id: str) -> Any:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            return api.SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=flags)

        spans = spans_of(rollout)
        for facts in spans:
            status = api.Status() if facts.error is None else api.Status(api.StatusCode.ERROR, facts.error[:500])
            plain = (str, int, float, bool, list)
            span = self._sdk.ReadableSpan(
                facts.name,
                context(facts.span_id),
                parent=None if facts.parent_id is None else context(facts.parent_id),
                resource=self._resource,
                attributes={k: v if isinstance(v, plain) else json.dumps(v) for k, v in facts.attributes.items()},
                kind=api.SpanKind.CLIENT if facts.client else api.SpanKind.INTERNAL,
                status=status,
                start_time=int(facts.start_s * 1e9),
                end_time=int(facts.end_s * 1e9),
            )
            self._sending.on_end(span)
        return len(spans)

    def close(self) -> bool:
        """Send what waits. Returns whether all of it was taken."""
        done = bool(self._sending.force_flush(FLUSH_MS))
        self._sending.shutdown()
        return done
