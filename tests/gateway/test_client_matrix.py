"""Agents of other frameworks, in an environment of their own, against a gateway process: only their base URL is ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import ScriptedEngine

from .served import Served

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(800),
]  # the first test may have to install the frameworks

SCRIPTS = Path(__file__).parent / "clients"
# By the scripts that use them.
REQUIREMENTS = {
    "with_langgraph.py": ("langchain-openai>=1", "langgraph>=1"),
    "with_openai_agents.py": ("openai-agents>=0.6",),
    "with_litellm.py": ("litellm>=1.80",),
    "with_google_adk.py": ("google-adk>=1.20",),
    "with_langchain_aws.py": ("langchain-aws>=1", "langchain>=1"),
    "with_pydantic_ai.py": ("pydantic-ai-slim[bedrock]>=2",),
}
ALWAYS_STREAM = {"with_pydantic_ai.py"}  # it asks Bedrock for streams, and joins them
CLIENT_LIMIT_S = 90

# What each of these libraries would send elsewhere (traces, prices, usage), off.
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture
async def url(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[str]:
    """A gateway process over the scripted engine."""
    served = Served(tmp_path, engine)
    yield await served.start()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0, served.errors.read_text()


@pytest.fixture
async def elsewhere() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A proxy that serves nothing and remembers who wanted to leave this machine."""
    wanted: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted.append(await reader.readline())
        writer.transport.abort()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", wanted
    server.close()
    await server.wait_closed()


def call(name: str, x: int, y: int) -> dict[str, object]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": json.dumps({"x": x, "y": y})}}


@pytest.mark.parametrize(
    ("script", "dialects"),
    [
        ("with_langgraph.py", ["chat", "responses"]),
        ("with_openai_agents.py", ["chat", "responses"]),
        pytest.param("with_litellm.py", ["chat", "anthropic"], marks=pytest.mark.nightly),
        pytest.param("with_google_adk.py", ["gemini"], marks=pytest.mark.nightly),
        pytest.param("with_langchain_aws.py", ["bedrock"], marks=pytest.mark.nightly),
        pytest.param("with_pydantic_ai.py", ["bedrock"], marks=pytest.mark.nightly),
    ],
)
async def test_agents_use_tools_and_each_session_is_one_sequence(
    engine: ScriptedEngine,
    make_environment: Callable[..., str],
    url: str,
    elsewhere: tuple[str, list[bytes]],
    tmp_path: Path,
    script: str,
    dialects: list[str],
) -> None:
    python = make_environment(script.removesuffix(".py").replace("_", "-"), *REQUIREMENTS[script], limit_s=300)
    client = GatewayClient(url)
    # One process for all cases: importing these libraries costs more than running them.
    cases = [(dialect, mode) for dialect in dialects for mode in ("whole", "stream")]
    sessions = await client.create_sessions_async([new_session_id() for _ in cases])
    for _ in cases:
        calls = [call("call_1", 2, 3), call("call_2", 4, 5)]
        first = {"content": None, "tool_calls": calls, "reasoning_content": "two sums"}
        engine.replies.extend([first, {"content": "w5 w9"}])
    asked = [(s.base_url, s.api_key, *case) for s, case in zip(sessions, cases, strict=True)]
    proxy, wanted = elsewhere
    proxies = {f"{name}_PROXY": proxy for name in ("HTTP", "HTTPS", "ALL")} | {"NO_PROXY": "127.0.0.1"}
    proxies |= {name.lower(): value for name, value in proxies.items()}
    process = await asyncio.create_subprocess_exec(
        *(python, "-W", "ignore", str(SCRIPTS / script), json.dumps(asked)),
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **proxies, **QUIET},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), CLIENT_LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, err.decode()[-4000:]
    reply = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    assert [(t["text"], t["added"]) for t in reply] == [("w5 w9", [[2, 3], [4, 5]])] * len(cases)
    assert [t["pieces"] > 4 for t in reply] == [mode == "stream" for _, mode in cases]
    streams = [m == "stream" or script in ALWAYS_STREAM for _, m in cases for _ in "12"]
    assert [bool(seen.body.get("stream")) for seen in engine.calls] == streams

    captures = await client.fetch_async([session.session_id for session in sessions])
    for i, session in enumerate(sessions):
        capture = captures[session.session_id]
        assert capture.errors == []
        sampled = [seen.completion_ids[0] for seen in engine.calls[2 * i : 2 * i + 2]]
        assert [turn.completion_ids for turn in capture.turns] == sampled
        assert [turn.parse_status for turn in capture.turns] == ["parsed", "none"]
        if cases[i][0] == "responses":
            assert engine.calls[2 * i + 1].body["messages"][2]["reasoning_content"] == "two sums", cases[i]
        roles = [message["role"] for message in capture.dialogue]
        assert roles[-5:] == ["user", "assistant", "tool", "tool", "assistant"]
        trajectory = build_trajectory(session.session_id, capture.turns)
        assert len(trajectory.sequences) == 1, cases[i]
        assert trajectory.report.trained_token_share == 1.0
    assert wanted == []
