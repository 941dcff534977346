"""The scripted oracle solves tasks of all three levels through the deployed agent's tools; doing nothing solves none of them."""

import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from agentcore_rl_toolkit.cli.output.terminal import visible  # noqa: E402
from agentcore_rl_toolkit.gateway.testing import ToolCall  # noqa: E402
from harness import Proof, mean, parser, skip, tool_calls  # noqa: E402  (examples/ has to be on the path first)

SHARED = HERE.parents[2] / "shared" / "data" / "officebench" / "tasks"
QUICK = ("1-1/0", "1-4/0", "1-8/1", "2-23/0", "2-38/1", "3-6/1", "3-75/0")
LEAST = 40  # tasks that the oracle has to solve


def tasks() -> Path | None:
    """OfficeBench's folder of tasks, if it is on this machine."""
    for place in (os.environ.get("OFFICEBENCH_TASKS"), HERE / "tasks", SHARED):
        if place and Path(place).is_dir():
            return Path(place).resolve()
    return None


def _staged(scratch: Path, folder: Path, ids: list[str]) -> Path:
    """Copy the example together with its tasks, because a session sees only the agent's own folder."""
    place = scratch / HERE.name
    shutil.copytree(HERE, place, ignore=shutil.ignore_patterns("tasks", "__pycache__", "solver.py", "proof.py"))
    for name in {task_id.partition("/")[0] for task_id in ids}:
        shutil.copytree(folder / name, place / "tasks" / name, copy_function=shutil.copyfile)
    return place


def main() -> None:
    options = parser(__doc__).parse_args()
    folder = tasks()
    if folder is None:
        skip(HERE, options, "set OFFICEBENCH_TASKS to the `tasks` folder of OfficeBench's repository")
        return
    from solver import SOLUTIONS, steps  # plain data: needs none of the example's packages

    ids = [task_id for task_id in SOLUTIONS if not options.quick or task_id in QUICK]

    def task_of(messages):
        """The payload's prompt ends with the task's id, so that the model can be told apart from its peers."""
        asked = next(message for message in messages if message["role"] == "user")
        content = asked["content"]
        text = content if isinstance(content, str) else "".join(block.get("text", "") for block in content)
        return text.rpartition("#")[2].strip()

    def oracle(messages, tools):
        calls = steps(task_of(messages))
        done = sum(message["role"] == "assistant" for message in messages)
        return [ToolCall(*calls[done])] if done < len(calls) else "Done."

    def nothing(messages, tools):
        return "There is nothing to do."

    def endless(messages, tools):
        return [ToolCall("shell_command", {"command": "ls data"})]

    payloads = [{"task_id": task_id, "prompt": f"Solve the task #{task_id}"} for task_id in ids]
    with (
        tempfile.TemporaryDirectory(prefix="officebench-proof-") as scratch,
        Proof(
            example=_staged(Path(scratch), folder, ids),
            framework="Strands Agents",
            options=options,
            max_concurrent=2,
            rollout_timeout_s=600.0,
        ) as proof,
    ):
        solved, idle = proof.run(payloads, oracle), proof.run(payloads, nothing)
        looping = proof.run(payloads[:1], endless)
        levels = Counter(result.payload["task_id"][0] for result in solved if result.reward == 1.0)
        proof.row(
            rollouts=len(solved) + len(idle) + len(looping),
            oracle_reward=mean(solved),
            noop_reward=mean(idle),
            tool_calls=tool_calls(solved, idle, looping),
            note=f"tasks of levels 1, 2, 3: {levels['1']}, {levels['2']}, {levels['3']}",
        )
        proof.check_all_ok([*solved, *idle])
        for result in solved:
            if result.outcome == "ok" and result.reward != 1.0:
                print(visible(f"{result.payload['task_id']}: {result.result.get('reasons')}"), file=sys.stderr)
        proof.check("the oracle solves every task", value=mean(solved), target=1.0, ok=mean(solved) == 1.0)
        least = len(QUICK) if options.quick else LEAST
        proof.check("tasks solved", value=levels.total(), target=f"at least {least}", ok=levels.total() >= least)
        proof.check("levels with solved tasks", value=len(levels), target=3, ok=len(levels) == 3)
        proof.check("doing nothing scores nothing", value=mean(idle), target=0.0, ok=mean(idle) == 0.0)
        ended = [(result.reward, result.cause, result.failure) for result in looping]
        proof.check(
            "out of turns is the policy's failure", value=ended, target=0.0, ok=ended == [(0.0, "policy", "turns")]
        )


if __name__ == "__main__":
    main()
