"""A task's own tests decide the reward: `/tests/test.sh` writes it to `/logs/verifier/reward.txt` or `reward.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from harbor_tasks import HarborTask
from sandboxes import Sandbox

VERIFIER_LIMIT_S = 600.0  # Harbor's default
REWARDS = "/logs/verifier"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``reward`` is None if the tests wrote no number or took too long (``why``). ``rewards``: all of `reward.json`."""

    reward: float | None
    rewards: dict[str, float]
    why: str | None
    output: str


def verify(task: HarborTask, sandbox: Sandbox) -> Verdict:
    """Copy the tests into the sandbox after the agent has ended, and run them."""
    sandbox.write("/tests", task.tests, empty_first=True)
    sandbox.write(REWARDS, {}, empty_first=True)
    limit_s = task.settings.verifier.timeout_sec or VERIFIER_LIMIT_S
    ran = sandbox.run(["bash", "/tests/test.sh"], limit_s=limit_s, env=task.settings.verifier.env)
    sandbox.write("/tests", {}, empty_first=True)
    if ran.code is None:
        return Verdict(reward=None, rewards={}, why=f"the tests took longer than {limit_s:g} s", output=ran.output)
    return read_reward(sandbox.read(f"{REWARDS}/reward.json"), sandbox.read(f"{REWARDS}/reward.txt"), ran.output)


def read_reward(as_json: bytes | None, as_text: bytes | None, output: str = "") -> Verdict:
    """Return the key `reward` of `reward.json`, its only key, or the number of `reward.txt`, in this order."""
    rewards: dict[str, float] = {}
    if as_json is not None:
        try:
            read = json.loads(as_json)
        except ValueError:
            return Verdict(reward=None, rewards={}, why="reward.json is no JSON", output=output)
        if isinstance(read, dict):
            rewards = {
                str(k): float(v) for k, v in read.items() if isinstance(v, int | float) and not isinstance(v, bool)
            }
    reward = rewards.get("reward")
    if reward is None and as_text is not None:
        try:
            reward = float(as_text.decode())
        except (ValueError, UnicodeDecodeError):
            return Verdict(reward=None, rewards=rewards, why="reward.txt holds no number", output=output)
    if reward is None and len(rewards) == 1:
        (reward,) = rewards.values()
    if reward is None or not math.isfinite(reward):
        return Verdict(reward=None, rewards=rewards, why="the tests wrote no reward", output=output)
    return Verdict(reward=reward, rewards=rewards, why=None, output=output)


def solve(task: HarborTask, sandbox: Sandbox, *, limit_s: float) -> str:
    """Run the task's own solution, as the oracle does; its output. Raises: ValueError for a task without one."""
    if task.solution is None or "solve.sh" not in task.solution:
        raise ValueError(f"task {task.name} has no solution/solve.sh")
    sandbox.write("/solution", task.solution, empty_first=True)
    return sandbox.run(["bash", "/solution/solve.sh"], limit_s=limit_s, env=task.settings.solution.env).output
