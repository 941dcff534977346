"""Model gateways side by side: requests per second, latency, CPU and memory per call; and our gateway's targets.

    python benchmarks/gateway.py [--quick] [--json FILE] [--only ours,direct] [--checks none|NAMES] [--seconds 3]

A scripted inference server (vLLM's formats, ready-made answers of 64 and 1,024 tokens over a 512-token prompt) and wrk share
one core, the gateway under test has another to itself. Peers are installed from the package index into environments of
their own under `.venvs/`. CPU per call depends least on what else the machine does; `server` and `wrk ms` are the CPU of
inference server and load per request, `others` the cores that everything else used meanwhile. In the table a stream comes
from the server in one write, so that only the gateway limits; what happens when every token is written by itself is
printed above it. wrk counts an answer that took longer than twice the mean several times over: p99 errs upwards.

`--quick` measures 32 connections and the short checks, in under 50 s, our gateway several times over (the least CPU
counts); peers that are not installed are left out, and what was not measured has `value: null, ok: false` in FILE. A full
run takes about 27 minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway_load import pressure, scenarios, streams
from gateway_load.checks import all_checks
from gateway_load.gateways import MEANING, NAMES, install, installed
from gateway_load.processes import Server, calibration_ms, upstream
from gateway_load.table import KINDS, fill, fill_quick

Values = Mapping[str, Any]


def runs(server: Server, *, quick: bool) -> dict[str, Callable[[], Values]]:
    """Scenarios by name, each of our gateway alone."""
    found: dict[str, Callable[[], Values]] = {
        "added latency": lambda: pressure.added_latency(server, 3 if quick else 7, apart=not quick),
        "history": lambda: scenarios.history(server, 200, 100_000),
        "history, streamed": lambda: scenarios.history(server, 200, 100_000, stream=True),
        "rendered here": lambda: scenarios.rendering(server, 200, 100_000),
        "bulk fetch": lambda: scenarios.bulk(server, 100 if quick else 1000, 10, 1 if quick else 3),
    }
    if quick:
        return found
    for dialect in ("Anthropic", "Responses"):
        found[f"history, {dialect}"] = lambda d=dialect: scenarios.history(server, 200, 100_000, dialect=d)  # type: ignore[misc]
    found["many connections"] = lambda: pressure.many_connections(server, KINDS, 3, 3)
    found["two gateways"] = lambda: pressure.two_gateways(server, KINDS[2], 5, 3)
    held = pressure.SHARE
    found["two gateways, each held to a share"] = lambda: pressure.two_gateways(server, KINDS[2], 5, 3, share=held)
    found["two gateways, rendered here"] = lambda: pressure.two_gateways(server, KINDS[2], 5, 3, "ours+tok")
    for agents, shape in pressure.REALISTIC_LOADS:
        found[f"{agents} agents, {shape}"] = lambda a=agents, s=shape: pressure.realistic(a, s, 12)  # type: ignore[misc]
    found["memory"] = lambda: scenarios.memory(server, 2500, 40)
    return found


def printed(values: Values) -> str:
    return ", ".join(f"{k} {v:.3g}" if abs(v) < 1000 else f"{k} {v:.0f}" for k, v in values.items())


def run_scenarios(server: Server, wanted: str, *, quick: bool) -> dict[str, Values]:
    """Those whose names contain one of the wanted words."""
    found: dict[str, Values] = {}
    for name, run in runs(server, quick=quick).items():
        if wanted == "none" or (wanted != "all" and not any(word in name for word in wanted.split(","))):
            continue
        values = found[name] = run()
        if name == "many connections":
            for kind, of_kind in values.items():
                print(f"{name}, {kind}: {printed(of_kind)}", flush=True)
        else:
            print(f"{name}: {printed(values)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cells, short windows: under 50 s")
    parser.add_argument("--json", metavar="FILE", help="write rows and checks there too")
    parser.add_argument("--only", default=",".join(NAMES), help="which gateways the table has; none leaves it out")
    parser.add_argument("--kinds", default=",".join(map(str, KINDS)), help="which kinds of answers the table has")
    parser.add_argument("--connections", default="1,32,256,1000")
    parser.add_argument("--seconds", type=float, help="window per cell")
    parser.add_argument("--rounds", type=int, default=3, help="how often the cells at 32 connections are measured")
    parser.add_argument(
        "--checks", default="all", metavar="NAMES", help="which scenarios, by words in their names; none"
    )
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise SystemExit("this benchmark reads CPU and memory of processes from Linux's /proc")
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark needs wrk (apt-get install wrk)")
    started = time.monotonic()
    names = [] if args.only == "none" else args.only.split(",")
    if not args.quick:
        for name in names:
            install(name)
    for name in names:
        if not installed(name):
            print(f"{name} is not installed and left out; a run without --quick installs it")
    names = [name for name in names if installed(name)]
    kinds = [kind for kind in KINDS if str(kind) in args.kinds.split(",")]
    print(f"calibration: a million additions in Python take {calibration_ms():.0f} ms of CPU here")
    for name in names:
        print(f"  {name:<9} {MEANING[name]}")
    rows, relayed = [], []
    if names and not args.quick:
        relayed = streams.probe(tuple(names))
        streams.show(relayed)
    with upstream() as server:
        if names and args.quick:
            quick_names = [n for n in names if n != "ours+tok"]
            rows = fill_quick(server, quick_names, kinds, args.seconds or 1)
        elif names:
            connections = [int(c) for c in args.connections.split(",")]
            whole_only = [r.gateway for r in relayed if not r.relays]
            rows = fill(server, names, kinds, connections, args.seconds or 3, args.rounds, whole_only)
    print()
    with upstream() as server:
        found = run_scenarios(server, args.checks, quick=args.quick)
    of_connections = found.pop("many connections", {})
    left_out = "left out by --quick, or its peer is not installed" if args.quick else "left out by the options given"
    checks = all_checks(rows, of_connections, found, left_out)
    print(f"\nchecks, after {time.monotonic() - started:.0f} s")
    for check in checks:
        print(check)
    if args.json:
        values = {
            "rows": [asdict(r) for r in rows],
            "relayed": [asdict(r) for r in relayed],
            "connections": of_connections,
            "scenarios": found,
            "checks": [c.as_dict() for c in checks],
        }
        Path(args.json).write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
