"""A container session whose engine does what no engine does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.agents.agent import Agent
from agentcore_rl_toolkit.runtime.containers.process import ContainerPlan, ContainerProcess
from agentcore_rl_toolkit.runtime.sessions.node import SessionOrder


class OddEngine:
    """Fails in ways of its own, also when it is to clean up."""

    name = "docker"

    async def create(self, settings: Any, name: str) -> str:
        return "c1"

    def asked(self, *, timeout_s: float | None = 1.0) -> Any:
        raise KeyError("State")

    def container(self, name: str) -> Any:
        raise KeyError("Id")

    async def remove(self, name: str) -> None:
        raise ValueError("an answer of another form")


async def test_an_engine_that_fails_in_its_own_way_ends_the_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = OddEngine()
    agent = Agent(runtime_id="a-0123456789", version=1, name="a", script=tmp_path / "a.py")
    order = SessionOrder(
        agent=agent, session_id="s", directory=tmp_path, log_path=tmp_path / "log", socket_path="s", env={}
    )
    plan = ContainerPlan(settings={"HostConfig": {}}, name="n", mark="m", publish=True, offer=None, disk_bytes=None)
    process = ContainerProcess(engine, order, plan)
    assert await asyncio.wait_for(process.ended, 30) is None
    with pytest.raises(LocalRuntimeError, match="KeyError"):
        await process.started
    assert "KeyError" in caplog.text
    assert "could not be removed: ValueError" in caplog.text
