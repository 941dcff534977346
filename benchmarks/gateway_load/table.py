"""The table: every gateway, every kind of answer, every number of connections."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from .gateways import PEERS, Target, gateway
from .processes import Machine, Server, cpu_s, rss_kb, settle
from .wrk import Load, load

LONGEST_S = 20.0  # a window for gateways that finish a round of their connections in no less


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
    """One cell. CPU in ms per request: of the gateway, of the inference server, of wrk; `others_cores` is what everything
    else on the machine used meanwhile, hypervisor's share included."""

    gateway: str
    tokens: int
    stream: bool
    connections: int
    rps: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_ms: float | None
    rss_kb: float | None
    errors: int
    requests: int
    upstream_cpu_ms: float | None
    load_cpu_ms: float | None
    others_cores: float

    @property
    def kind(self) -> Kind:
        return Kind(self.tokens, self.stream)


@dataclass
class Window:
    """What a stretch of time cost."""

    seconds: float = 0.0
    gateway_s: float | None = None
    upstream_s: float = 0.0
    rss_kb: float | None = None
    machine_s: float = 0.0


@contextmanager
def watched(target: Target, server: Server) -> Iterator[Window]:
    window = Window()
    before = cpu_s(target.pid) if target.pid else 0.0
    resident = rss_kb(target.pid) if target.pid else 0.0
    served, machine, started = cpu_s(server.pid), Machine.now(), time.monotonic()
    own = time.process_time()
    yield window
    window.seconds = time.monotonic() - started
    if target.pid:
        window.gateway_s, window.rss_kb = cpu_s(target.pid) - before, rss_kb(target.pid) - resident
    window.upstream_s = cpu_s(server.pid) - served
    after = Machine.now()
    window.machine_s = after.busy_s - machine.busy_s + after.stolen_s - machine.stolen_s
    window.machine_s -= (window.gateway_s or 0.0) + window.upstream_s + time.process_time() - own


def measure(
    target: Target, server: Server, kind: Kind, connections: int, seconds: float, *, warm_s: float = 1.0
) -> Row:
    """One cell: a warm-up of its own, then the window."""

    def run(duration: float) -> Load:
        return load(
            target.url,
            target.sessions,
            tokens=kind.tokens,
            stream=kind.stream,
            connections=connections,
            seconds=duration,
        )

    if warm_s:
        run(warm_s)
        settle(target.pid)
    with watched(target, server) as window:
        seen = run(seconds)
    count = seen.requests
    return Row(
        gateway=target.name,
        tokens=kind.tokens,
        stream=kind.stream,
        connections=connections,
        rps=seen.rps,
        p50_ms=seen.p50_ms,
        p99_ms=seen.p99_ms,
        cpu_ms=window.gateway_s * 1000 / count if window.gateway_s is not None and count else None,
        rss_kb=window.rss_kb / count if window.rss_kb is not None and count else None,
        errors=seen.errors,
        requests=count,
        upstream_cpu_ms=window.upstream_s * 1000 / count if count else None,
        load_cpu_ms=seen.cpu_s * 1000 / count if count else None,
        others_cores=max(0.0, window.machine_s - seen.cpu_s) / window.seconds,
    )


def fill(
    server: Server,
    names: Sequence[str],
    kinds: Sequence[Kind],
    connections: Sequence[int],
    seconds: float,
    rounds: int,
    whole_only: Collection[str] = (),
) -> list[Row]:
    """All cells. A cell's gateways are measured right after one another, each freshly started, so that they meet the same
    machine. Cells at 32 connections, which are compared, are measured `rounds` times over: the median by requests/s stays,
    with the least CPU of the rounds, since what else the machine does only adds to that. `whole_only` names gateways that
    do not relay.
    """
    rows: list[Row] = []
    for kind in kinds:
        slowest: dict[str, float] = {}
        for count in connections:
            found: dict[str, list[Row]] = {name: [] for name in names}
            for _ in range(rounds if count == 32 else 1):
                for name in names:
                    if name == "ours+tok" and count not in (1, 32):
                        continue
                    window = max(seconds, min(LONGEST_S, 4 * count / max(slowest.get(name, 1e9), 0.1)))
                    with gateway(name, server) as target:
                        row = measure(target, server, kind, count, window, warm_s=min(seconds, 2.0))
                    found[name].append(row)
                    slowest[name] = row.rps
            rows += [_settled(each) for each in found.values() if each]
            cells = [r for r in rows if r.kind == kind and r.connections == count]
            show(cells, head=len(rows) == len(cells), whole_only=whole_only)
    return rows


def _settled(rounds: Sequence[Row]) -> Row:
    middle = sorted(rounds, key=lambda r: r.rps)[len(rounds) // 2]
    return replace(middle, cpu_ms=min((r.cpu_ms for r in rounds if r.cpu_ms is not None), default=None))


QUICK_PASSES = 3
_NOT_IN_QUICK = {  # no check needs them
    "direct": (Kind(64, True), Kind(1024, False), Kind(1024, True)),
    "bare": (Kind(64, True), Kind(1024, True)),
    "rllm": (Kind(64, True),),
    "toolkit": (Kind(64, True), Kind(1024, True)),
}


def fill_quick(server: Server, names: Sequence[str], kinds: Sequence[Kind], seconds: float) -> list[Row]:
    """32 connections only, one gateway process for all kinds of answers.

    Our gateway is measured in three passes, with the others in between, and settled as in `fill`: a machine shared with
    others has moments in which everything takes half as long again.
    """
    found: dict[tuple[Kind, str], list[Row]] = {(kind, name): [] for kind in kinds for name in names}
    order: list[str] = []
    for name in names:
        order += [name, "ours"] if name in PEERS else [] if name == "ours" else [name]
    if "ours" in names:
        order += ["ours"] * (QUICK_PASSES - order.count("ours"))
    with ExitStack() as running:
        targets: dict[str, Target] = {}
        for name in order if "ours" in names else [n for n in order if n != "ours"]:
            warm_s = 0.0 if name in targets else 1.0
            target = targets.get(name) or running.enter_context(gateway(name, server))
            targets[name] = target
            for kind in (k for k in kinds if k not in _NOT_IN_QUICK.get(name, ())):
                if kind == Kind(64, True) and found[kind, name]:
                    continue
                slow = name == "rllm" and kind == Kind(1024, True)  # needs seconds for one round of 32 streams
                found[kind, name].append(measure(target, server, kind, 32, 4 if slow else seconds, warm_s=warm_s))
                warm_s = 0.0
    rows = [_settled(each) for each in found.values() if each]
    show(rows)
    return rows


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def show(rows: Sequence[Row], *, head: bool = True, whole_only: Collection[str] = ()) -> None:
    if head:
        print(
            f"\n{'tokens':>6} {'mode':>6} {'conn':>5}  {'gateway':<8} {'req/s':>8} {'p50 ms':>9} {'p99 ms':>9} {'CPU ms':>8}"
            f" {'RSS KB':>8} {'errors':>6}   {'server':>7} {'wrk ms':>7} {'others':>6}"
        )
    for r in rows:
        mode = "stream" if r.stream else "whole"
        note = "  not relayed" if r.stream and r.gateway in whole_only else ""
        print(
            f"{r.tokens:>6} {mode:>6} {r.connections:>5}  {r.gateway:<8} {r.rps:>8.0f} {_cell(r.p50_ms, 9, 2)}"
            f" {_cell(r.p99_ms, 9, 2)} {_cell(r.cpu_ms, 8, 3)} {_cell(r.rss_kb, 8, 2)} {r.errors:>6}"
            f"   {_cell(r.upstream_cpu_ms, 7, 3)} {_cell(r.load_cpu_ms, 7, 3)} {r.others_cores:>6.2f}{note}",
            flush=True,
        )


def find(rows: Sequence[Row], name: str, kind: Kind, connections: int) -> Row | None:
    return next((r for r in rows if (r.gateway, r.kind, r.connections) == (name, kind, connections)), None)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
