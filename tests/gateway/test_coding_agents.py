"""Coding agents as they are, headless, through a runtime and the gateway: Claude Code, also over Bedrock's API, Codex, opencode,
qwen-code, Gemini CLI and pi.

The programs run as `examples/cli_agents` runs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import CollectConfig, CollectedRollout, GroupRequest, collect_async
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import Seen, logprob_of
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.runtime import LocalRuntime
from agentcore_rl_toolkit.trajectory import Turn
from scripted_engine import ScriptedEngine

from .asking import MODEL, Start, captured, opened

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cli_agents"
RELEASES = {"pinned": ROOT / ".venvs" / "npm", "newest": ROOT / ".venvs" / "npm-newest"}
PACKAGES = {
    "claude": ("Claude Code", "@anthropic-ai/claude-code"),
    "claude-bedrock": ("Claude Code on Bedrock", "@anthropic-ai/claude-code"),
    "codex": ("Codex", "@openai/codex"),
    "opencode": ("opencode", "opencode-ai"),
    "qwen": ("qwen-code", "@qwen-code/qwen-code"),
    "gemini": ("Gemini CLI", "@google/gemini-cli"),
    "pi": ("pi", "@mariozechner/pi-coding-agent"),
}
NAMES = tuple(PACKAGES)
RECORDED = tuple(name for name in NAMES if name not in ("claude-bedrock", "pi"))  # others send the same
APIS = {
    "chat": "chat",
    "anthropic": "Messages",
    "responses": "Responses",
    "gemini": "Gemini",
    "bedrock-invoke": "Bedrock",
}
Sampled = list[tuple[list[int], list[int], list[float | None]]]


def sampled(engine: ScriptedEngine) -> Sampled:
    """Prompt, tokens and logprobs of each call, as the engine has them."""
    return sorted(
        (seen.prompt_ids, ids, [logprob_of(i) for i in ids]) for seen in engine.calls for ids in seen.completion_ids
    )


def sampled_by(turns: Sequence[Turn]) -> Sampled:
    return sorted((list(t.prompt_ids), list(t.completion_ids), list(t.logprobs)) for t in turns)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["relay", "token"])
@pytest.mark.parametrize("name", RECORDED)
async def test_recorded_requests_of_a_coding_agent_are_taken(
    name: str, mode: str, stream: bool, engine: ScriptedEngine, start_gateway: Start
) -> None:
    """Their texts and schemas are replaced; fields, tools, blocks and order are as the programs sent them."""
    recorded = json.loads((Path(__file__).parent / "coding_agents" / f"{name}.json").read_text("utf-8"))
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL) if mode == "token" else None)
    session = await opened(gateway)
    for call in recorded:
        path = call["path"] if stream else call["path"].replace("streamGenerateContent?alt=sse", "generateContent")
        url = f"{session.base_url}/{path}"
        body = {k: v for k, v in call["body"].items() if stream or k not in ("stream", "stream_options")}
        status, answer = await request("POST", url, body=body, key=session.api_key, timeout_s=30)
        assert status == 200, answer[:1000]
    capture = await captured(gateway, session)
    assert capture.errors == []
    assert len(capture.turns) == len(recorded)
    assert sampled_by(capture.turns) == sampled(engine)


@pytest.fixture(scope="module")
def proof() -> Iterator[ModuleType]:
    """The example's own oracle. Other examples have modules of the same names, so these go again."""
    path, names = sys.path[:], ("programs", "proof", "harness")
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield __import__("proof")
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module", params=["pinned", pytest.param("newest", marks=pytest.mark.nightly)])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runtime(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRuntime, str]]:
    """The example on a local runtime, and the store of its records."""
    folder = tmp_path_factory.mktemp("cli-agents")
    (folder / "records").mkdir()
    programs = RELEASES[release] / "node_modules" / ".bin"
    options = ["--store", str(folder / "records"), "--state-dir", str(folder / "sessions")]
    options += [
        "--readable",
        str(RELEASES[release]),
        "--session-env",
        f"PATH={programs}{os.pathsep}{os.environ['PATH']}",
    ]
    with LocalRuntime({"cli": EXAMPLE / "rl_app.py"}, options) as running:
        yield running, f"file://{folder / 'records'}"


class Script:
    """A model that takes a program's steps, then answers. Other conversations get a short text."""

    def __init__(self, proof: ModuleType, name: str) -> None:
        self.proof = proof
        self.name = name
        self.renderer = Renderer.from_path(MODEL)
        self.main = 0

    def decide(self, seen: Seen) -> dict[str, Any]:
        text = self.renderer.decode(seen.prompt_ids)
        steps = self.proof.STEPS[self.name]
        offered = all(f'"{tool}"' in text for tool, _ in steps)
        if not offered or (self.main == 0 and self.proof.TASK["prompt"] not in text) or self.main > len(steps):
            answer = "Note"
        elif self.main == len(steps):
            self.main += 1
            answer = "It is done."
        else:
            tool, arguments = self.proof.step(self.name, self.main, text)
            self.main += 1
            answer = "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"
        return {
            "token_ids": [*self.renderer.encode(answer), min(self.renderer.stop_token_ids)],
            "finish_reason": "stop",
        }


async def rollout(runtime: LocalRuntime, store: str, gateway: Gateway, payload: dict[str, Any]) -> CollectedRollout:
    config = CollectConfig(rollout_timeout_s=240.0)
    with (
        pytest.MonkeyPatch.context() as environment,
        contextlib.ExitStack() as stack,
    ):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "local")
        client = stack.enter_context(
            RolloutClient(runtime.arns["cli"], store, "cli-agents", model_id="policy", endpoint_url=runtime.url)
        )
        fetched = stack.enter_context(GatewayClient(gateway.url))
        requests = [GroupRequest(input_id="task", payload=payload)]
        [group] = await collect_async(requests, client=client, gateway=fetched, config=config)
    return group.rollouts[0]


def row(proof: ModuleType, name: str, version: str, found: CollectedRollout) -> str:
    """A program's line of the table in docs/cli-agents.md: what was run, and what of it trains."""
    assert found.trajectory is not None
    assert found.capture is not None
    program, (title, package) = proof.PROGRAMS[name], PACKAGES[name]
    command = " ".join(program.command).format(task="TASK", model="policy", url="{url}", key="{key}")
    settings = [f"{variable}={value}" for variable, value in program.env.items()] + [f"~/{n}" for n in program.files]
    trained = [s for s in found.trajectory.sequences if s.side_call is None]
    weight = sum(s.weight for s in trained)
    apis = ", ".join(sorted({APIS[record.dialect] for record in found.capture.records}))
    calls = sum(len(s.turn_ids) for s in trained)
    return (
        f"| {title} (`{package}`) | {version} | {apis} | {len(found.capture.errors)} | {calls} calls in {len(trained)} "
        f"sequence, {weight:.0%} | {1 - weight:.0%} | `{command}` | {', '.join(f'`{s}`' for s in settings)} |"
    )


@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
async def test_a_coding_agent_does_a_task_as_it_is(
    name: str,
    release: str,
    runtime: tuple[LocalRuntime, str],
    proof: ModuleType,
    engine: ScriptedEngine,
    start_gateway: Start,
) -> None:
    """It reads a file, edits it, runs a command and answers. What it did stands in the documentation."""
    package = RELEASES[release] / "node_modules" / PACKAGES[name][1] / "package.json"
    if not package.exists():
        pytest.skip(f"{package} is not there: scripts/coding_agents.sh installs it where npm is")
    script = Script(proof, name)
    engine.decide = script.decide
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    found = await rollout(*runtime, gateway, {**proof.TASK, "program": name})
    assert (found.outcome, found.reward) == ("ok", 1.0), found.reason or found.traceback
    assert found.record is not None
    assert "It is done." in found.record["output"]
    assert found.trajectory is not None
    assert found.capture is not None
    assert found.capture.errors == []
    assert sampled_by(found.capture.turns) == sampled(engine)
    main, *others = [s for s in found.trajectory.sequences if s.side_call is None]
    assert (others, main.weight) == ([], 1.0), [(s.side_call, s.weight) for s in found.trajectory.sequences]
    assert len(main.turn_ids) == script.main == len(proof.STEPS[name]) + 1
    assert all(s.weight == 0.0 for s in found.trajectory.sequences if s.side_call is not None)
    if release == "pinned":
        made = row(proof, name, json.loads(package.read_text())["version"], found)
        assert made in (ROOT / "docs" / "cli-agents.md").read_text(), made
