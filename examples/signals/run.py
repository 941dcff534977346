"""Learn one task in several ways: `python examples/signals/run.py --methods grpo distill`.

Three methods use the agent of the quickstart and the built-in policy: GRPO, a student that learns from the policy of GRPO, and
imitation of successes of the untrained policy. Two methods use the agent of `agentcore-rl init`: a reward for the episode, and
rewards for its turns. Each method prints a row for each seed: held-out reward before and after, number of rollouts with
evaluations, and CPU minutes of all processes. Rows in OUT/results.jsonl are not computed again. `distill` and `sft` need `grpo`
of the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MATH = HERE.parent / "strands_math_agent" / "arithmetic_app.py"
CLI = [sys.executable, "-m", "agentcore_rl_toolkit"]


def cli(*words: object) -> None:
    subprocess.run([*CLI, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def summary(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text())
    before, after = found["held_out_reward_before"], found["held_out_reward_after"]
    return {"before": before, "after": after, "rollouts": found["rollouts"]}


@contextlib.contextmanager
def serving(model: Path, ready: Path) -> Iterator[str]:
    """The URL of a policy server with this run's model."""
    ready.unlink(missing_ok=True)
    words = ["policy", "serve", "--model", model / "policy", "--port", 0, "--ready-file", ready]
    with subprocess.Popen([*CLI, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not ready.exists():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    sys.exit(f"the teacher ended: {server.wait(0.2)}")
            yield json.loads(ready.read_text())["url"]
        finally:
            server.terminate()


def grpo(out: Path, seed: int) -> dict[str, Any]:
    """12 steps of 16 problems, 4 rollouts each."""
    folder = out / f"grpo-{seed}"
    cli("quickstart", "--steps", 12, "--set", f"seed={seed}", "--out", folder)
    return summary(folder)


def distill(out: Path, seed: int) -> dict[str, Any]:
    """9 steps of 16 problems, 2 rollouts each; the problems are those of GRPO's run."""
    teacher, folder = out / f"grpo-{seed}", out / f"distill-{seed}"
    with serving(teacher, out / "teacher.json") as url:
        cli(
            *("distill", "--teacher-url", url, "--agent", MATH, "--out", folder),
            *("--data", teacher / "train.jsonl", "--eval-data", teacher / "held_out.jsonl"),
            *("--steps", 9, "--groups", 16, "--rollouts", 2, "--set", "learning_rate=1e-3", "--set", f"seed={seed}"),
        )
    return summary(folder)


def sft(out: Path, seed: int) -> dict[str, Any]:
    """Four rollouts of each of GRPO's problems by the untrained policy; those with reward 1 are imitated."""
    data, samples, taught = out / f"grpo-{seed}", out / f"samples-{seed}", out / f"sft-{seed}"
    before = summary(data)["before"]  # the same policy on the same rows
    evaluate(MATH, data / "train.jsonl", samples, "--repeat", 4, "--for-training")
    cli(
        *("sft", "--from", samples, "--out", taught),
        *("--set", "min_reward=1", "--set", "epochs=4", "--set", f"seed={seed}"),
    )
    after = evaluate(MATH, data / "held_out.jsonl", out / f"sft-{seed}-after", "--model", taught)
    rows = [len((data / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "held_out")]
    return {"before": before, "after": after, "rollouts": 4 * rows[0] + 2 * rows[1]}


def evaluate(agent: Path, data: Path, out: Path, *more: object) -> float:
    """The mean over all rollouts; those that fail because of the policy count as 0."""
    cli("eval", "--agent", agent, "--data", data, "--out", out, *more)
    return float(json.loads((out / "summary.json").read_text())["mean"])


def by_credit(credit: str) -> Callable[[Path, int], dict[str, Any]]:
    def train(out: Path, seed: int) -> dict[str, Any]:
        """12 steps of 16 problems, 4 rollouts each."""
        shop, folder = out / "shop", out / f"{credit}-{seed}"
        if not shop.exists():
            cli("init", shop, "--framework", "plain")
            shutil.copy(HERE / "turns_agent.py", shop / "turns_agent.py")
        cli(
            *("train", "--credit", credit, "--agent", shop / "turns_agent.py", "--out", folder),
            *("--data", shop / "train.jsonl", "--eval-data", shop / "eval.jsonl", "--set", "learning_rate=6e-4"),
            *("--steps", 12, "--groups", 16, "--rollouts", 4, "--set", f"seed={seed}"),
        )
        return summary(folder)

    return train


METHODS = {"grpo": grpo, "distill": distill, "sft": sft, "episode": by_credit("episode"), "turn": by_credit("turn")}


def cpu_s() -> float:
    """Return the CPU seconds of all processes that this script started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="[all]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/signals"), help="[%(default)s]")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    print("method   seed  before  after  rollouts  CPU min")
    for seed in given.seeds:
        for method in given.methods:
            row = next((row for row in rows if (row["method"], row["seed"]) == (method, seed)), None)
            if row is None:
                began_s = cpu_s()
                row = {"method": method, "seed": seed, **METHODS[method](out, seed)}
                row["cpu_minutes"] = (cpu_s() - began_s) / 60
                with results.open("a") as kept:
                    kept.write(json.dumps(row) + "\n")
            numbers = f"{row['before']:>8.3f}{row['after']:>7.3f}{row['rollouts']:>10}{row['cpu_minutes']:>9.1f}"
            print(f"{method:<9}{seed:>4}{numbers}", flush=True)


if __name__ == "__main__":
    main()
