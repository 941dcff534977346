"""Loads on our gateway that are compared with themselves: with it and without, few and many connections, one and two
gateways."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from .gateways import Target, gateway
from .processes import GATEWAY_CORE, LOAD_CORE, Machine, Server, cpu_s, settle, upstream
from .shares import held
from .table import KINDS, LONGEST_S, Kind, median
from .wrk import Load, load


def _load(target: Target, kind: Kind, connections: int, seconds: float, **options: Any) -> Load:
    seen = load(
        target.url,
        target.sessions,
        tokens=kind.tokens,
        stream=kind.stream,
        connections=connections,
        seconds=seconds,
        **options,
    )
    settle(target.pid)
    return seen


def added_latency(server: Server, rounds: int, *, apart: bool) -> dict[str, float]:
    """Median of what the gateway adds to p50 with one connection, 64 tokens: direct and through it in turns of a second.

    Load, server and gateway share one core, as load and server do when asked directly: from core to core the figure would be
    mostly how long a sleeping core takes to wake up (`apart_added_p50_ms` has that in it).
    """
    found = {}
    for name, core in (("one", LOAD_CORE), ("apart", GATEWAY_CORE)):
        if name == "apart" and not apart:
            continue
        with gateway("direct", server) as direct, gateway("ours", server, core=core) as ours:
            _load(ours, KINDS[0], 1, 1)
            pairs = []
            for _ in range(rounds):
                seen = _load(direct, KINDS[0], 1, 1), _load(ours, KINDS[0], 1, 1)
                pairs.append((seen[0].p50_ms or 0.0, seen[1].p50_ms or 0.0))
        found[name] = pairs
    medians = {
        "direct_p50_ms": median([a for a, _ in found["one"]]),
        "ours_p50_ms": median([b for _, b in found["one"]]),
        "added_p50_ms": median([b - a for a, b in found["one"]]),
    }
    if apart:
        medians["apart_added_p50_ms"] = median([b - a for a, b in found["apart"]])
    return medians


def many_connections(server: Server, kinds: Sequence[Kind], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """32 and 1,000 connections in turns on one gateway, warmed up with both; medians of the turns.

    The window of 1,000 is five rounds of them, if that is longer. The loop's lag is the worst that the gateway saw.
    """
    found = {}
    for kind in kinds:
        with gateway("ours", server) as target:
            window = max(seconds, min(LONGEST_S, 5 * 1000 / _load(target, kind, 32, 2).rps))
            _load(target, kind, 1000, window / 2)
            few, many = [], []
            for _ in range(rounds):
                few.append(_load(target, kind, 32, seconds))
                many.append(_load(target, kind, 1000, window))
            stats = target.ask("/admin/stats")
        found[str(kind)] = {
            "rps_32": median([seen.rps for seen in few]),
            "rps_1000": median([seen.rps for seen in many]),
            "falls_percent": 100 * (1 - median([b.rps / a.rps for a, b in zip(few, many, strict=True)])),
            "p50_ms": median([seen.p50_ms or 0.0 for seen in many]),
            "p99_ms": median([seen.p99_ms or 0.0 for seen in many]),
            "p99_over_p50": median([(seen.p99_ms or 0.0) / (seen.p50_ms or 1.0) for seen in many]),
            "errors": sum(seen.errors for seen in [*few, *many]),
            "loop_lag_max_ms": stats["event_loop_lag_max_s"] * 1000,
        }
    return found


# What the inference server does with each call: seconds to the first and to the last token, and the number of writes.
REALISTIC = {
    "silent for 2 s, then 256 tokens at once": (2.0, 2.0, 1),
    "first token after 0.2 s, then a write per token until 2 s": (0.2, 2.0, 0),
    "first token after 0.2 s, then a write per 8 tokens until 2 s": (0.2, 2.0, 32),
}
# A thousand agents with a write per token are 128,000 writes/s, more than two cores write and read without any gateway.
REALISTIC_LOADS = [
    (agents, shape) for shape in REALISTIC for agents in (256, 1000) if agents < 1000 or "per token" not in shape
]


def realistic(agents: int, shape: str, seconds: float) -> dict[str, float]:
    """What the gateway adds to the median of 2 s answers, for so many agents that call one after another without a pause.

    Agents start spread over 2 s; each call is another session's.
    """
    p50: dict[str, float] = {}
    p99: dict[str, float] = {}
    errors, busy = 0, 0.0
    with upstream(*REALISTIC[shape]) as server:
        for name in ("direct", "ours"):
            with gateway(name, server) as target:
                before = cpu_s(target.pid) if target.pid else 0.0
                seen = _load(target, Kind(256, True), agents, seconds, calls=1, spread_s=2.0)
                if target.pid:
                    busy = (cpu_s(target.pid) - before) / seen.seconds
                p50[name], p99[name] = seen.p50_ms or 0.0, seen.p99_ms or 0.0
                errors += seen.errors
    return {
        "agents": agents,
        "direct_p50_ms": p50["direct"],
        "direct_p99_ms": p99["direct"],
        "added_p50_ms": p50["ours"] - p50["direct"],
        "added_p99_ms": p99["ours"] - p99["direct"],
        "gateway_cores": busy,
        "errors": errors,
    }


SHARE = (
    0.4  # of a core for each gateway that is held: two of them leave load and server more than they need of two cores
)


def _load_both(targets: Sequence[Target], kind: Kind, connections: int, seconds: float) -> tuple[float, int, float]:
    """Requests/s, requests and the load's CPU seconds, with the connections spread over all gateways at the same time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def one(target: Target) -> Load:
        share = connections // len(targets)
        return _load(target, kind, share, seconds, core=None, own_sessions=True, calls=200)

    with ThreadPoolExecutor(len(targets)) as pool:
        loads = list(pool.map(one, targets))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return sum(load.rps for load in loads), sum(load.requests for load in loads), cpu


def two_gateways(
    server: Server, kind: Kind, rounds: int, seconds: float, name: str = "ours", share: float | None = None
) -> dict[str, float]:
    """Requests/s of one gateway and of two in turns, nothing pinned: load, server and gateways share all cores.

    `most` is the ratio that the machine has room for: with two cores a second gateway has what load and server leave of
    the second one, and for answers that are relayed those need a third of it. With `share` every gateway is held to that
    part of a core, so that there is room for both; nothing where the machine does not allow it. `others` are the cores that
    everything else used meanwhile: on a machine that is busy with them, two gateways get no more than one.
    """
    with ExitStack() as stack:
        both = [stack.enter_context(gateway(name, server, core=None)) for _ in range(2)]
        if share is not None and not stack.enter_context(held([target.pid or 0 for target in both], share)):
            return {}
        rps: dict[int, list[float]] = {1: [], 2: []}
        cpu: dict[int, list[float]] = {1: [], 2: []}
        rest: list[float] = []
        others: list[float] = []
        for turn in range(rounds + 1):
            for count in (1, 2):
                targets = both[:count]
                machine, began_s = Machine.now(), time.monotonic()
                before, served = sum(cpu_s(t.pid or 0) for t in targets), cpu_s(server.pid)
                each, requests, load_s = _load_both(targets, kind, 64, seconds if turn else 1)
                if turn:
                    used_s, load_s = (
                        sum(cpu_s(t.pid or 0) for t in targets) - before,
                        cpu_s(server.pid) - served + load_s,
                    )
                    rps[count].append(each)
                    cpu[count].append(used_s * 1000 / requests)
                    rest.append(load_s * 1000 / requests)
                    busy_s = Machine.now().busy_s - machine.busy_s
                    others.append(max(0.0, busy_s - used_s - load_s) / (time.monotonic() - began_s))
    cores, gateway_ms, rest_ms = os.cpu_count() or 1, median(cpu[2]), median(rest)
    limit = cores * 1000 / (gateway_ms + rest_ms)
    if share is not None:
        limit = min(2 * share * 1000 / gateway_ms, (cores - 2 * share) * 1000 / rest_ms)
    return {
        "one_rps": median(rps[1]),
        "two_rps": median(rps[2]),
        "one_cpu_ms": median(cpu[1]),
        "two_cpu_ms": gateway_ms,
        "load_cpu_ms": rest_ms,
        "most": min(2.0, limit / median(rps[1])),
        "others": median(others),
        "ratio": median([b / a for a, b in zip(rps[1], rps[2], strict=True)]),
    }
