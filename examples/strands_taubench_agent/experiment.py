"""Train a small policy on τ²-bench telecom on this machine with several seeds, and print the results.

    python examples/strands_taubench_agent/experiment.py --out runs/taubench

Each seed begins with a warm start on demonstrations of the 74 train tasks. Then `agentcore-rl train` trains on these tasks, with
the Strands agent in sessions of the local runtime. The 40 test tasks are evaluated before and after. All files are in the folder
of --out. Finished parts are not repeated, and an interrupted seed is continued.

Choose settings with `--validation 20 --out runs/taubench-validation`, never with the test tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.runs import Query, RunReader

HERE = Path(__file__).resolve().parent
RESAMPLES = 10_000
Rewards = Mapping[str, Sequence[float]]  # task -> reward of each of its rollouts


def agent_python() -> str:
    """Return the Python of the agent's environment, and build the environment if it is missing."""
    from agentcore_rl_toolkit.runtime.agents.environments import build

    return str(build(HERE / "rl_app.py"))


def prepare(out: Path, options: argparse.Namespace) -> Path:
    """Rows and demonstrations, the same for every seed."""
    data = out / "data"
    if not (data / "tools.json").exists():
        command = [agent_python(), str(HERE / "data.py"), "--out", str(data), "--repeats", str(options.repeats)]
        run([*command, f"--validation={options.validation}", f"--partial-credit={options.partial_credit}"])
    return data


def train_seed(out: Path, data: Path, seed: int, options: argparse.Namespace) -> None:
    """Run the warm start and GRPO of a seed, without finished parts."""
    policy, grpo = out / f"warm-{seed}", out / f"seed-{seed}"
    if not (policy / "model.safetensors").exists():
        made = [sys.executable, str(HERE / "warm_start.py"), "--data", str(data), "--out", str(policy)]
        run([*made, f"--steps={options.warm_steps}", f"--careless-steps={options.careless_steps}", f"--seed={seed}"])
    if (grpo / "summary.json").exists():
        return
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "train"]
    if (grpo / "config.json").exists():
        run([*command, "--resume", "--out", str(grpo)])
        return
    settings = {
        "agent": HERE / "rl_app.py",
        "data": data / "train.jsonl",
        "eval-data": data / ("validation.jsonl" if options.validation else "test.jsonl"),
        "model": policy,
        "steps": options.steps,
        "groups": options.groups,
        "rollouts": options.rollouts,
        "out": grpo,
    }
    more = ["--set", f"learning_rate={options.learning_rate}", "--set", f"seed={seed}"]
    run([*command, *(f"--{name}={value}" for name, value in settings.items()), *more])


def run(command: Sequence[str]) -> None:
    """Run a command and print its cost. Raises: SystemExit with its code if it fails."""
    before = _cpu_s()
    done = subprocess.run(command, check=False)
    print(f"[{_cpu_s() - before:.0f} s of CPU] {' '.join(command[1:4])}", flush=True)
    if done.returncode != 0:
        sys.exit(done.returncode)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def records(grpo: Path, when: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(task, metrics) of every rollout of an evaluation; a rollout without a record has no metrics, and counts as 0."""
    evaluated = Path(json.loads((grpo / "config.json").read_text())["eval_data"])
    rows = [json.loads(line) for line in evaluated.read_text().splitlines()]
    with RunReader(grpo) as run:
        rollouts = run.rollouts(Query(phase=when), limit=run.count())
    for rollout in rollouts:
        place = int(rollout["grp"].split("/")[-1])
        stored = grpo / "store" / grpo.name / rollout["grp"] / f"{rollout['session_id']}.json"
        record = json.loads(stored.read_text()) if stored.exists() else {}
        yield rows[place]["task_id"], record.get("metrics") or {}


def rewards(grpo: Path, when: str, basis: str) -> dict[str, list[float]]:
    """Rewards of an evaluation by task: ``published``, or ``strict`` (also every gold action)."""
    found: dict[str, list[float]] = defaultdict(list)
    for task, metrics in records(grpo, when):
        published = float(metrics.get("published", 0.0))
        found[task].append(published if basis == "published" else published * float(metrics.get("actions", 0.0)))
    return found


def mean(by_task: Rewards) -> float:
    """Mean over tasks of the mean over rollouts."""
    return math.fsum(sum(values) / len(values) for values in by_task.values()) / len(by_task)


def interval(per_task: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of a mean over tasks (bootstrap over tasks)."""
    rng = random.Random(seed)
    means = sorted(math.fsum(rng.choices(per_task, k=len(per_task))) / len(per_task) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def report(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Print the table of the finished seeds, and return it."""
    table: dict[str, Any] = {"seeds": [], "pooled": {}}
    finished = [seed for seed in seeds if (out / f"seed-{seed}" / "summary.json").exists()]
    for basis in ("published", "strict"):
        pooled: dict[str, dict[str, list[float]]] = {"before": defaultdict(list), "after": defaultdict(list)}
        for seed in finished:
            both = {when: rewards(out / f"seed-{seed}", when, basis) for when in ("before", "after")}
            for when, by_task in both.items():
                for task, values in by_task.items():
                    pooled[when][task] += values
            table["seeds"].append({"seed": seed, "basis": basis, **_compare(both["before"], both["after"])})
        if finished:
            table["pooled"][basis] = _compare(pooled["before"], pooled["after"])
    print(f"{'seed':>6}  {'basis':<9}  {'before':>24}  {'after':>24}  {'difference':>26}")
    for row in table["seeds"]:
        print(f"{row['seed']:>6}  {row['basis']:<9}  {_text(row)}")
    for basis, row in table["pooled"].items():
        print(f"{'all':>6}  {basis:<9}  {_text(row)}")
    return table


def _compare(before: Rewards, after: Rewards) -> dict[str, Any]:
    tasks = sorted(before)
    means = {when: [sum(r[t]) / len(r[t]) for t in tasks] for when, r in (("before", before), ("after", after))}
    gain = [b - a for a, b in zip(means["before"], means["after"], strict=True)]
    named = {**means, "difference": gain}
    return {name: {"mean": math.fsum(v) / len(v), "interval": interval(v)} for name, v in named.items()}


def _text(row: Mapping[str, Any]) -> str:
    def cell(name: str, sign: str) -> str:
        low, high = row[name]["interval"]
        return f"{row[name]['mean']:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"

    return f"{cell('before', ''):>24}  {cell('after', ''):>24}  {cell('difference', '+'):>26}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/taubench"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warm-steps", type=int, default=400, help="steps with careful demonstrations")
    parser.add_argument("--careless-steps", type=int, default=50, help="steps with careless demonstrations")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument(
        "--partial-credit", type=float, default=0.0, help="reward for the share of the published actions"
    )
    parser.add_argument("--repeats", type=int, default=4, help="rollouts of each task in an evaluation")
    parser.add_argument(
        "--validation",
        type=int,
        default=0,
        metavar="N",
        help="evaluate on N train tasks instead of the test tasks, to choose settings, and do not train on them",
    )
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    options = parser.parse_args()
    out = options.out.resolve()
    if not options.report:
        out.mkdir(parents=True, exist_ok=True)
        data = prepare(out, options)
        for seed in options.seeds:
            train_seed(out, data, seed, options)
    table = report(out, options.seeds)
    if table["seeds"]:
        (out / "report.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
