"""A trial: a task, an agent, a sandbox, and the tests. Both apps use it."""

from __future__ import annotations

from typing import Any

from agents import AGENTS, Connection, Limits
from harbor_tasks import HarborTask
from payload import HarborRequest
from reward import verify
from sandboxes import choose

AGENT_LIMIT_S = 900.0  # where the task sets none


def run_trial(request: HarborRequest, task: HarborTask, connection: Connection) -> dict[str, Any]:
    """Run the agent and the tests. Tests that hang or write no reward give 0, because `check_tasks.py` has shown that they work.

    Raises: SandboxError if there is no sandbox, and the exceptions of the agent.
    """
    limits = Limits(steps=request.step_limit, limit_s=task.settings.agent.timeout_sec or AGENT_LIMIT_S)
    with choose(task) as sandbox:
        ended = AGENTS[request.agent](task.instruction, sandbox, connection, limits)
        verdict = verify(task, sandbox)
    return {
        "rewards": 0.0 if verdict.reward is None else verdict.reward,
        "metrics": {"steps": ended.steps, "submitted": float(ended.status == "Submitted"), **_named(verdict.rewards)},
        "ended": ended.status,
        "verifier": {"problem": verdict.why, "output": verdict.output[-4000:]},
        "isolated": sandbox.isolated,
    }


def _named(rewards: dict[str, float]) -> dict[str, float]:
    return {f"reward/{name}": value for name, value in rewards.items()}
