"""The targets, one check each: what a run measured against what is promised.

`value` is None and `ok` False where a run left the measurement out (`--quick`, or a peer that is not installed); `note`
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .pressure import REALISTIC_LOADS, SHARE
from .table import KINDS, Kind, Row, find

W64, S64, W1024, S1024 = KINDS
Scenarios = Mapping[str, Mapping[str, float]]
_SCALES = 1.7  # times the requests/s of one gateway, for two


@dataclass(frozen=True)
class Check:
    name: str
    value: float | None
    target: float
    at_least: bool
    note: str = ""

    @property
    def ok(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.target if self.at_least else self.value <= self.target

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        verdict = "not measured" if self.value is None else "ok" if self.ok else "MISSED"
        value = "-" if self.value is None else f"{self.value:.3g}" if abs(self.value) < 1000 else f"{self.value:.0f}"
        note = f"  ({self.note})" if self.note else ""
        return f"  {verdict:<12} {value:>8}  {'>=' if self.at_least else '<='} {self.target:<6g} {self.name}{note}"


def _ratio(rows: Sequence[Row], peer: str, kind: Kind) -> float | None:
    ours, theirs = find(rows, "ours", kind, 32), find(rows, peer, kind, 32)
    return ours.rps / theirs.rps if ours and theirs and theirs.rps else None


def _cpu(rows: Sequence[Row], kind: Kind, name: str, target: float, reference_ms: float, per: float = 1) -> Check:
    """CPU per call, or part of one, as measured.

    The note says what the peer took for the same call in this run, beside the `reference_ms` it took where the target
    comes from, and what a proxy without any of a gateway's duties takes; how fast the machine is moves all of them.
    """
    ours = find(rows, "ours", kind, 32)
    value = None if ours is None or ours.cpu_ms is None else ours.cpu_ms * per
    notes = []
    for peer, where in (("rllm", f", {reference_ms:g} where the target comes from"), ("bare", "")):
        theirs = find(rows, peer, kind, 32)
        if theirs is not None and theirs.cpu_ms:
            notes.append(f"{peer}: {theirs.cpu_ms:.3g} ms a call{where}")
    return Check(name, value, target, False, "; ".join(notes))


def table_checks(rows: Sequence[Row]) -> list[Check]:
    """What the table's cells at 32 connections promise."""
    found = []
    for kind, target in ((W64, 30), (W1024, 20), (S1024, 30)):
        found.append(
            Check(f"requests/s, ours / rllm, {kind}, 32 connections", _ratio(rows, "rllm", kind), target, True)
        )
    for kind in (W64, W1024):
        found.append(
            Check(
                f"requests/s, ours / toolkit, {kind}, 32 connections",
                _ratio(rows, "toolkit", kind),
                5,
                True,
                "whole answers: its streams are not relayed",
            )
        )
    return [
        *found,
        _cpu(rows, W64, "CPU ms per call, 64 tokens, 32 connections", 0.15, 4.0),
        _cpu(rows, W1024, "CPU ms per call, 1,024 tokens, 32 connections", 0.5, 10.7),
        _cpu(rows, S1024, "CPU us per streamed chunk, 1,024 tokens, 32 connections", 2.5, 74.0, 1000 / 1024),
    ]


def _connections(found: Mapping[str, Mapping[str, float]]) -> list[Check]:
    def worst(name: str) -> tuple[float | None, str]:
        if not found:
            return None, ""
        kind = max(found, key=lambda k: found[k][name])
        return found[kind][name], f"worst of {len(found)} kinds of answers: {kind}"

    falls, where_falls = worst("falls_percent")
    ratio, where_ratio = worst("p99_over_p50")
    errors, where_errors = worst("errors")
    return [
        Check("requests/s lost from 32 to 1,000 connections, %", falls, 15, False, where_falls),
        Check("p99 / p50 at 1,000 connections", ratio, 8, False, where_ratio),
        Check("errors at 32 and 1,000 connections", errors, 0, False, where_errors),
    ]


def _realistic(scenarios: Scenarios) -> list[Check]:
    found = []
    for agents, shape in REALISTIC_LOADS:
        value = scenarios.get(f"{agents} agents, {shape}", {}).get("added_p50_ms")
        found.append(Check(f"added p50 ms, {agents} agents, {shape}", value, 20, False))
    return found


_TWO = {
    "two gateways, each held to a share": f"1,024 tokens, each held to {SHARE:.0%} of a core",
    "two gateways, rendered here": "1,024 tokens, rendered here",
}


def _two(scenarios: Scenarios) -> list[Check]:
    """What a second gateway adds where there is room for it.

    With neither held to a share, answers that are relayed are a check only on a machine with enough cores for load, server
    and two gateways; on others the scenario's line says how much room there was.
    """
    found = []
    free = scenarios.get("two gateways", {})
    kinds = {**_TWO, "two gateways": "1,024 tokens"} if free and free["most"] >= _SCALES else _TWO
    for name, what in kinds.items():
        values = scenarios.get(name, {})
        room = f"room for {values['most']:.2f}; everything else took {values['others']:.2f} cores" if values else ""
        found.append(Check(f"requests/s, two gateways / one, {what}", values.get("ratio"), _SCALES, True, room))
    return found


def all_checks(
    rows: Sequence[Row], connections: Mapping[str, Mapping[str, float]], scenarios: Scenarios, left_out: str
) -> list[Check]:
    """Every target in the order of the README's promises. `left_out` is the note of those that were not measured."""

    def value(scenario: str, name: str) -> float | None:
        return scenarios.get(scenario, {}).get(name)

    remembered = scenarios.get("memory", {})
    missing = remembered["turns"] - remembered["found"] + remembered["wrong"] if remembered else None
    found = [
        *table_checks(rows),
        Check(
            "added p50 ms, 1 connection, 64 tokens",
            value("added latency", "added_p50_ms"),
            0.25,
            False,
            "all on one core",
        ),
        *_connections(connections),
        *_realistic(scenarios),
        *_two(scenarios),
        *(
            Check(f"CPU of turn 200 (100k tokens) / turn 2{how}", value(scenario, "ratio"), 3, False)
            for scenario, how in (
                ("history", ""),
                ("history, streamed", ", streamed"),
                ("history, Anthropic", ", Anthropic"),
                ("history, Responses", ", Responses"),
                ("rendered here", ", rendered here"),
            )
        ),
        Check("RSS MB after 2,500 sessions x 40 turns x 2k tokens", remembered.get("rss_mb"), 400, False),
        Check("turns of those missing or changed when fetched", missing, 0, False),
        Check("serving CPU ms per turn of a bulk fetch", value("bulk fetch", "cpu_ms_per_turn"), 0.2, False),
        Check("worst call during a bulk fetch, ms", value("bulk fetch", "worst_call_during_ms"), 50, False),
    ]
    return [c if c.value is not None else Check(c.name, None, c.target, c.at_least, left_out) for c in found]
