"""Counters of a runtime in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

START_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The server's own counters: requests by operation and status, start times, CPU of ended sessions."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.starts_s: list[float] = [0.0] * (len(START_BOUNDS_S) + 1)  # how many took up to each bound, and all
        self.start_sum_s = 0.0
        self.session_cpu_s = 0.0

    def add_start(self, seconds: float) -> None:
        """Count the start of a session."""
        self.start_sum_s += seconds
        for index, bound in enumerate((*START_BOUNDS_S, seconds)):
            self.starts_s[index] += seconds <= bound


def render(
    metrics: Metrics,
    *,
    states: Mapping[str, int],
    started: int,
    ended: Mapping[str, int],
    refused: Mapping[str, int],
    faults: Mapping[str, int],
) -> bytes:
    """Render all metrics as one text."""
    requests = [
        (f'requests_total{{operation="{operation}",status="{status}"}}', count)
        for (operation, status), count in sorted(metrics.requests.items())
    ]
    starts = [
        (f'session_start_seconds_bucket{{le="{bound}"}}', count)
        for bound, count in zip((*(f"{b:g}" for b in START_BOUNDS_S), "+Inf"), metrics.starts_s, strict=True)
    ]
    starts += [("session_start_seconds_sum", metrics.start_sum_s)]
    starts += [("session_start_seconds_count", metrics.starts_s[-1])]
    known_states = {state: states.get(state, 0) for state in ("starting", "active", "idle")}
    families: tuple[tuple[str, str, Iterable[tuple[str, float]]], ...] = (
        ("sessions", "gauge", _labeled("sessions", "state", known_states)),
        ("sessions_started_total", "counter", [("sessions_started_total", started)]),
        ("sessions_ended_total", "counter", _labeled("sessions_ended_total", "reason", ended)),
        ("requests_total", "counter", requests),
        ("refused_total", "counter", _labeled("refused_total", "error", refused)),
        ("faults_injected_total", "counter", _labeled("faults_injected_total", "kind", faults)),
        ("session_start_seconds", "histogram", starts),
        ("session_cpu_seconds_total", "counter", [("session_cpu_seconds_total", metrics.session_cpu_s)]),
    )
    lines = []
    for name, kind, samples in families:
        lines += [f"# TYPE agentcore_runtime_{name} {kind}"]
        lines += [f"agentcore_runtime_{sample} {round(value, 6):.15g}" for sample, value in samples]
    return ("\n".join(lines) + "\n").encode()


def _labeled(name: str, label: str, counts: Mapping[str, int]) -> list[tuple[str, float]]:
    return [(f'{name}{{{label}="{key}"}}', count) for key, count in sorted(counts.items())]
