"""The table: every gateway, every kind of answer, 32 and 1,000 connections."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from .gateways import PEERS, Target, gateway
from .processes import Machine, Server, cpu_s, settle
from .wrk import load

LONGEST_S = 20.0  # a window for gateways that finish a round of 1,000 connections in no less
PASSES = 3  # over our gateway, with the others in between


@dataclass(frozen=True, order=True)
class Kind:
    """A kind of answer."""

    tokens: int
    stream: bool

    def __str__(self) -> str:
        return f"{self.tokens} tokens {'streamed' if self.stream else 'whole'}"


KINDS = (Kind(64, False), Kind(64, True), Kind(1024, False), Kind(1024, True))


@dataclass
class Row:
    """A cell. CPU in ms per request: of the gateway, of the engine; `others_cores` is what everything else on
    the machine used meanwhile, load and hypervisor's share included."""

    gateway: str
    tokens: int
    stream: bool
    connections: int
    rps: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_ms: float | None
    errors: int
    requests: int
    upstream_cpu_ms: float | None
    others_cores: float

    @property
    def kind(self) -> Kind:
        return Kind(self.tokens, self.stream)


def measure(target: Target, server: Server, kind: Kind, connections: int, seconds: float) -> Row:
    """Measure a cell."""
    settle(target.pid)
    pids = [pid for pid in (target.pid, server.pid) if pid]
    before, machine, started = {pid: cpu_s(pid) for pid in pids}, Machine.now(), time.monotonic()
    seen = load(
        target.url, target.sessions, tokens=kind.tokens, stream=kind.stream, connections=connections, seconds=seconds
    )
    took, after = time.monotonic() - started, Machine.now()
    spent = {pid: cpu_s(pid) - before[pid] for pid in pids}
    others = after.busy_s + after.stolen_s - machine.busy_s - machine.stolen_s - sum(spent.values())
    per_request = 1000 / seen.requests if seen.requests else None
    return Row(
        gateway=target.name,
        tokens=kind.tokens,
        stream=kind.stream,
        connections=connections,
        rps=seen.rps,
        p50_ms=seen.p50_ms,
        p99_ms=seen.p99_ms,
        cpu_ms=spent[target.pid] * per_request if target.pid and per_request else None,
        errors=seen.errors,
        requests=seen.requests,
        upstream_cpu_ms=spent[server.pid] * per_request if per_request else None,
        others_cores=max(0.0, others) / took,
    )


def fill(server: Server, names: Sequence[str], seconds: float, *, quick: bool) -> list[Row]:
    """All cells. Every gateway runs all the while; those without work cost nothing.

    Cells at 32 connections are measured several times over: the median by requests/s stays, with the least CPU, since what
    else the machine does only adds to that. With `quick` our gateway twice and others once, and 1,000 connections on ours.
    """
    rows: list[Row] = []
    with ExitStack() as running:
        targets = {name: running.enter_context(gateway(name, server)) for name in names}
        for kind in KINDS:
            passes: dict[str, list[Row]] = {name: [] for name in names}
            for turn in range((2 if quick else PASSES) + 1):  # the first is a warm-up
                for name, target in targets.items():
                    # A peer needs seconds for a round of 32 streams.
                    longer = ((1, 4) if quick else (4, 10))[kind.tokens > 64] if name in PEERS and turn else 1
                    if quick and name != "ours" and turn != 1:
                        continue
                    row = measure(target, server, kind, 32, longer * seconds)
                    if turn:
                        passes[name].append(row)
            rows += [_settled(each) for each in passes.values() if each]
            for name, target in targets.items():
                if name == "ours" or (not quick and name != "ours+tok"):
                    # One and a half rounds: the streams of one round end at the same time.
                    round_s = max(row.cpu_ms or 0 for row in passes[name])
                    window = max(2 * seconds, 1.5 * round_s) if quick else LONGEST_S
                    rows.append(measure(target, server, kind, 1000, window))
            show([row for row in rows if row.kind == kind], head=kind == KINDS[0])
    return rows


def _settled(passes: Sequence[Row]) -> Row:
    middle = sorted(passes, key=lambda r: r.rps)[len(passes) // 2]
    return replace(middle, cpu_ms=min((r.cpu_ms for r in passes if r.cpu_ms is not None), default=None))


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def show(rows: Sequence[Row], *, head: bool) -> None:
    if head:
        print(
            f"\n{'tokens':>6} {'mode':>6} {'conn':>5}  {'gateway':<8} {'req/s':>8} {'p50 ms':>9} {'p99 ms':>9} {'CPU ms':>8}"
            f" {'errors':>6}   {'server':>7} {'others':>6}"
        )
    for r in rows:
        print(
            f"{r.tokens:>6} {'stream' if r.stream else 'whole':>6} {r.connections:>5}  {r.gateway:<8} {r.rps:>8.0f}"
            f" {_cell(r.p50_ms, 9, 2)} {_cell(r.p99_ms, 9, 2)} {_cell(r.cpu_ms, 8, 3)} {r.errors:>6}"
            f"   {_cell(r.upstream_cpu_ms, 7, 3)} {r.others_cores:>6.2f}",
            flush=True,
        )


def find(rows: Sequence[Row], name: str, kind: Kind, connections: int) -> Row | None:
    return next((r for r in rows if (r.gateway, r.kind, r.connections) == (name, kind, connections)), None)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
