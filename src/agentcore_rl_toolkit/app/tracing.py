"""An OpenTelemetry span per rollout, when the agent's process uses OpenTelemetry; otherwise nothing is loaded or done."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Mapping
from typing import Any

from ..contract import span_id_of, trace_id_of


def start_span(name: str, attributes: Mapping[str, Any], context: contextvars.Context) -> Any:
    """Start a span and make it the current one in `context`, so that the agent's own spans hang below it.

    Returns the span, or None when OpenTelemetry is not in use. Attributes that are None are left out.
    """
    trace, otel_context = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if trace is None or otel_context is None:
        return None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None  # loaded (the SDK does that), but not set up
    known = {k: v for k, v in attributes.items() if v is not None}
    rollout = _of_the_rollout(trace, str(attributes.get("session.id")))
    above = context.run(trace.get_current_span)
    # Where the request brought no trace of its own, the span hangs in the one that everybody finds by the session's id.
    parent = None if above.get_span_context().is_valid else trace.set_span_in_context(trace.NonRecordingSpan(rollout))
    start = trace.get_tracer("agentcore_rl_toolkit").start_span
    span = context.run(start, name, parent, attributes=known, links=[trace.Link(rollout)])
    context.run(lambda: otel_context.attach(trace.set_span_in_context(span)))
    return span


def _of_the_rollout(trace: Any, session_id: str) -> Any:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    ids = int(trace_id_of(session_id), 16), int(span_id_of(session_id), 16)
    return trace.SpanContext(*ids, is_remote=True, trace_flags=flags)


def end_span(span: Any, outcome: str | None, error: BaseException | None) -> None:
    """End what `start_span` returned; None is fine."""
    if span is None:
        return
    if outcome is not None:
        span.set_attribute("agentcore_rl.outcome", outcome)
    if error is not None:
        span.record_exception(error)
        trace = sys.modules["opentelemetry.trace"]
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
    span.end()
