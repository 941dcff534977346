"""A local runtime: its agents, its sessions and the folder they live in."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .agents import Agent, make_runtime_id, runtime_arn
from .config import RuntimeConfig
from .node import LocalNode
from .sessions import SessionTable
from .wire import Route, not_found, runtime_id


class Runtime:
    """Everything behind the HTTP face. Use as: ``start``, then serve, then ``close``."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.own_state = config.state_dir is None
        self.state_dir = config.state_dir or Path(tempfile.mkdtemp(prefix="agentcore-rl-runtime-"))
        self.state_dir.mkdir(parents=True, exist_ok=True)
        # Unix socket paths are limited to about 100 bytes, which a state folder of the user's choice may exceed.
        self.socket_dir = Path(tempfile.mkdtemp(prefix="acrl-"))
        for name in ("sessions", "logs"):
            (self.state_dir / name).mkdir(exist_ok=True)
        self.agents: dict[str, Agent] = {}
        self.node = LocalNode(config, state_dir=self.state_dir, extra_env={})
        self.table = SessionTable(self.node, config, state_dir=self.state_dir, socket_dir=self.socket_dir)
        self._reaper: asyncio.Task[None] | None = None

    async def start(self, agents: list[tuple[str, Path]]) -> dict[str, str]:
        """Load the agents' templates. Returns name -> ARN. Raises: AgentLoadError."""
        arns = {}
        for name, script in agents:
            identity = make_runtime_id(name, str(script))
            self.agents[identity] = Agent(runtime_id=identity, version=1, name=name, script=script)
            arns[name] = runtime_arn(self.config.region, self.config.account_id, identity)
        await asyncio.gather(*(self.node.prepare(agent) for agent in self.agents.values()))
        self._reaper = asyncio.create_task(self.table.reap(), name="session reaper")
        return arns

    def find(self, route: Route) -> Agent:
        """The agent version a request is for. Raises: WireError 400, 404."""
        identity = runtime_id(route.runtime, route.query.get("accountId"))
        agent = self.agents.get(identity)
        if agent is None:
            raise not_found(f"Agent runtime {identity}")
        if route.qualifier != "DEFAULT":
            raise not_found(f"Endpoint {route.qualifier} of agent runtime {identity}")
        return agent

    def status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "state_dir": str(self.state_dir),
            "sessions": len(self.table.sessions),
            "started": self.table.started_total,
            "ended": self.table.ended_total,
            "agents": self.node.modes(),
        }

    async def close(self) -> None:
        """End every session and template, and remove what is not to be kept."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        await self.table.close()
        await self.node.close()
        shutil.rmtree(self.socket_dir, ignore_errors=True)
        if self.own_state:
            shutil.rmtree(self.state_dir, ignore_errors=True)
