"""Counters of a runtime in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

START_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The server's own counters: requests by operation and status, start times, CPU of ended sessions."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.starts: Counter[str] = Counter()  # sessions that took up to each bound, and all
        self.start_sum_s = self.session_cpu_s = 0.0

    def add_start(self, seconds: float | None) -> None:
        """Count the start of a session. None: it did not start."""
        if seconds is not None:
            self.start_sum_s += seconds
            self.starts.update([*(f"{bound:g}" for bound in START_BOUNDS_S if seconds <= bound), "+Inf"])

    def render(
        self, states: Counter[str], started: int, ended: Counter[str], refused: Counter[str], faults: Counter[str]
    ) -> str:
        """Render all metrics as one text, with the counts that the session table, the quotas, and the fault plan have."""
        requests = {f'{{operation="{o}",status="{status}"}}': n for (o, status), n in sorted(self.requests.items())}
        bounds = (*(f"{bound:g}" for bound in START_BOUNDS_S), "+Inf")
        starts: dict[str, float] = {f'_bucket{{le="{bound}"}}': self.starts[bound] for bound in bounds}
        starts |= {"_sum": self.start_sum_s, "_count": self.starts["+Inf"]}
        families: tuple[tuple[str, str, Mapping[str, float]], ...] = (
            ("sessions", "gauge", _labeled("state", {name: states[name] for name in ("starting", "active", "idle")})),
            ("sessions_started_total", "counter", {"": started}),
            ("sessions_ended_total", "counter", _labeled("reason", ended)),
            ("requests_total", "counter", requests),
            ("refused_total", "counter", _labeled("error", refused)),
            ("faults_injected_total", "counter", _labeled("kind", faults)),
            ("session_start_seconds", "histogram", starts),
            ("session_cpu_seconds_total", "counter", {"": self.session_cpu_s}),
        )
        lines = []
        for name, kind, samples in families:
            lines.append(f"# TYPE agentcore_runtime_{name} {kind}")
            lines += [f"agentcore_runtime_{name}{suffix} {round(value, 6):.15g}" for suffix, value in samples.items()]
        return "\n".join(lines) + "\n"


def _labeled(label: str, counts: Mapping[str, int]) -> dict[str, float]:
    return {f'{{{label}="{key}"}}': count for key, count in sorted(counts.items())}
