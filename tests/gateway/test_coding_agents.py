"""Coding agents as they are: Claude Code, Codex, opencode and qwen-code, headless, through a gateway in token mode."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine, Seen
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".venvs" / "npm" / "node_modules" / ".bin"
MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
TASK = "Read note.txt, put the word done into it, show the file with a command, and say that it is done."
LIMIT_S = 150.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a program is started, and the names and arguments of its tools that read, edit and run."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    steps: tuple[tuple[str, dict[str, Any]], ...]


# {url} is the session's address without /v1, {key} its key, {work} the folder of the task
PATCH = "*** Begin Patch\n*** Update File: note.txt\n@@\n-todo\n+done\n*** End Patch"
OPENCODE = {
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
            "models": {"policy": {"name": "policy"}},
        }
    }
}
CODEX = """model = "policy"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""
NOTE = "{work}/note.txt"
EDIT = {"file_path": NOTE, "old_string": "todo", "new_string": "done"}
COMMANDS: dict[str, Program] = {
    "claude": Program(
        command=("claude", "-p", TASK, "--model", "policy", "--dangerously-skip-permissions"),
        env={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "{key}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
        steps=(
            ("Read", {"file_path": NOTE}),
            ("Edit", EDIT),
            ("Bash", {"command": "cat note.txt", "description": "show"}),
        ),
    ),
    "codex": Program(
        command=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        env={"GATEWAY_KEY": "{key}"},
        files={".codex/config.toml": CODEX},
        steps=(
            ("exec_command", {"cmd": "cat note.txt"}),
            ("exec_command", {"cmd": "sed -i s/todo/done/ note.txt"}),
            ("exec_command", {"cmd": "cat note.txt"}),
        ),
    ),
    "opencode": Program(
        command=("opencode", "run", "--model", "gateway/policy", TASK),
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
        steps=(
            ("read", {"filePath": NOTE}),
            ("edit", {"filePath": NOTE, "oldString": "todo", "newString": "done"}),
            ("bash", {"command": "cat note.txt", "description": "show"}),
        ),
    ),
    "qwen": Program(
        command=("qwen", "--yolo", "--auth-type", "openai", "--model", "policy", "-p", TASK),
        env={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}"},
        steps=(
            ("read_file", {"file_path": NOTE}),
            ("edit", EDIT),
            ("run_shell_command", {"command": "cat note.txt", "description": "show", "is_background": False}),
        ),
    ),
}


class Script:
    """A model that goes through a program's steps: one call a turn, then an answer. Other conversations get a short text."""

    def __init__(self, renderer: Renderer, program: Program, work: Path) -> None:
        self.renderer = renderer
        self.program = program
        self.work = work
        self.main = 0
        self.others = 0

    def decide(self, seen: Seen) -> dict[str, Any]:
        text = self.renderer.decode(seen.prompt_ids)
        steps = self.program.steps
        offered = all(f'"{name}"' in text for name, _ in steps)
        if not offered or (self.main == 0 and TASK not in text) or self.main > len(steps):
            self.others += 1
            answer = "Note"
        elif self.main == len(steps):
            self.main += 1
            answer = "It is done."
        else:
            name, arguments = steps[self.main]
            self.main += 1
            given = {k: v.format(work=self.work) if isinstance(v, str) else v for k, v in arguments.items()}
            answer = "<tool_call>\n" + json.dumps({"name": name, "arguments": given}) + "\n</tool_call>"
        return {
            "token_ids": [*self.renderer.encode(answer), min(self.renderer.stop_token_ids)],
            "finish_reason": "stop",
        }


async def run_program(program: Program, session: SessionHandle, work: Path, home: Path) -> tuple[int | None, str]:
    """Run it headless in a home of its own, with nothing but the session's address and key."""
    words = {"{url}": session.base_url.removesuffix("/v1"), "{key}": session.api_key, "{work}": str(work)}

    def filled(text: str) -> str:
        return re.sub(r"\{(url|key|work)\}", lambda match: words[match[0]], text)

    for name, text in program.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(filled(text))
    env = {name: filled(value) for name, value in program.env.items()}
    env |= {"HOME": str(home), "PATH": os.environ["PATH"], "NO_COLOR": "1", "TERM": "dumb"}
    command = [str(PROGRAMS / program.command[0]), *program.command[1:]]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        process.kill()
        return None, (await process.communicate())[0].decode("utf-8", "replace")
    return process.returncode, output.decode("utf-8", "replace")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.from_path(MODEL)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as running:
        yield running


@pytest.mark.parametrize("mode", ["relay", "token"])
@pytest.mark.parametrize("name", COMMANDS)
async def test_recorded_requests_of_a_coding_agent_are_taken(name: str, mode: str, engine: ScriptedEngine) -> None:
    """Their texts and schemas are replaced; fields, tools, blocks and order are as the programs sent them."""
    recorded = json.loads((Path(__file__).parent / "coding_agents" / f"{name}.json").read_text("utf-8"))
    engine.first_id, engine.last_id = 300, 500
    config = GatewayConfig(
        upstreams=(UpstreamConfig(url=engine.url, engine="vllm"),), model_dir=str(MODEL) if mode == "token" else None
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        client = GatewayClient(gateway.url)
        [session] = await client.create_sessions_async([new_session_id()])
        for call in recorded:
            url = f"{session.base_url}/{call['path']}"
            status, answer = await request("POST", url, body=call["body"], key=session.api_key, timeout_s=30)
            assert status == 200, answer[:1000]
        capture = (await client.fetch_async([session.session_id]))[session.session_id]
    finally:
        await gateway.stop(grace_s=0.2)
    assert capture.errors == []
    assert len(capture.turns) == len(recorded)


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMMANDS)
async def test_a_coding_agent_does_a_task_as_it_is(
    name: str, renderer: Renderer, engine: ScriptedEngine, tmp_path: Path
) -> None:
    program = COMMANDS[name]
    if not (PROGRAMS / program.command[0]).exists():
        pytest.skip(f"{PROGRAMS / program.command[0]} is not there: scripts/coding_agents.sh installs it where npm is")
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (work / "note.txt").write_text("todo\n")
    script = Script(renderer, program, work)
    engine.decide = script.decide
    config = GatewayConfig(upstreams=(UpstreamConfig(url=engine.url, engine="vllm"),), model_dir=str(MODEL))
    gateway = Gateway(config)
    await gateway.start()
    try:
        client = GatewayClient(gateway.url)
        [session] = await client.create_sessions_async([new_session_id()])
        status, output = await run_program(program, session, work, home)
        capture = (await client.fetch_async([session.session_id]))[session.session_id]
    finally:
        await gateway.stop(grace_s=0.2)
    assert status == 0, output[-4000:]
    assert capture.errors == []
    assert (work / "note.txt").read_text() == "done\n", output[-4000:]
    assert "It is done." in output
    trajectory = build_trajectory(capture.session_id, capture.turns)
    sampled = {tuple(ids) for seen in engine.calls for ids in seen.completion_ids}
    assert {tuple(turn.completion_ids) for turn in capture.turns} == sampled
    main = [s for s in trajectory.sequences if sum(s.loss_mask)]
    assert len(main) == 1, [(len(s.token_ids), sum(s.loss_mask)) for s in trajectory.sequences]
    assert script.main == len(program.steps) + 1
