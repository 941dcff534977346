"""The reward of a finished workspace: the evaluation of the benchmark, in a process with limited memory and time."""

import json
import subprocess
import sys
from pathlib import Path

from officebench.tasks import Task
from officebench.workspace import Workspace

from agentcore_rl_toolkit import RewardFunction

DEADLINE_S = 300.0  # more than the CPU limit, for a busy machine
_HERE = Path(__file__).resolve().parent


class OfficeReward(RewardFunction):
    """Return 1.0 if every check of the task succeeds, otherwise 0.0. `explain` returns the checks that failed.

    Files of the policy are opened in a separate process. If a file needs too much memory or CPU, this process ends, and the
    reward is 0. If the evaluation fails for another reason, it raises.

    Units: ``cpu_s`` seconds, ``memory_bytes`` of address space, both of one evaluation.
    """

    def __init__(self, *, cpu_s: int = 60, memory_bytes: int = 2 * 2**30) -> None:
        self._bounds = ["--cpu-s", str(cpu_s), "--memory-bytes", str(memory_bytes)]

    def __call__(self, *, task: Task, workspace: Workspace) -> float:
        return self.explain(task=task, workspace=workspace)["reward"]

    def explain(self, *, task: Task, workspace: Workspace) -> dict:
        """Return `{"reward", "published", "reasons"}`, with our rules and with the published rules."""
        command = [sys.executable, "-m", "officebench.evaluation", task.task_id, str(workspace.root)]
        command += ["--tasks", str(task.folder.parent), *self._bounds]
        try:
            done = subprocess.run(
                command, cwd=_HERE, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired as e:
            raise TimeoutError(f"the evaluation of {task.task_id} took longer than {DEADLINE_S:.0f} s") from e
        if done.returncode < 0:
            reason = f"the files took more memory or time than the evaluation has (signal {-done.returncode})"
            return {"reward": 0.0, "published": 0.0, "reasons": [reason]}
        if done.returncode:
            raise RuntimeError(
                f"the evaluation of {task.task_id} failed: {done.stderr.decode(errors='replace')[-2000:]}"
            )
        verdicts = json.loads(done.stdout)
        return {
            "reward": float(verdicts["trained"]["passed"]),
            "published": float(verdicts["published"]["passed"]),
            "reasons": verdicts["trained"]["reasons"],
        }
