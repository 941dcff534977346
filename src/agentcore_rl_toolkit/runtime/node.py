"""Where session processes run. A node starts them and says when they end; the runtime decides when.

One machine has one `LocalNode`. Everything above it speaks to the small `Node` protocol only, so that a router can place sessions
on other machines' nodes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import AgentLoadError
from .agents import Agent, runtime_arn
from .config import RuntimeConfig
from .launcher.handle import SessionProcess, TemplateProcess, TemplateSpec

# What sessions see of the runtime's own environment: nothing else is inherited.
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class SessionOrder:
    """A session to start. ``session_id`` is unique per start on its node, not the caller's id."""

    agent: Agent
    session_id: str
    directory: Path
    log_path: Path
    socket_path: str


class Node(Protocol):
    """Starts sessions. The returned process has ``started`` and ``ended`` futures, ``pid`` and ``stop(grace_s)``."""

    async def prepare(self, agent: Agent) -> None: ...

    async def start_session(self, order: SessionOrder) -> SessionProcess: ...

    async def close(self) -> None: ...


class LocalNode:
    """Runs sessions on this machine, forked from one template process per agent version."""

    def __init__(self, config: RuntimeConfig, *, state_dir: Path, extra_env: Mapping[str, str]) -> None:
        self._config = config
        self._state_dir = state_dir
        self._extra_env = extra_env
        self._templates: dict[tuple[str, int], TemplateProcess] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}

    async def prepare(self, agent: Agent) -> None:
        """Load the agent's template. Raises: AgentLoadError with its traceback."""
        await self._template(agent)

    async def start_session(self, order: SessionOrder) -> SessionProcess:
        """Fork a session. Raises: AgentLoadError, LocalRuntimeError."""
        template = await self._template(order.agent)
        order.log_path.parent.mkdir(parents=True, exist_ok=True)
        return template.spawn(order.session_id, order.socket_path, order.directory, order.log_path, {})

    def modes(self) -> dict[str, dict[str, str | None]]:
        """How each loaded agent starts its sessions, and why not by fork."""
        return {
            f"{runtime_id}:{version}": {"start": t.mode, "reason": t.reason}
            for (runtime_id, version), t in self._templates.items()
        }

    async def forget(self, agent: Agent) -> None:
        """End an agent version's template and with it its sessions."""
        template = self._templates.pop((agent.runtime_id, agent.version), None)
        if template is not None:
            await template.close()

    async def close(self) -> None:
        await asyncio.gather(*(t.close() for t in self._templates.values()))

    async def _template(self, agent: Agent) -> TemplateProcess:
        key = (agent.runtime_id, agent.version)
        template = self._templates.get(key)
        if template is not None and template.alive:
            return template
        async with self._locks.setdefault(key, asyncio.Lock()):
            template = self._templates.get(key)
            if template is None or not template.alive:
                template = await self._load(agent)
                self._templates[key] = template
        return template

    async def _load(self, agent: Agent) -> TemplateProcess:
        log = self._state_dir / "logs" / f"{agent.name}.template.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        home = self._state_dir / "home" / agent.name
        home.mkdir(parents=True, exist_ok=True)
        template = TemplateProcess(
            TemplateSpec(
                script=agent.script,
                python=agent.python,
                env={**self.environment(agent), "HOME": str(home)},
                mode=self._config.start_mode,
                strict_snapshot=self._config.strict_snapshot,
                log_path=log,
            )
        )
        try:
            await template.start()
        except AgentLoadError as e:
            raise AgentLoadError(f"agent {agent.name}: {e}") from e
        return template

    def environment(self, agent: Agent) -> dict[str, str]:
        """Everything an agent's process sees: a few inherited names, what AWS sets, then what the user set."""
        arn = runtime_arn(self._config.region, self._config.account_id, agent.runtime_id)
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env |= {
            "AWS_REGION": self._config.region,
            "AWS_DEFAULT_REGION": self._config.region,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_EC2_METADATA_DISABLED": "true",
            "OTEL_RESOURCE_ATTRIBUTES": f"cloud.resource_id={arn}",
            "PYTHONUNBUFFERED": "1",
            "AGENTCORE_RL_RUNTIME": str(self._state_dir),
        }
        return {**env, **self._extra_env, **self._config.session_env, **agent.env}
