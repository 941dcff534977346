"""Run agents of other frameworks as they are, one task with two tools each, and write the table of docs/agents.md.

python scripts/agents_table.py [NAME ...]  # prints the table, of some agents if they are named
python scripts/agents_table.py --write     # replaces it in the page

Each file of scripts/agents is an agent that knows nothing of this project: variables of its environment lead it to a session of a
gateway in token mode, before a scripted model. Its packages go into a folder of .venvs, at the newest version that installs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import (
    Gateway,
    GatewayClient,
    GatewayConfig,
    SessionCapture,
    SessionHandle,
    UpstreamConfig,
)
from agentcore_rl_toolkit.gateway.config import BUILT_IN
from agentcore_rl_toolkit.gateway.testing import Seen
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from scripted_engine import ScriptedEngine  # noqa: E402  (a module of the tests)

PAGE = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- made by scripts/agents_table.py -->", "<!-- end -->"
TASK = "What is (2 + 3) * 7? Use the tools, one after the other."
FAILED = "the program failed:"
INSTALL_S, RUN_S = 600, 150
HEAD = "| agent | package | API | runs unmodified | sequences | trained | side calls | changed in the history |"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """One agent. ``packages`` are of PyPI or npm, by the file's suffix; the first one's version is in the table.

    ``change`` is what the agent's code needs beside the environment.
    """

    title: str
    file: str
    packages: tuple[str, ...]
    change: str = ""


AGENTS = (
    Agent(title="Strands", file="strands_bedrock.py", packages=("strands-agents",)),
    Agent(title="Strands, OpenAI", file="strands_openai.py", packages=("strands-agents[openai]",)),
    Agent(
        title="Strands for TypeScript",
        file="strands.mjs",
        packages=("@strands-agents/sdk", "@smithy/node-http-handler", "zod"),
        change="`requestHandler: new NodeHttpHandler()`",
    ),
    Agent(title="LangGraph", file="langgraph_agent.py", packages=("langgraph", "langchain", "langchain-openai")),
    Agent(title="LangChain, Bedrock", file="langchain_bedrock.py", packages=("langchain-aws", "langchain")),
    Agent(title="deepagents", file="deepagents_agent.py", packages=("deepagents", "langchain-openai")),
    Agent(title="OpenAI Agents", file="openai_agents.py", packages=("openai-agents",)),
    Agent(title="OpenAI Agents for JavaScript", file="openai_agents.mjs", packages=("@openai/agents", "zod")),
    Agent(title="Pydantic AI", file="pydantic_ai_openai.py", packages=("pydantic-ai-slim[openai]",)),
    Agent(title="Pydantic AI, Bedrock", file="pydantic_ai_bedrock.py", packages=("pydantic-ai-slim[bedrock]",)),
    Agent(title="Pydantic AI, typed output", file="pydantic_ai_output.py", packages=("pydantic-ai-slim[openai]",)),
    Agent(title="smolagents", file="smolagents_tools.py", packages=("smolagents[openai]",)),
    Agent(title="Agno", file="agno_agent.py", packages=("agno", "openai")),
    Agent(title="CrewAI", file="crewai_crew.py", packages=("crewai",)),
    Agent(title="Google ADK", file="google_adk.py", packages=("google-adk",)),
    Agent(title="AI SDK", file="ai_sdk.mjs", packages=("ai", "@ai-sdk/openai", "zod")),
    Agent(title="Mastra", file="mastra.mjs", packages=("@mastra/core", "@ai-sdk/openai", "zod")),
)
_APIS = {"chat": "chat", "responses": "Responses", "anthropic": "Messages", "gemini": "Gemini", "bedrock": "Bedrock"}


# -- the model


class Model:
    """Adds, multiplies, and answers. It thinks, and says a word beside each call. Calls without the tools get a short text."""

    def __init__(self) -> None:
        self.renderer = Renderer.from_path(BUILT_IN)
        self.steps = 0

    def decide(self, seen: Seen) -> dict[str, Any]:
        prompt = self.renderer.decode(seen.prompt_ids)
        names = [re.search(rf'"name": "([\w.-]*{name})"', prompt) for name in ("add", "multiply")]
        if not all(names):
            text = "Note"
        else:
            text = "<think>\nOne step at a time.\n</think>\n\n" + self._next(
                [found[1] for found in names if found], prompt
            )
            self.steps += 1
        return {"token_ids": [*self.renderer.encode(text), min(self.renderer.stop_token_ids)], "finish_reason": "stop"}

    def _next(self, names: list[str], prompt: str) -> str:
        if self.steps < 2:
            arguments = {"x": (2, 5)[self.steps], "y": (3, 7)[self.steps]}
            return f"Step {self.steps + 1}.\n" + _call(names[self.steps], arguments)
        if '"name": "final_' in prompt:  # the tools with which some frameworks let a model end
            name, member = ("final_answer", "answer") if '"final_answer"' in prompt else ("final_result", "value")
            return _call(name, {member: 35})
        return "The result is 35."


def _call(name: str, arguments: dict[str, Any]) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


# -- one agent


def install(agent: Agent) -> tuple[list[str], str]:
    """Install an agent's packages. Returns the start of its command, and the version of the first package.

    Raises: subprocess.SubprocessError.
    """
    folder = ROOT / ".venvs" / f"agents-{agent.file.replace('.', '-').replace('_', '-')}"
    name = agent.packages[0].partition("[")[0]
    if agent.file.endswith(".py"):
        python = folder / "bin" / "python"
        uv = [sys.executable, "-m", "uv"]
        if not python.exists():
            _quietly([*uv, "venv", "-q", "-p", sys.executable, str(folder)])
        _quietly([*uv, "pip", "install", "-q", "--upgrade", "--python", str(python), *agent.packages])
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        version = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        return [str(python), "-W", "ignore"], version
    folder.mkdir(parents=True, exist_ok=True)
    packages = [f"{package}@latest" for package in agent.packages]
    _quietly(["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), *packages])
    version = json.loads((folder / "node_modules" / name / "package.json").read_text())["version"]
    return ["node"], version


def _quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)


def environment(session: SessionHandle, home: Path) -> dict[str, str]:
    """The variables that lead an agent to its session: those of the providers' own clients."""
    bedrock = f"{session.base_url}/bedrock/{session.api_key}"
    return {
        **{"PATH": os.environ["PATH"], "HOME": str(home), "TASK": TASK},
        **{"OPENAI_BASE_URL": session.base_url, "OPENAI_API_BASE": session.base_url, "OPENAI_API_KEY": session.api_key},
        **{"GOOGLE_GEMINI_BASE_URL": session.base_url, "GOOGLE_API_KEY": session.api_key},
        **{"AWS_ENDPOINT_URL_BEDROCK_RUNTIME": bedrock, "AWS_REGION": "us-west-2", "AWS_DEFAULT_REGION": "us-west-2"},
        **{"AWS_ACCESS_KEY_ID": "agent", "AWS_SECRET_ACCESS_KEY": "unused"},
        # What these libraries would send elsewhere (traces, prices, usage), off.
        **{
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LANGSMITH_TRACING": "false",
            "DO_NOT_TRACK": "1",
            "MASTRA_TELEMETRY_DISABLED": "1",
        },
        **{"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"},
        **{"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"},
    }


async def run(agent: Agent, command: list[str], *, forced_tools: Any) -> tuple[str, SessionCapture]:
    """Run an agent. Returns the end of its output, and its session. Raises: TimeoutError."""
    model = Model()
    folder = ROOT / ".venvs" / "agents-home"
    folder.mkdir(parents=True, exist_ok=True)
    async with ScriptedEngine(decide=model.decide) as engine:
        upstreams = (UpstreamConfig(url=engine.url),)
        gateway = Gateway(GatewayConfig(upstreams=upstreams, model_dir=str(BUILT_IN), forced_tools=forced_tools))
        await gateway.start()
        try:
            client = GatewayClient(gateway.url)
            [session] = await client.create_sessions_async([new_session_id()])
            file = ROOT / "scripts" / "agents" / agent.file
            if agent.file.endswith(".mjs"):  # node looks for packages next to the file
                copy = ROOT / ".venvs" / f"agents-{agent.file.replace('.', '-').replace('_', '-')}" / agent.file
                copy.write_text(file.read_text())
                file = copy
            process = await asyncio.create_subprocess_exec(
                *(*command, str(file)),
                env=environment(session, folder),
                cwd=folder,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(), RUN_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise
            text = out.decode() if process.returncode == 0 else f"{FAILED}\n{out.decode()}{err.decode()}"
            capture = (await client.fetch_async([session.session_id]))[session.session_id]
            return text if text.startswith(FAILED) else text.strip()[-500:], capture
        finally:
            await gateway.stop(grace_s=0.2)


# -- the table


def changes(capture: SessionCapture) -> str:
    """What the agent's last request has in place of the sampled answers, and what the gateway counted."""
    found: Counter[str] = Counter()
    shown = capture.records[0].dialect in ("chat", "responses")  # elsewhere a reply has thinking only on request
    sampled = [json.loads(record.choices[0].message) for record in capture.records if record.choices]
    answers = [message for message in capture.dialogue if message.get("role") == "assistant"][:-1]
    for ours, theirs in zip(sampled, answers, strict=False):
        if shown and ours.get("reasoning_content") and not theirs.get("reasoning_content"):
            found["thinking dropped"] += 1
        if (ours.get("content") or "").strip() != (theirs.get("content") or "").strip():
            found["text dropped" if not theirs.get("content") else "text changed"] += 1
        pairs = [[call["function"] for call in message.get("tool_calls") or ()] for message in (ours, theirs)]
        if pairs[0] != pairs[1]:
            found["arguments rewritten"] += 1
    report = build_trajectory(capture.session_id, capture.turns).report
    found.update({f"{kind} left out": count for kind, count in report.left_out.items()})
    return ", ".join(found) or "nothing"


def row(agent: Agent, version: str, text: str, capture: SessionCapture, wish: SessionCapture | None) -> str:
    report = build_trajectory(capture.session_id, capture.turns).report
    package = agent.packages[0].partition("[")[0]
    apis = sorted({_APIS.get(record.dialect, record.dialect) for record in capture.records})
    share, sequences = f"{report.trained_token_share or 0:.0%}", str(report.sequences)
    if wish is not None:
        wished = build_trajectory(wish.session_id, wish.turns).report
        share += f" (`wish`: {wished.trained_token_share or 0:.0%})"
        sequences += f" (`wish`: {wished.sequences})"
    done = not text.startswith(FAILED) and "35" in text and len(capture.turns) > 2
    works = "no" if not done or capture.errors else f"with {agent.change}" if agent.change else "yes"
    cells = [agent.title, f"`{package}` {version}", ", ".join(apis), works, sequences, share]
    return f"| {' | '.join([*cells, str(report.side_call_tokens), changes(capture)])} |"


def row_of(agent: Agent) -> tuple[str, str]:
    """The agent's row, and the cause if it does not run."""
    try:
        command, version = install(agent)
    except (subprocess.SubprocessError, OSError) as e:
        why = str(getattr(e, "stderr", "") or e).strip().splitlines()[-1:] or ["no reason"]
        return f"| {agent.title} | `{agent.packages[0]}` | - | did not install | - | - | - | - |", why[0]
    try:
        text, capture = asyncio.run(run(agent, command, forced_tools="constrain"))
        held = any(turn.untrainable_reason == "held_to_a_form" or turn.free_tokens for turn in capture.turns)
        wish = asyncio.run(run(agent, command, forced_tools="wish"))[1] if held else None
    except TimeoutError:
        return f"| {agent.title} | `{agent.packages[0]}` {version} | - | no | - | - | - | - |", f"no end in {RUN_S} s"
    shown = row(agent, version, text, capture, wish)
    return shown, "" if "| no |" not in shown else f"{text}\n{capture.errors}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files of scripts/agents")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/agents.md")
    asked = parser.parse_args()
    lines, failed = [HEAD, "|---" * 8 + "|"], 0
    print("\n".join(lines))
    for agent in AGENTS:
        if asked.names and agent.file not in asked.names:
            continue
        line, why = row_of(agent)
        lines.append(line)
        print(line, flush=True)
        if why:
            failed += 1
            print(f"{agent.file}: {why}", file=sys.stderr, flush=True)
    if asked.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", "utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
