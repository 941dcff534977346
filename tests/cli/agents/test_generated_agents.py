"""Agents that AWS's own command line generates, rendered from its npm package, unmodified but for an MCP server's address."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import serving

from ...conftest import MakeEnvironment

pytestmark = [pytest.mark.nightly, pytest.mark.system, pytest.mark.timeout(1800)]
COMMAND = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit.cli"]
PUBLIC_SERVER = "https://mcp.exa.ai/mcp"
SCORE = """
from agentcore_rl_toolkit import answer_text

def score(payload, answer, reference, trajectory):
    users = [m for m in trajectory if m["role"] == "user"]
    assert len(users) == 1, f"the history of another rollout: {users}"
    return {"reward": float(reference in answer_text(answer)), "text": float(bool(answer_text(answer)))}
"""
MCP = """
import json, os, sys
from mcp.server.fastmcp import FastMCP
import socket

server = FastMCP("local", stateless_http=True)

@server.tool()
def search(query: str) -> str:
    '''Find text.'''
    return "nothing found"

import uvicorn
listener = socket.socket(); listener.bind(("127.0.0.1", 0))
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(options["--ready-file"] + ".new", "w") as ready:
    json.dump({"url": f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", "pid": os.getpid()}, ready)
os.rename(options["--ready-file"] + ".new", options["--ready-file"])
uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning")).run(sockets=[listener])
"""
BEDROCK = {"modelProvider": "Bedrock", "name": "Generated"}
OPENAI = {
    "modelProvider": "OpenAI",
    "name": "Generated",
    "identityProviders": [{"name": "key", "envVarName": "AGENTCORE_CREDENTIAL_KEY"}],
}
MANTLE = {**BEDROCK, "bedrockMantle": True, "modelId": "openai.gpt-oss-120b"}
CASES = {
    "strands-bedrock": ("strands", BEDROCK),
    "strands-mantle-chat": ("strands", {**MANTLE, "mantleApiFormat": "chat_completions"}),
    "strands-mantle-responses": ("strands", {**MANTLE, "mantleApiFormat": "responses", "mantleProprietary": True}),
    "strands-openai": ("strands", OPENAI),
    "langgraph-bedrock": ("langchain_langgraph", BEDROCK),
    "openai-agents": ("openaiagents", OPENAI),
    "google-adk": ("googleadk", {**OPENAI, "modelProvider": "Gemini"}),
    "autogen": ("autogen", OPENAI),
}
# Dependencies that a user has to bound today: AutoGen's packages no longer fit the newest `mcp`, and the registry has
# no version of `bedrock-agentcore` in the range of the TypeScript template with Strands.
BOUNDS = {
    "python/http/autogen": [("pyproject.toml", '"tiktoken",', '"tiktoken", "mcp<2",')],
    "typescript/http/strands": [("package.json", '"bedrock-agentcore": "^0.3.0"', '"bedrock-agentcore": "^0.4.0"')],
}
TYPESCRIPT = ("vercelai", "strands")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the templates, and handlebars beside it."""
    folder = tmp_path_factory.mktemp("npm")
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm and node render the templates")
    for name in ("@aws/agentcore@0.30.0", "handlebars@4.7"):
        words = ["npm", "pack", name, "--silent"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"npm has no {name}: {done.stderr[-300:]}")
        target = folder / name.partition("@")[0] if name.startswith("h") else folder / "agentcore"
        target.mkdir()
        subprocess.run(["tar", "xzf", done.stdout.split()[-1], "-C", str(target)], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def mcp_server(tmp_path_factory: pytest.TempPathFactory, make_environment: MakeEnvironment) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "server.py").write_text(textwrap.dedent(MCP))
    python = make_environment("mcp", "mcp>=1.24,<2", "uvicorn")
    with serving(folder, program=(python, str(folder / "server.py"))) as ready:
        yield ready["url"]


@pytest.mark.parametrize("case", CASES)
def test_a_generated_agent_is_evaluated_and_trained(case: str, package: Path, mcp_server: str, tmp_path: Path) -> None:
    framework, context = CASES[case]
    agent = tmp_path / "app" / "Generated"
    generate(package, f"python/http/{framework}", context, agent, mcp_server)
    runtime = {"name": "Generated", "entrypoint": "main.py", "codeLocation": "app/Generated/"}
    config = {"runtimes": [runtime], "credentials": [{"name": "key"}]}
    (tmp_path / "agentcore").mkdir()
    (tmp_path / "agentcore" / "agentcore.json").write_text(json.dumps(config))
    train(tmp_path, "Generated")


@pytest.mark.parametrize("framework", TYPESCRIPT)
def test_a_generated_agent_in_typescript_is_a_program(
    framework: str, package: Path, mcp_server: str, tmp_path: Path
) -> None:
    generate(package, f"typescript/http/{framework}", OPENAI, tmp_path, mcp_server)
    install(tmp_path)
    program = "from agentcore_rl_toolkit import Program\n\n"
    (tmp_path / "program.py").write_text(program + 'app = Program("node", "--import", "tsx", "main.ts")\n')
    train(
        tmp_path, "program.py", "--session-env", "LOCAL_DEV=1", "--session-env", "AGENTCORE_CREDENTIAL_KEY=placeholder"
    )


def generate(package: Path, template: str, context: dict[str, Any], into: Path, mcp_server: str) -> None:
    """Render a template, and replace the address of its MCP server and the dependencies that cannot be installed."""
    render(package, template, context, into)
    for client in into.glob("mcp_client/client.*"):
        assert PUBLIC_SERVER in client.read_text()
        client.write_text(client.read_text().replace(PUBLIC_SERVER, mcp_server))
    for name, wanted, bounded in BOUNDS.get(template, ()):
        assert wanted in (into / name).read_text()
        (into / name).write_text((into / name).read_text().replace(wanted, bounded))


def install(folder: Path) -> None:
    """Install the packages of a TypeScript agent."""
    words = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"npm cannot install its packages: {done.stderr[-300:]}")


def render(package: Path, template: str, context: dict[str, Any], into: Path) -> None:
    """Render a template of the package, as AWS's command line does."""
    words = [str(Path(__file__).with_name("render.cjs")), str(package / "handlebars/package/dist/cjs/handlebars.js")]
    source = package / "agentcore/package/dist/assets" / template / "base"
    subprocess.run(["node", *words, str(source), str(into), json.dumps(context)], check=True)


def train(folder: Path, agent: str, *options: str) -> None:
    """Evaluate an agent on four rows, and train it for three steps."""
    (folder / "score.py").write_text(SCORE)
    rows = [{"prompt": f"The shop has {n} lamps and sells 1.", "_reference": str(n - 1)} for n in range(20, 28)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = ("--agent", agent, *options, "--data", "rows.jsonl", "--score", "score.py")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=900)

    done = run("eval", *shared, "--limit", "4", "--sampling-params", '{"max_tokens": 64}')
    # ADK raises for a tool that does not exist, and the built-in policy may call one.
    made_up = "agent_error: ValueError: Tool " in done.stderr
    assert done.returncode == 0 or made_up, done.stderr + done.stdout
    size = ("--steps", "3", "--groups", "2", "--rollouts", "2", "--set", 'sampling_params={"max_tokens": 64}')
    trained = run("train", *shared, *size, "--set", "replace_up_to=1", "--json")
    assert trained.returncode == 0, trained.stderr
    summary = json.loads(trained.stdout)
    assert summary["lost_rollouts"] == 0 or made_up
    assert summary["rollouts"] >= 12
