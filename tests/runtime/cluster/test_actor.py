"""The actor of a node, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import AS_IS
from agentcore_rl_toolkit.errors import AgentLoadError
from agentcore_rl_toolkit.runtime.agents import environments
from agentcore_rl_toolkit.runtime.agents.agent import Agent
from agentcore_rl_toolkit.runtime.cluster.actor import NodeActor
from agentcore_rl_toolkit.runtime.cluster.bundle import pack_project
from agentcore_rl_toolkit.runtime.config import IsolationConfig, RuntimeConfig

UV = """#!/bin/sh
echo "$@" >> {notes}
[ "$1" != venv ] || {{ mkdir -p "$5/bin"; touch "$5/bin/python"; }}
"""


async def test_an_unmodified_agent_gets_the_toolkit_in_its_environment_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCORE_RL_CACHE", str(tmp_path / "cache"))
    uv, notes = tmp_path / "uv", tmp_path / "notes"
    uv.write_text(UV.format(notes=notes))
    uv.chmod(0o755)
    monkeypatch.setattr(environments, "find_uv", lambda: str(uv))
    script = tmp_path / "agent" / "agent.py"
    script.parent.mkdir()
    script.touch()
    (script.parent / "requirements.txt").write_text("click>=8\n")
    actor = NodeActor()
    await actor.start(RuntimeConfig(isolation=IsolationConfig(tier="none")), "127.0.0.1")
    try:
        agent = Agent(
            runtime_id="a-1", version=1, name="a", script=script, fields={"environmentVariables": {AS_IS: "1"}}
        )
        with pytest.raises(AgentLoadError, match="cannot run"):  # this environment is empty
            await actor.prepare(agent, *pack_project(script))
        assert "agentcore-rl-toolkit @ file://" in notes.read_text()
    finally:
        actor._server.close()
        await actor.close()
