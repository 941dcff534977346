"""Prometheus counters for a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MissingExtraError
from .client import RolloutClient

_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


def export_prometheus(client: RolloutClient, *, registry: Any = None) -> None:
    """Count rollouts by outcome, refusals, retries and stops, and time the stages, in a registry (default: the global one).

    Metrics: ``agentcore_rl_rollouts_total{outcome}``, ``agentcore_rl_failures_total{cause}``, ``agentcore_rl_in_flight``,
    ``agentcore_rl_events_total{event}``, ``agentcore_rl_stage_seconds{stage}``, ``agentcore_rl_records_total{proof}``. Several
    clients may share a registry.

    Raises: MissingExtraError without `prometheus-client`.
    """
    try:
        import prometheus_client as prometheus
    except ModuleNotFoundError as e:
        raise MissingExtraError("this needs prometheus-client:\n    pip install prometheus-client") from e
    where: Any = prometheus.REGISTRY if registry is None else registry
    if not hasattr(where, "_agentcore_rl"):
        to: dict[str, Any] = {"namespace": "agentcore_rl", "registry": where}
        where._agentcore_rl = (
            prometheus.Counter("rollouts", "Rollouts that ended", ["outcome"], **to),
            prometheus.Counter("failures", "Rollouts that failed, by cause", ["cause"], **to),
            prometheus.Counter("events", "Events of rollouts", ["event"], **to),
            prometheus.Counter("records", "Records read, by what they prove of their origin", ["proof"], **to),
            prometheus.Gauge("in_flight", "Sessions between invoke and stop", **to),
            prometheus.Histogram("stage_seconds", "Time in a stage", ["stage"], buckets=_BUCKETS_S, **to),
        )
    rollouts, failures, events, records, in_flight, stages = where._agentcore_rl

    def on_event(event: str, fields: Mapping[str, Any]) -> None:
        events.labels(event).inc()
        if fields.get("proof") is not None:
            records.labels(str(fields["proof"])).inc()
        if event == "accepted":
            in_flight.inc()
        elif event == "stopped":
            in_flight.dec()
        elif event == "finished":
            rollouts.labels(fields["outcome"]).inc()
            if fields["cause"] is not None:
                failures.labels(str(fields["cause"])).inc()
            for stage, seconds in fields["stages"].items():
                stages.labels(stage).observe(seconds)

    client.subscribe(on_event)
