"""Prometheus counters and OpenTelemetry spans for a client. Neither library is imported unless its function is called.

from agentcore_rl_toolkit.client import metrics
metrics.export_prometheus(client)
metrics.trace(client)
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from ..contract import span_id_of, trace_id_of
from ..errors import MissingExtraError
from .rollouts import RolloutClient

_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


def export_prometheus(client: RolloutClient, *, registry: Any = None) -> None:
    """Count rollouts by outcome, refusals, retries and stops, and time the stages, in a registry (default: the global one).

    Metrics: ``agentcore_rl_rollouts_total{outcome}``, ``agentcore_rl_failures_total{cause}``, ``agentcore_rl_in_flight``,
    ``agentcore_rl_events_total{event}``, ``agentcore_rl_stage_seconds{stage}``, ``agentcore_rl_records_total{proof}``. Several
    clients may share a registry.

    Raises: MissingExtraError without `prometheus-client`.
    """
    prometheus = _load("prometheus_client", "prometheus-client")
    where = registry if registry is not None else prometheus.REGISTRY
    known = getattr(where, "_agentcore_rl", None)
    if known is None:
        known = where._agentcore_rl = (
            prometheus.Counter("agentcore_rl_rollouts", "Rollouts that ended", ["outcome"], registry=where),
            prometheus.Counter("agentcore_rl_failures", "Rollouts that failed, by cause", ["cause"], registry=where),
            prometheus.Counter("agentcore_rl_events", "Events of rollouts", ["event"], registry=where),
            prometheus.Gauge("agentcore_rl_in_flight", "Sessions between invoke and stop", registry=where),
            prometheus.Histogram(
                "agentcore_rl_stage_seconds", "Time in a stage", ["stage"], registry=where, buckets=_BUCKETS_S
            ),
            prometheus.Counter(
                "agentcore_rl_records", "Records read, by what they prove of their origin", ["proof"], registry=where
            ),
        )
    rollouts, failures, events, flying, stages, records = known

    def on_event(event: str, fields: Mapping[str, Any]) -> None:
        events.labels(event).inc()
        if fields.get("proof") is not None:
            records.labels(str(fields["proof"])).inc()
        if event == "accepted":
            flying.inc()
        elif event == "stopped":
            flying.dec()
        elif event == "finished":
            rollouts.labels(fields["outcome"]).inc()
            if fields["cause"] is not None:
                failures.labels(str(fields["cause"])).inc()
            for stage, seconds in fields["stages"].items():
                stages.labels(stage).observe(seconds)

    client.subscribe(on_event)


def trace(client: RolloutClient, *, tracer: Any = None) -> None:
    """One OpenTelemetry span per rollout, from its first invoke to its outcome, with the ids as attributes, in the trace of its
    session (`contract.trace_id_of`).

    Raises: MissingExtraError without `opentelemetry-api`.
    """
    api = _load("opentelemetry.trace", "opentelemetry-api")
    spans = tracer if tracer is not None else api.get_tracer("agentcore_rl_toolkit.client")
    begun_ns: dict[str, int] = {}  # by session: a rollout's spans are made when its end is known

    def on_event(event: str, fields: Mapping[str, Any]) -> None:
        session_id = str(fields["session_id"])
        if event == "intent":
            begun_ns[session_id] = time.time_ns()
        elif event in ("finished", "retried"):
            began = begun_ns.pop(session_id, None)
            if began is None:
                return
            ids = ("session_id", "input_id", "exp_id", "attempt", "outcome", "cause", "failure")
            attributes = {f"agentcore_rl.{name}": fields[name] for name in ids if fields.get(name) is not None}
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            named = int(trace_id_of(session_id), 16), int(span_id_of(session_id), 16)
            above = api.set_span_in_context(
                api.NonRecordingSpan(api.SpanContext(*named, is_remote=True, trace_flags=flags))
            )
            span = spans.start_span("rollout", context=above, start_time=began, attributes=attributes)
            if fields.get("outcome") != "ok":
                span.set_status(api.Status(api.StatusCode.ERROR, str(fields.get("error"))))
            span.end()

    client.subscribe(on_event)


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise MissingExtraError(f"this needs {package}, which is not installed:\n    pip install {package}") from e
