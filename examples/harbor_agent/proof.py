"""Prove the Harbor agent: check its tasks, and run four solvers: an oracle, and others that do nothing, half, or only talk.

    python examples/harbor_agent/proof.py [--quick] [--json FILE] [--here]

The policy's commands run in a Bubblewrap sandbox per rollout. Nested sandboxes need the isolation `process`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from check_tasks import check  # noqa: E402
from harbor_tasks import HarborTask, read_tasks  # noqa: E402

from agentcore_rl_toolkit.gateway.testing import ToolCall  # noqa: E402
from harness import Proof, Result, mean, parser, skip, tool_calls  # noqa: E402  (the examples are not a package)

AGENTS = ("mini-swe-agent", "plain")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# Three of the six cases of rotate-backups: those in which nothing may be deleted.
HALF = "printf '#!/bin/bash\\nexit 2\\n' > /app/rotate.sh"


def solver(
    commands: Callable[[HarborTask], list[str]], tasks: list[HarborTask]
) -> Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any]:
    """A model that runs these commands one by one and then says, each agent's way, that it is done."""

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        asked = next(m["content"] for m in messages if m["role"] == "user")
        task = next(task for task in tasks if task.instruction.strip() in asked)
        done = sum(m["role"] == "tool" for m in messages)
        todo = commands(task)
        if done < len(todo):
            return [ToolCall("bash", {"command": todo[done]})]
        return [ToolCall("bash", {"command": SUBMIT})] if SUBMIT in asked else "DONE"

    return decide


def oracle(task: HarborTask) -> list[str]:
    assert task.solution is not None
    return ["ls", task.solution["solve.sh"].decode()]


def main() -> None:
    options = parser(__doc__).parse_args()
    if shutil.which("bwrap") is None:
        skip(HERE, options, "needs Bubblewrap: scripts/system_packages.sh installs it")
    tasks = read_tasks(HERE / "tasks")
    checked = [check(task, "bubblewrap") for task in tasks]
    with Proof(
        example=HERE,
        framework=None,
        options=options,
        session_env={"HARBOR_SANDBOX": "bubblewrap"},
        max_concurrent=2,
        rollout_timeout_s=600.0,
    ) as proof:
        held = [one.task for one in checked if one.problem is None]
        problems = [one.problem for one in checked if one.problem] or f"{len(held)} of {len(tasks)} hold"
        proof.check(
            "every task: its oracle passes, doing nothing fails",
            value=problems,
            target="all",
            ok=len(held) == len(tasks),
        )
        for agent in AGENTS[:1] if options.quick else AGENTS:
            payloads = [{**task.payload(), "agent": agent} for task in tasks]
            solved = proof.run(payloads, solver(oracle, tasks))
            proof.check_all_ok(solved, f"{agent}: the oracle's rollouts end ok")
            nothing = proof.run(payloads, solver(lambda task: [], tasks))
            proof.check_all_ok(nothing, f"{agent}: doing nothing ends ok")
            proof.row(
                framework=agent,
                rollouts=len(solved) + len(nothing),
                oracle_reward=mean(solved),
                noop_reward=mean(nothing),
                tool_calls=tool_calls(solved, nothing),
                note=f"{len(tasks)} Harbor tasks, Bubblewrap",
            )
            proof.check(
                f"{agent}: the oracle gets 1", value=rewards(solved), target="all 1", ok=set(rewards(solved)) == {1.0}
            )
            proof.check(
                f"{agent}: doing nothing gets 0",
                value=rewards(nothing),
                target="all 0",
                ok=set(rewards(nothing)) == {0.0},
            )
        rotate = [p for p in payloads if p["task"] == "rotate-backups"]
        half = proof.run(rotate, solver(lambda task: [HALF], tasks))
        proof.check(
            "half of a task's cases give half its reward", value=rewards(half), target=[0.5], ok=rewards(half) == [0.5]
        )
        talk = proof.run(
            [{**rotate[0], "agent": "mini-swe-agent", "step_limit": 5}],
            lambda messages, tools: "I would delete the oldest ones.",
        )
        seen = (talk[0].outcome, talk[0].reward, talk[0].result.get("ended"))
        target = ("ok", 0.0, "RepeatedFormatError")
        proof.check("a policy that only talks gets what the tests say: 0", value=seen, target=target, ok=seen == target)


def rewards(results: list[Result]) -> list[float | None]:
    return [result.reward for result in results]


if __name__ == "__main__":
    main()
