"""Tens of thousands of short rollouts through the whole stack, while everything in it is killed and stopped again and again.

Workload: a light agent (two or three model calls over plain HTTP, those of every second input streamed) in sessions of
`agentcore-rl runtime serve`, forked from a warm template; `agentcore-rl gateway serve` with a durable store; a `file://` store;
a scripted model whose replies, and so the tokens and the reward of every rollout, are a function of the input id; and a trainer,
a process of its own, which runs steps of rollouts in turn through the collection core in groups of four and through
`run_batch` with a ledger.

Meanwhile, in an order that `--seed` decides, each of them gets SIGKILL and is started again on its port and folders: runtime,
template, gateway, model, single sessions, and the trainer, which goes on from its ledger; each is stopped with
SIGSTOP for up to 2.5 s.

Afterwards the outcomes, the ledgers, the gateway's records and what the agents noted of each reply that they read whole are held
against each other, memory and open files of the first quarter of the run against the last, and what is left is counted.

    python benchmarks/soak.py [--quick] [--rollouts N] [--seed N] [--json FILE]

`--quick` runs 500 rollouts in under 50 seconds, otherwise it is 20,000 in 25 minutes, both on two cores with little else to do.
Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.client import ADMIN_KEY_ENV
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from soak_load.chaos import ROLES, Chaos, plan
from soak_load.checks import Check, Found, check, flat, outcomes, turns
from soak_load.stack import CREDENTIAL, PR_SET_CHILD_SUBREAPER, SERVERS, Stack

QUICK, FULL = 500, 20_000
QUICK_S, FULL_S = 50.0, 1_500.0
MEASURE_S = 1.0
GRACE_S = 180.0


async def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    quick = options.quick
    count = options.rollouts or (QUICK if quick else FULL)
    deadline_s = options.deadline or (QUICK_S if quick else FULL_S)
    stack = Stack(
        folder,
        tier=options.isolation,
        at_once=options.at_once,
        rollouts=count,
        step=min(options.step, max(1, count // 4)),
    )
    rounds = 1 if quick else 100  # a hundred take longer than there is time
    events = [] if options.calm else plan(options.seed, rounds)
    print(
        f"seed {options.seed}, {count} rollouts, isolation {options.isolation}; a disturbance every {options.interval:g} s:"
    )
    print("  " + ", ".join(f"{what} {whom}" for what, whom, _ in events[:18]) + (", ..." if len(events) > 18 else ""))
    outcomes_file = folder / "outcomes.jsonl"
    ended = Ended(outcomes_file)
    began_s = time.monotonic()
    tasks: list[asyncio.Task[None]] = []
    sessions_left: list[Any] = []
    kept: float | None = None
    try:
        for name in (*SERVERS, "trainer"):
            await stack.start(name)
        chaos = Chaos(stack, events, rounds, options.interval, lambda: ended.count() / count)
        keepers = [asyncio.create_task(stack.keep(name)) for name in (*SERVERS, "trainer")]
        disturbing = asyncio.create_task(chaos.run())
        tasks = [*keepers, disturbing]
        trainer = keepers[-1]
        said_s = began_s
        while not trainer.done() and time.monotonic() - began_s < deadline_s:
            stack.measure()
            cpu_s = stack.cpu_s()
            if time.monotonic() - said_s > 30:
                said_s = time.monotonic()
                print(f"  {said_s - began_s:6.0f} s: {ended.count()} of {count} rollouts ended", flush=True)
            await asyncio.wait([trainer], timeout=MEASURE_S)
        work_s = time.monotonic() - began_s
        if options.calm:
            print("CPU seconds: " + ", ".join(f"{name} {spent:.1f}" for name, spent in cpu_s.items()))
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        if not trainer.done():  # too late, but what there is can only be judged at the end of a step
            await asyncio.wait([trainer], timeout=GRACE_S)
        for keeper in keepers:
            if keeper.done():
                keeper.result()
        sessions_left = await sessions_at(stack, within_s=30)
        kept = await held_by_gateway(stack)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stack.stop_all()
    left: dict[str, list[str]] = {}
    for _ in range(100):  # what was told to end may take a moment; what is left after ten seconds is left
        left = stack.left()
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    for what, items in left.items():
        for item in items[:5]:
            print(f"  left: {what}: {item}")
    (folder / "chaos.log").write_text("\n".join(chaos.log))
    return judge(options, stack, chaos, count, work_s, deadline_s, sessions_left, kept, left)


class Ended:
    """How many rollouts ended so far, read from the trainer's file as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.keys = path, 0, set[tuple[str, int]]()

    def count(self) -> int:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offset += len(whole)
            for raw in whole.splitlines():
                with contextlib.suppress(ValueError):
                    line = json.loads(raw)
                    if line["kind"] == "ended":
                        self.keys.add((line["task"], line["index"]))
        return len(self.keys)


async def held_by_gateway(stack: Stack) -> float | None:
    """Sessions that the gateway has not forgotten; None when it does not answer."""
    client = GatewayClient(stack.processes["gateway"].info["url"], admin_key=stack.environment[ADMIN_KEY_ENV])
    for _ in range(50):
        with contextlib.suppress(GatewayError):
            return float((await client.stats_async())["sessions"])
        await asyncio.sleep(0.2)
    return None


async def sessions_at(stack: Stack, *, within_s: float) -> list[Any]:
    """Sessions that the runtime still has, once those that nobody stopped had the time to idle out."""

    def ask() -> list[Any]:
        return RuntimeView(stack.processes["runtime"].info["url"], CREDENTIAL, timeout_s=10).sessions()

    give_up_s, found = time.monotonic() + within_s, ["unknown"]
    while found and time.monotonic() < give_up_s:
        with contextlib.suppress(OSError):
            found = await asyncio.to_thread(ask)
        await asyncio.sleep(0.1)
    return found


def judge(
    options: argparse.Namespace,
    stack: Stack,
    chaos: Chaos,
    count: int,
    work_s: float,
    deadline_s: float,
    sessions_left: list[Any],
    kept: float | None,
    left: dict[str, list[str]],
) -> dict[str, Any]:
    found = Found(stack.folder, count, stack.step)
    memory, flatness = flat(stack.measures, work_s)
    done = chaos.counts
    checks: list[Check] = [*outcomes(found), *turns(found)]
    if not options.quick:  # a quarter of half a minute is the start of everything
        checks += flatness
    checks.append(check("sessions left at the runtime", len(sessions_left), 0))
    checks.append(check("sessions left at the gateway", kept, 0))
    checks += [check(f"{what} left", len(items), 0) for what, items in left.items()]
    if not options.calm:
        for what, name in (("kill", "killed"), ("stop", "stopped")):
            checks += [check(f"times {name}: {role}", done[f"{what} {role}"], 1, least=True) for role in ROLES]
    checks.append(check("seconds, of the deadline", round(work_s, 1), deadline_s))
    sessions = len(found.opened)
    row = {
        "rollouts": count,
        "seconds": work_s,
        "per_s": count / work_s,
        "outcomes": dict(found.outcomes),
        "sessions": sessions,
        "replies read": sum(map(len, found.seen.values())),
        "starts": {name: process.starts for name, process in stack.processes.items()},
        "disturbances": dict(done),
    }
    return {"quick": options.quick, "seed": options.seed, "rows": [row, *memory], "checks": checks}


def show(result: dict[str, Any]) -> None:
    row, *memory = result["rows"]
    outcomes = ", ".join(f"{n} {name}" for name, n in sorted(row["outcomes"].items()))
    print(f"\n{row['rollouts']} rollouts in {row['seconds']:.0f} s ({row['per_s']:.1f}/s): {outcomes}")
    print(f"{row['sessions']} sessions, {row['replies read']} replies read whole by agents")
    print("disturbances: " + ", ".join(f"{name} {n}" for name, n in sorted(row["disturbances"].items())))
    print(f"\n{'process':<10}{'span':<14}{'seconds':>8}{'RSS MB first':>14}{'last':>8}{'files first':>13}{'last':>6}")
    for one in memory:
        print(
            f"{one['process']:<10}{one['span']:<14}{one['seconds']:>8.0f}{one['rss_mb first']:>14.1f}"
            f"{one['rss_mb last']:>8.1f}{one['files first']:>13.0f}{one['files last']:>6.0f}"
        )
    print()
    for one in result["checks"]:
        print(f"{'ok  ' if one['ok'] else 'FAIL'} {one['name']}: {number(one['value'])} (target {one['target']:g})")


def number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="500 rollouts, less than 50 seconds")
    parser.add_argument("--rollouts", type=int, help="20,000 unless said otherwise")
    parser.add_argument("--at-once", type=int, default=24, help="rollouts in flight")
    parser.add_argument("--step", type=int, default=500, help="rollouts of a step of the trainer")
    parser.add_argument("--seed", type=int, default=12, help="of the disturbances")
    parser.add_argument("--interval", type=float, help="seconds between two disturbances")
    parser.add_argument("--deadline", type=float, help="seconds that the rollouts may take together")
    parser.add_argument("--isolation", default="auto", help="isolation tier of the sessions")
    parser.add_argument("--calm", action="store_true", help="disturb nothing, to see what a rollout costs")
    parser.add_argument("--json", type=Path, help="write rows and checks to this file")
    parser.add_argument("--keep", action="store_true", help="keep files and logs")
    options = parser.parse_args()
    options.interval = options.interval or (0.8 if options.quick else 4.0)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    try:
        result = asyncio.run(soak(options, folder))
    finally:
        if options.keep:
            print(f"files: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(one["ok"] for one in result["checks"]) else 1)


if __name__ == "__main__":
    main()
