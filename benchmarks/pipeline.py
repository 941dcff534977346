"""How much of its time a trainer waits: batch by batch, with rollouts to spare, and streamed.

Workload: scripted rollouts with log-normal durations, the longest of a hundred 8 times the median; a trainer that takes 8 groups
of 8 at once and then a fixed time, as long as the slowest of a batch's 64 rollouts takes on average (8.5 medians), so that a
synchronous run trains half of the time. 64 rollouts run at once. The clock is simulated: where nothing is to do it jumps, so the
figures are those of the schedule, the same on every machine. The collection core is the real one.

synchronous: `collect_async`, then training. with extra rollouts: the same with `extra_rollouts=2` a group, whose stragglers are
cancelled. streamed: `GroupStream` with that many weight versions of `max_staleness`.

Lost: rollouts that were started and never trained. CPU: milliseconds of the core for each rollout.

`--quickstart` adds the real thing (minutes): `agentcore-rl quickstart` with `staleness` 0, 1 and 2, the rewards of their steps
side by side. All go through the same problems in the same order, the same number in each step.

    python benchmarks/pipeline.py [--quick] [--quickstart [--steps N] [--seed N]] [--training MEDIANS] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from agentcore_rl_toolkit.backends import CollectConfig, Group, GroupRequest, GroupStream, collect_async

sys.path.append(str(Path(__file__).parents[1] / "tests" / "backends"))
from recorded import Episode, Replay, ReplayGateway

T = TypeVar("T")

GROUPS, ROLLOUTS, PLACES = 8, 8, 64
SIGMA = math.log(8) / 2.3263  # the 99th percentile is 8 medians
TRAINING = 8.5  # medians
MOST_IDLE, MOST_STALENESS = 0.05, 2
LEAST_HELD_OUT = 0.90  # of the quickstart, whichever the staleness
EXTRA = 2
FIRST_STEPS = 3  # in which the stream fills: not counted


class Clock:
    """Time that passes only while everybody waits."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that does nothing but wait, in no time."""
        clock = self

        class Jumping(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                ready = super().select(0)
                if not ready and timeout:
                    clock.now_s += timeout
                return ready

        real = time.monotonic
        time.monotonic = lambda: clock.now_s  # the event loop and the core read it
        loop = asyncio.SelectorEventLoop(Jumping())
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()
            time.monotonic = real


class Scripted:
    """A client whose rollouts last as long as the script says. The same seed gives every way of collecting the same rollouts."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.replay = Replay([], by_input=False)
        self.gateway: ReplayGateway = self.replay.gateway
        self.seen: Counter[str] = Counter()

    def submit(self, payload: Any, session_id: Any = None, input_id: Any = None, **more: Any) -> Any:
        which = self.seen[input_id]
        self.seen[input_id] += 1
        delay_s = math.exp(random.Random(f"{self.seed}/{input_id}/{which}").gauss(0, SIGMA))
        episode = Episode(input_id=input_id, record={"rewards": 1.0, "status_code": 200}, delay_s=delay_s)
        self.replay.waiting[""] = deque([episode])
        return self.replay.client.submit(payload, session_id, input_id, **more)


@dataclass(kw_only=True)
class Measured:
    """One way of collecting: seconds counted from the fourth step on."""

    name: str
    staleness: int = 0
    waited_s: float = 0.0
    wall_s: float = 0.0
    trained: Counter[str] = field(default_factory=Counter)
    counted: int = 0
    started: int = 0
    in_flight: int = 0
    cpu_s: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)

    @property
    def idle(self) -> float:
        return self.waited_s / self.wall_s

    @property
    def lost(self) -> int:
        return self.started - len(self.trained) - self.in_flight

    def take(self, groups: list[Group], *, counts: bool) -> None:
        self.trained.update(r.session_id for g in groups for r in g.usable)
        self.counted += counts * sum(len(g.usable) for g in groups)

    def add(self, other: Measured) -> None:
        """What the same way gave with another seed."""
        self.waited_s, self.wall_s = self.waited_s + other.waited_s, self.wall_s + other.wall_s
        self.trained.update(other.trained)
        self.ages.update(other.ages)
        self.counted, self.started = self.counted + other.counted, self.started + other.started
        self.in_flight, self.cpu_s = self.in_flight + other.in_flight, self.cpu_s + other.cpu_s

    def row(self) -> dict[str, Any]:
        ages = self.ages.total()
        return {
            "way": self.name,
            "idle": round(self.idle, 4),
            "rollouts_per_median": round(self.counted / self.wall_s, 2),
            "staleness": {str(age): round(self.ages[age] / ages, 3) for age in sorted(self.ages)},
            "lost": self.lost,
            "twice": sum(n > 1 for n in self.trained.values()),
            "started": self.started,
            "in_flight_at_the_end": self.in_flight,
            "cpu_ms": round(1000 * self.cpu_s / self.started, 2),
        }


def request(place: int) -> GroupRequest:
    return GroupRequest(input_id=f"input-{place:05d}", payload={}, n=ROLLOUTS)


async def batches(name: str, steps: int, training_s: float, seed: int, extra: int) -> Measured:
    """Collect a batch, train it, and so on."""
    script, found = Scripted(seed), Measured(name=name)
    config = CollectConfig(max_concurrent=PLACES, extra_rollouts=extra)
    for step in range(steps):
        began = time.monotonic()
        groups = await collect_async(
            [request(step * GROUPS + g) for g in range(GROUPS)], client=script, gateway=None, config=config
        )
        taken = time.monotonic()
        await asyncio.sleep(training_s)
        counts = step >= FIRST_STEPS
        found.take(groups, counts=counts)
        if counts:
            found.ages[0] += sum(len(g.usable) for g in groups)
            found.waited_s, found.wall_s = found.waited_s + taken - began, found.wall_s + time.monotonic() - began
    found.started = script.seen.total()
    return found


async def streamed(name: str, steps: int, training_s: float, seed: int, staleness: int) -> Measured:
    """Take batches of a stream, train them, publish."""
    script, found = Scripted(seed), Measured(name=name, staleness=staleness)
    version_at: dict[str, int] = {}  # the version in place when a rollout of the session was submitted
    submit = script.submit

    class Noting:
        def submit(self, payload: Any, session_id: Any = None, *words: Any, **more: Any) -> Any:
            version_at[session_id] = stream.weight_version
            return submit(payload, session_id, *words, **more)

    async with GroupStream(
        request,
        client=Noting(),
        gateway=None,
        batch_groups=GROUPS,
        max_staleness=staleness,
        config=CollectConfig(max_concurrent=PLACES),
    ) as stream:
        for step in range(steps):
            began = time.monotonic()
            groups = await stream.take_async()
            taken = time.monotonic()
            await asyncio.sleep(training_s)
            counts = step >= FIRST_STEPS
            found.take(groups, counts=counts)
            if counts:
                found.ages.update(step - version_at[r.session_id] for g in groups for r in g.usable)
                found.waited_s, found.wall_s = found.waited_s + taken - began, found.wall_s + time.monotonic() - began
            stream.published(step + 1)
        state = stream.state()
        found.started, found.in_flight = state["next"] * ROLLOUTS, len(state["in_flight"]) * ROLLOUTS
    return found


def quickstart(staleness: int, steps: int | None, seed: int) -> dict[str, Any]:
    """The real quickstart: what its `metrics.jsonl` says."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["quickstart", "--set", f"staleness={staleness}", "--set", f"seed={seed}", "--out", str(run_dir)]
        words += ["--steps", str(steps)] if steps is not None else []
        subprocess.run([sys.executable, "-m", "agentcore_rl_toolkit.cli", *words], check=True, stdout=sys.stderr)
        summary = json.loads((run_dir / "summary.json").read_text())
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        events = [e for line in lines if (e := json.loads(line))["event"] == "step"]
    waited_s = sum(e["rollout_s"] for e in events)
    wall_s = waited_s + sum(e["train_s"] for e in events)
    ages: Counter[str] = Counter()
    for event in events:
        ages.update(event["staleness"])
    return {
        "way": f"quickstart, staleness {staleness}",
        "idle": round(waited_s / wall_s, 4),
        "rollouts_per_s": round(sum(e["rollouts"] for e in events) / wall_s, 1),
        "staleness": {age: round(n / ages.total(), 3) for age, n in sorted(ages.items())},
        "lost": summary["lost_rollouts"],
        "held_out": summary["held_out_reward_after"],
        "rewards": [round(e["reward"], 3) for e in events],
        "wall_s": summary["wall_s"],
    }


def print_quickstarts(rows: list[dict[str, Any]]) -> None:
    """Schedule and rewards of the real runs, step under step."""
    print(f"\n{'':32}{'waits':>8}{'rollouts/s':>19}{'lost':>6}{'wall s':>8}  share of rollouts by versions behind")
    for row in rows:
        figures = f"{100 * row['idle']:6.1f} %{row['rollouts_per_s']:19}{row['lost']:6}{row['wall_s']:8.0f}"
        print(f"{row['way']:32}{figures}  {shares(row)}")
    steps = max(len(row["rewards"]) for row in rows)
    print(f"\n{'reward of step':32}" + "".join(f"{step:6}" for step in range(1, steps + 1)) + "    mean  held out")
    for row in rows:
        rewards = row["rewards"]
        mean = sum(rewards) / len(rewards)
        print(f"{row['way']:32}" + "".join(f"{r:6.2f}" for r in rewards) + f"{mean:8.3f}{row['held_out']:10.3f}")


def shares(row: dict[str, Any]) -> str:
    return ", ".join(f"{age}: {100 * share:.0f} %" for age, share in row["staleness"].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 times 80 steps instead of 8 times 150")
    parser.add_argument("--quickstart", action="store_true", help="the real quickstart too, with staleness 0, 1 and 2")
    parser.add_argument(
        "--steps", type=int, help="of the quickstart; without it its own, and its held-out reward is checked"
    )
    parser.add_argument(
        "--training", type=float, default=TRAINING, metavar="MEDIANS", help="how long a batch's training takes"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    steps, seeds = (80, 4) if a.quick else (150, 8)
    ways: list[tuple[Callable[..., Any], str, int]] = [
        (batches, "synchronous", 0),
        (batches, f"with {EXTRA} extra rollouts a group", EXTRA),
        *((streamed, f"streamed, staleness {staleness}", staleness) for staleness in (1, MOST_STALENESS)),
    ]
    measured: list[Measured] = []
    for way, name, n in ways:
        whole = Measured(name=name, staleness=n if way is streamed else 0)
        for seed in range(a.seed, a.seed + seeds):  # one rollout of 30 medians is a tenth of a short run
            began_s = time.process_time()
            found = Clock().run(way(name, steps, a.training, seed, n))
            found.cpu_s = time.process_time() - began_s
            whole.add(found)
        measured.append(whole)
    rows = [found.row() for found in measured]
    print(
        f"{'':32}{'waits':>8}{'rollouts a median':>19}{'lost':>6}{'twice':>7}{'CPU ms':>8}  share of rollouts by versions behind"
    )
    for row in rows:
        print(
            f"{row['way']:32}{100 * row['idle']:6.1f} %{row['rollouts_per_median']:19}{row['lost']:6}{row['twice']:7}"
            f"{row['cpu_ms']:8}  {shares(row)}"
        )
    real = []
    if a.quickstart:
        real = [quickstart(staleness, a.steps, a.seed) for staleness in range(MOST_STALENESS + 1)]
        print_quickstarts(real)
        rows += real
    streams = [found for found in measured if found.staleness]
    best = min(found.idle for found in streams if found.staleness <= MOST_STALENESS)
    checks = [
        {
            "name": f"share of its time that the trainer waits, staleness <= {MOST_STALENESS}",
            "value": round(best, 4),
            "target": f"<= {MOST_IDLE}",
            "ok": best <= MOST_IDLE,
        },
        {
            "name": "rollouts lost by a stream",
            "value": sum(found.lost for found in streams),
            "target": "0",
            "ok": not any(found.lost for found in streams),
        },
        {
            "name": "rollouts trained twice",
            "value": sum(n > 1 for found in streams for n in found.trained.values()),
            "target": "0",
            "ok": not any(n > 1 for found in streams for n in found.trained.values()),
        },
        {
            "name": "versions behind, at most the limit",
            "value": max(max(found.ages) - found.staleness for found in streams),
            "target": "<= 0",
            "ok": all(max(found.ages) <= found.staleness for found in streams),
        },
    ]
    for limit, row in enumerate(real):
        oldest = max(map(int, row["staleness"]))
        checks += [
            {"name": f"{row['way']}: rollouts lost", "value": row["lost"], "target": "0", "ok": not row["lost"]},
            {
                "name": f"{row['way']}: versions behind",
                "value": oldest,
                "target": f"<= {limit}",
                "ok": oldest <= limit,
            },
        ]
        if a.steps is None:
            held_out = row["held_out"]
            checks.append(
                {
                    "name": f"{row['way']}: held-out reward",
                    "value": held_out,
                    "target": f">= {LEAST_HELD_OUT}",
                    "ok": held_out >= LEAST_HELD_OUT,
                }
            )
    for check in checks:
        print(f"{'ok' if check['ok'] else 'MISSED':8}{check['name']}: {check['value']} (target {check['target']})")
    if a.json:
        a.json.write_text(json.dumps({"rows": rows, "checks": checks}, indent=2) + "\n")
    sys.exit(0 if all(check["ok"] for check in checks) else 1)


if __name__ == "__main__":
    main()
