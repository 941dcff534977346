"""Model gateways side by side: requests per second, latency and CPU per call; and our gateway's targets.

    python benchmarks/gateway.py [--quick] [--json FILE] [--only ours,direct] [--checks none|NAMES] [--seconds 3]

A scripted engine (vLLM's formats, ready-made answers of 64 and 1,024 tokens over a 512-token prompt) and wrk share
one core, the gateway under test has another to itself. Peers are installed from the package index into environments of
their own under `.venvs/`. CPU per call depends least on what else the machine does, and the least CPU of several passes
counts; `server` is the CPU of the engine per request, `others` the cores that everything else used meanwhile.
A stream comes from the server in one write, so that only the gateway limits. wrk counts an answer that took longer than
twice the mean several times over: p99 errs upwards.

`--quick` takes under 50 s: of the peers only rllm-model-gateway, and only where it is installed. What was not measured has
`value: null, ok: false` in FILE. A full run takes about 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway_load import scenarios
from gateway_load.gateways import MEANING, NAMES, install, installed
from gateway_load.processes import calibration_ms, upstream
from gateway_load.table import KINDS, Row, fill, find

PEER_FLOORS = (12, 9, 12, 6)  # times rllm-model-gateway's requests/s, for each kind
PEER_FLOOR_TOOLKIT = 2.5  # times those of the published toolkit's gateway
MEASURED_AT_MS = 44.0  # the bounds of CPU per call are for a machine where a million additions take so long
FAIR = 8  # p99 over p50 at 1,000 connections
TURNS, TOKENS = 200, 100_000  # the long session
Found = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Check:
    """A target. ``value`` is None if a run left the measurement out. ``note`` states that, or the origin of the target."""

    name: str
    value: float | None
    target: float
    at_least: bool = False
    note: str = ""

    @property
    def ok(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.target if self.at_least else self.value <= self.target

    def __str__(self) -> str:
        verdict = "not measured" if self.value is None else "ok" if self.ok else "MISSED"
        value = "-" if self.value is None else f"{self.value:.3g}" if abs(self.value) < 1000 else f"{self.value:.0f}"
        note = f"  ({self.note})" if self.note else ""
        return f"  {verdict:<12} {value:>8}  {'>=' if self.at_least else '<='} {self.target:<6g} {self.name}{note}"


def checks_of(rows: Sequence[Row], found: Found, calibration: float) -> list[Check]:
    """Every target, in the order of the promises. ``calibration``: `calibration_ms` of this machine."""
    checks = []
    for kind, floor in zip(KINDS, PEER_FLOORS, strict=True):
        ours, theirs = find(rows, "ours", kind, 32), find(rows, "rllm", kind, 32)
        ratio = ours.rps / theirs.rps if ours and theirs and theirs.rps else None
        checks.append(Check(f"requests/s, ours / rllm, {kind}", ratio, floor, True))
        peer = find(rows, "toolkit", kind, 32)
        ratio = ours.rps / peer.rps if ours and peer and peer.rps else None
        checks.append(Check(f"requests/s, ours / published toolkit, {kind}", ratio, PEER_FLOOR_TOOLKIT, True))
    for name, kind, label, bound, per in (
        ("ours", KINDS[0], "CPU ms per call, 64 tokens", 0.36, 1.0),
        ("ours", KINDS[1], "CPU ms per call, 64 tokens streamed", 0.9, 1.0),
        ("ours", KINDS[2], "CPU ms per call, 1,024 tokens", 1.2, 1.0),
        ("ours", KINDS[3], "CPU us per streamed chunk, 1,024 tokens", 10.0, 1000 / 1024),
        ("ours+tok", KINDS[0], "CPU ms per call, 64 tokens, rendered here", 0.8, 1.0),
    ):
        row = find(rows, name, kind, 32)
        value = None if row is None or row.cpu_ms is None else row.cpu_ms * per
        scaled = bound * calibration / MEASURED_AT_MS
        checks.append(
            Check(label, value, scaled, note=f"{bound:g} where a million additions take {MEASURED_AT_MS:g} ms")
        )
    for kind in KINDS:
        row = find(rows, "ours", kind, 1000)
        fair = row.p99_ms / row.p50_ms if row and row.p99_ms and row.p50_ms else None
        checks.append(Check(f"p99 / p50 at 1,000 connections, {kind}", fair, FAIR))
    many = [row for row in rows if row.gateway == "ours" and row.connections == 1000]
    checks.append(Check("errors at 1,000 connections", sum(row.errors for row in many) if many else None, 0))
    for scenario in (*HISTORIES, "rendered here"):
        value = found.get(scenario, {}).get("ratio")
        checks.append(Check(f"CPU of turn {TURNS} (100k tokens) / turn 2, {scenario}", value, 4))
    longest = found.get("standstill", {}).get("longest_ms")
    checks.append(
        Check("ms of the event loop's longest standstill, with long prompts, a slow reader and a fetch", longest, 50)
    )
    grown = found.get("growth", {}).get("growth_mb")
    checks.append(Check("MB of memory that many calls, deleted sessions and slow readers leave behind", grown, 24))
    kept = found.get("memory", {})
    missing = kept["turns"] - kept["found"] + kept["wrong"] if kept else None
    checks.append(Check("RSS MB after 2,500 sessions x 40 turns x 2k tokens", kept.get("rss_mb"), 400))
    checks.append(Check("turns of those missing or changed when fetched", missing, 0))
    return checks


HISTORIES = {
    "chat": {},
    "chat, streamed": {"stream": True},
    "Anthropic": {"dialect": "Anthropic"},
    "Responses": {"dialect": "Responses"},
}


def run_scenarios(wanted: str, *, quick: bool) -> Found:
    """Run the scenarios whose names contain a wanted word. Each loads only our gateway."""
    with upstream() as server:
        runs: dict[str, Callable[[], Mapping[str, float]]] = {
            name: lambda options=options: scenarios.history(server, TURNS, TOKENS, **options)  # type: ignore[misc]
            for name, options in HISTORIES.items()
            if not quick or name == "chat"
        }
        if not quick:
            runs["rendered here"] = lambda: scenarios.rendering(server, TURNS, TOKENS)
            runs["standstill"] = lambda: scenarios.standstill(server, 400)
            runs["memory"] = lambda: scenarios.memory(server, 2500, 40)
        calls, sessions, readers = (3_000, 500, 50) if quick else (1_000_000, 10_000, 1_000)
        runs["growth"] = lambda: scenarios.growth(server, calls, sessions, readers)
        found = {}
        for name, run in runs.items():
            if wanted == "all" or (wanted != "none" and any(word in name for word in wanted.split(","))):
                values = found[name] = run()
                print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in values.items())}", flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short windows and the short scenarios: under 50 s")
    parser.add_argument("--json", metavar="FILE", help="write rows and checks there too")
    parser.add_argument("--only", default=",".join(NAMES), help="which gateways the table has; none leaves it out")
    parser.add_argument("--seconds", type=float, help="window per cell")
    parser.add_argument("--checks", default="all", metavar="NAMES", help="scenarios, by words in their names; none")
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise SystemExit("this benchmark reads CPU and memory of processes from Linux's /proc")
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark needs wrk (apt-get install wrk)")
    started = time.monotonic()
    names = [] if args.only == "none" else args.only.split(",")
    if args.quick:
        names = [name for name in names if name in ("ours", "rllm")]
    for name in names:
        if not args.quick:
            install(name)
        elif not installed(name):
            print(f"{name} is not installed and left out; a run without --quick installs it")
    names = [name for name in names if installed(name)]
    calibration = calibration_ms()
    print(f"calibration: a million additions in Python take {calibration:.0f} ms of CPU here")
    for name in names:
        print(f"  {name:<9} {MEANING[name]}")
    with upstream() as server:
        rows = fill(server, names, args.seconds or (1 if args.quick else 3), quick=args.quick)
    calibration = max(calibration, calibration_ms())  # the speed of a shared machine changes
    checks = checks_of(rows, run_scenarios(args.checks, quick=args.quick), calibration)
    print(f"\nchecks, after {time.monotonic() - started:.0f} s")
    for check in checks:
        print(check)
    if args.json:
        values = {"rows": [asdict(r) for r in rows], "checks": [{**asdict(c), "ok": c.ok} for c in checks]}
        Path(args.json).write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
