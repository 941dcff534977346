"""Counters of a runtime in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

START_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Cumulative buckets over seconds."""

    def __init__(self, bounds_s: Iterable[float] = START_BUCKETS_S) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * len(self.bounds_s)
        self.count = 0
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        self.count += 1
        self.sum_s += value_s
        for index, bound in enumerate(self.bounds_s):
            if value_s <= bound:
                self.counts[index] += 1

    def lines(self, name: str) -> list[str]:
        buckets = [f'{name}_bucket{{le="{b:g}"}} {c}' for b, c in zip(self.bounds_s, self.counts, strict=True)]
        return [
            *buckets,
            f'{name}_bucket{{le="+Inf"}} {self.count}',
            f"{name}_sum {self.sum_s:.6f}",
            f"{name}_count {self.count}",
        ]


class Metrics:
    """The server's own counters: requests by operation and status, start times, CPU of ended sessions."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.start_s = Histogram()
        self.session_cpu_s = 0.0

    def request(self, operation: str, status: int) -> None:
        key = (operation, status)
        self.requests[key] = self.requests.get(key, 0) + 1


def render(
    metrics: Metrics,
    *,
    states: Mapping[str, int],
    started: int,
    ended: Mapping[str, int],
    refused: Mapping[str, int],
    faults: Mapping[str, int],
) -> bytes:
    """All metrics as one text."""
    p = "agentcore_runtime"
    lines = [f"# TYPE {p}_sessions gauge"]
    lines += [f'{p}_sessions{{state="{state}"}} {states.get(state, 0)}' for state in ("starting", "active", "idle")]
    lines += [f"# TYPE {p}_sessions_started_total counter", f"{p}_sessions_started_total {started}"]
    lines += _family(f"{p}_sessions_ended_total", "reason", ended)
    lines += [f"# TYPE {p}_requests_total counter"]
    lines += [
        f'{p}_requests_total{{operation="{op}",status="{status}"}} {n}'
        for (op, status), n in sorted(metrics.requests.items())
    ]
    lines += _family(f"{p}_refused_total", "error", refused)
    lines += _family(f"{p}_faults_injected_total", "kind", faults)
    lines += [f"# TYPE {p}_session_start_seconds histogram", *metrics.start_s.lines(f"{p}_session_start_seconds")]
    lines += [
        f"# TYPE {p}_session_cpu_seconds_total counter",
        f"{p}_session_cpu_seconds_total {metrics.session_cpu_s:.6f}",
    ]
    return ("\n".join(lines) + "\n").encode()


def _family(name: str, label: str, counts: Mapping[str, int]) -> list[str]:
    return [f"# TYPE {name} counter", *(f'{name}{{{label}="{key}"}} {n}' for key, n in sorted(counts.items()))]
