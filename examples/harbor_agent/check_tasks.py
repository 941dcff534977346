"""Check tasks before a training: the solution must pass and doing nothing must fail, in the sandbox of the rollouts.

    python check_tasks.py tasks [--rows rows.jsonl] [--sandbox bubblewrap|podman|session] [--json FILE]

Prints one line per task. ``--rows`` writes the payloads of the tasks that pass the check, one per line, for a training run.
The exit code is 1 if a task does not pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from harbor_tasks import HarborTask, read_tasks
from reward import Verdict, solve, verify
from sandboxes import SandboxError, choose
from trial import AGENT_LIMIT_S

PASSED = 1.0


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result for a task. If ``problem`` is None, the task passed the check."""

    task: str
    oracle: float | None = None
    nothing: float | None = None
    problem: str | None = None


def check(task: HarborTask, kind: str | None = None, *, passed: float = PASSED) -> Checked:
    """Run a task's solution, and nothing, each in a fresh sandbox. ``passed`` is the reward that counts as solved."""
    try:
        with choose(task, kind) as sandbox:
            nothing = verify(task, sandbox)
        with choose(task, kind) as sandbox:
            solve(task, sandbox, limit_s=task.settings.agent.timeout_sec or AGENT_LIMIT_S)
            oracle = verify(task, sandbox)
    except (SandboxError, ValueError) as e:
        return Checked(task=task.name, problem=str(e))
    problem = _problem("the oracle", oracle) or _problem("doing nothing", nothing)
    if problem is None and oracle.reward is not None and oracle.reward < passed:
        problem = f"the oracle gets {oracle.reward:g}, less than {passed:g}: {oracle.output[-300:].strip()}"
    elif problem is None and nothing.reward is not None and nothing.reward >= passed:
        problem = f"doing nothing gets {nothing.reward:g}: there is nothing to learn"
    return Checked(task=task.name, oracle=oracle.reward, nothing=nothing.reward, problem=problem)


def _problem(who: str, verdict: Verdict) -> str | None:
    if verdict.reward is not None:
        return None
    return f"after {who}: {verdict.why}: {verdict.output[-300:].strip()}"


def table(checked: Iterable[Checked]) -> str:
    """Write one line for each task."""
    lines = [("task", "oracle", "nothing", "")]
    for one in checked:
        rewards = ("-" if r is None else f"{r:g}" for r in (one.oracle, one.nothing))
        lines.append((one.task, *rewards, one.problem or "holds"))  # type: ignore[arg-type]
    width = max(len(line[0]) for line in lines)
    return "\n".join(f"{a.ljust(width)}  {b:>6}  {c:>7}  {d}".rstrip() for a, b, c, d in lines)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tasks", type=Path, help="a folder of tasks, or one task")
    options.add_argument(
        "--rows", type=Path, metavar="FILE", help="write the payloads of the tasks that pass the check"
    )
    options.add_argument("--sandbox", help="podman, bubblewrap or session [default: the first that works here]")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    given = options.parse_args()
    tasks = read_tasks(given.tasks)
    checked = [check(task, given.sandbox) for task in tasks]
    print(table(checked))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in checked], indent=2) + "\n")
    if given.rows:
        rows = [t.payload() for t, one in zip(tasks, checked, strict=True) if one.problem is None]
        given.rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return 0 if all(one.problem is None for one in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
