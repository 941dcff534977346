"""Prove the coding agents: each program that is installed solves a small task with an oracle's calls, and not without them.

python examples/cli_agents/proof.py [--quick] [--json FILE] [--here]
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from programs import INSTALLED, PROGRAMS  # noqa: E402

from agentcore_rl_toolkit.gateway.testing import ToolCall  # noqa: E402
from harness import Proof, mean, parser, skip, tool_calls  # noqa: E402  (the examples are not a package)

TASK = json.loads((HERE / "tasks.jsonl").read_text().splitlines()[0])
EDIT = {"file_path": "{work}/note.txt", "old_string": "todo", "new_string": "done"}
# The calls that read, edit, and show the file, with each program's tools. {work} is its folder.
STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "claude": [
        ("Read", {"file_path": "{work}/note.txt"}),
        ("Edit", EDIT),
        ("Bash", {"command": "cat note.txt", "description": "show"}),
    ],
    "codex": [
        ("exec_command", {"cmd": "cat note.txt"}),
        ("exec_command", {"cmd": "sed -i s/todo/done/ note.txt"}),
        ("exec_command", {"cmd": "cat note.txt"}),
    ],
    "opencode": [
        ("read", {"filePath": "{work}/note.txt"}),
        ("edit", {"filePath": "{work}/note.txt", "oldString": "todo", "newString": "done"}),
        ("bash", {"command": "cat note.txt", "description": "show"}),
    ],
    "qwen": [
        ("read_file", {"file_path": "{work}/note.txt"}),
        ("edit", EDIT),
        ("run_shell_command", {"command": "cat note.txt", "description": "show", "is_background": False}),
    ],
    "gemini": [
        ("read_file", {"file_path": "note.txt"}),
        ("replace", {**EDIT, "file_path": "note.txt", "instruction": "Mark it as done."}),
        ("run_shell_command", {"command": "cat note.txt", "description": "show"}),
    ],
    "pi": [
        ("read", {"path": "note.txt"}),
        ("edit", {"path": "note.txt", "edits": [{"oldText": "todo", "newText": "done"}]}),
        ("bash", {"command": "cat note.txt"}),
    ],
}

STEPS["claude-bedrock"] = STEPS["claude"]


def step(program: str, number: int, conversation: str) -> tuple[str, dict[str, Any]]:
    """The tool and arguments of one step; the conversation names the folder that the program works in."""
    name, arguments = STEPS[program][number]
    work = re.search(r"/[\w./-]+/workspace\b", conversation)
    filled = {k: v.format(work=work[0]) if work and isinstance(v, str) else v for k, v in arguments.items()}
    return name, filled


def oracle(program: str) -> Any:
    """A model that takes the steps one by one. Conversations that are offered other tools, or none, get a short text."""

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        done = sum(message["role"] == "tool" for message in messages)
        offered = {tool["function"]["name"] for tool in tools}
        if done == len(STEPS[program]) or not offered.issuperset(name for name, _ in STEPS[program]):
            return "It is done."
        return [ToolCall(*step(program, done, json.dumps(messages)))]

    return decide


def main() -> None:
    options = parser(__doc__).parse_args()
    commands = {name: program.command[0] for name, program in PROGRAMS.items()}
    programs = [name for name, command in commands.items() if shutil.which(command) or (INSTALLED / command).exists()]
    if not programs:
        skip(HERE, options, "needs the programs: scripts/coding_agents.sh installs them where npm is")
    with Proof(example=HERE, framework=None, options=options, max_concurrent=1, rollout_timeout_s=300.0) as proof:
        for name in programs[:1] if options.quick else programs:
            payload = {**TASK, "program": name}
            solved = proof.run([payload], oracle(name))
            proof.check_all_ok(solved, f"{name}: the oracle's rollout ends ok")
            nothing = proof.run([payload], lambda messages, tools: "It is done.")
            proof.check_all_ok(nothing, f"{name}: doing nothing ends ok")
            proof.row(
                framework=name,
                rollouts=2,
                oracle_reward=mean(solved),
                noop_reward=mean(nothing),
                tool_calls=tool_calls(solved, nothing),
                note="edit a file",
            )
            proof.check(f"{name}: the oracle gets 1", value=mean(solved), target=1.0, ok=mean(solved) == 1.0)
            proof.check(f"{name}: doing nothing gets 0", value=mean(nothing), target=0.0, ok=mean(nothing) == 0.0)


if __name__ == "__main__":
    main()
