"""Sessions of this machine: forked from a warm template, or one container each."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import AgentLoadError
from ..isolation import hints, sandbox
from ..isolation.cover import Cover
from ..isolation.project import Project
from ..isolation.sandbox import choose_tier
from .agents.agent import Agent, runtime_arn
from .config import RuntimeConfig
from .containers.node import ContainerNode
from .launcher.handle import TemplateProcess, TemplateSpec
from .sessions.session import INHERITED, Session

log = logging.getLogger(__name__)

# OpenBLAS, and so numpy, starts its threads when it is imported; a process that has threads cannot be forked.
UNTHREADED = {"OPENBLAS_NUM_THREADS": "1"}
PACKAGE = Path(__file__).resolve().parents[1]


class LocalNode:
    """Runs sessions on this machine, forked from one template process per agent version."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        state_dir: Path,
        sessions: Path,
        root: Path,
    ) -> None:
        self._config = config
        self._state_dir = state_dir
        self._sessions = sessions  # the folder of theirs
        self._root = root
        config.isolation.hidden.add(state_dir)
        self._templates: dict[tuple[str, int], TemplateProcess] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._container_node: ContainerNode | None = None
        self.tier = ""

    async def start(self) -> None:
        """Choose the isolation tier. Raises: ConfigError when the one asked for is not usable here."""
        self.tier, why = await asyncio.to_thread(choose_tier, self._config.isolation.tier)
        if why is not None:
            log.warning("sessions have no sandbox, nothing keeps them from this user's files: %s", why)
        if self.tier == "container":
            await self._containers().open()

    @property
    def writable(self) -> tuple[Path, ...] | None:
        """The folders of this machine that sessions can write to besides their own; None: all that this user can."""
        return None if self.tier == "none" else self._config.isolation.writable_folders

    async def prepare(self, agent: Agent) -> None:
        """Load the agent's template, or see to its image. Raises: AgentLoadError with its traceback."""
        if self._in_container(agent):
            await self._containers().prepare(agent)
        else:
            await self._template(agent)

    async def spawn(self, session: Session) -> Any:
        """Fork a session, or start a container. Raises: AgentLoadError, LocalRuntimeError."""
        for path in (session.log_path, session.directory, Path(session.socket_path)):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._in_container(session.agent):
            return await self._containers().spawn(session)
        template = await self._template(session.agent)
        return template.spawn(session.name, session.socket_path, session.directory, session.log_path)

    def describe(self) -> list[dict[str, Any]]:
        """The loaded agents: how they start their sessions, and why not by fork."""
        containers = self._container_node.describe() if self._container_node is not None else []
        return containers + [
            {
                "runtime_id": runtime_id,
                "version": version,
                "start": t.mode,
                "reason": t.reason,
                "pid": t.pid,
                "no_view": t.no_view,
                "sessions": len(t.sessions),
            }
            for (runtime_id, version), t in self._templates.items()
        ]

    async def forget(self, agent: Agent) -> None:
        """End an agent version's template and with it its sessions."""
        if self._in_container(agent):
            await self._containers().forget(agent)
            return
        key = (agent.runtime_id, agent.version)
        async with self._locks.setdefault(key, asyncio.Lock()):  # one that is being loaded is waited for, not missed
            template = self._templates.pop(key, None)
            if template is not None:
                await template.close()

    async def forget_if_unused(self, agent: Agent) -> None:
        """End the template of a version that has no sessions; should one be asked for again, it is loaded again."""
        template = self._templates.get((agent.runtime_id, agent.version))
        if template is not None and not template.sessions:
            await self.forget(agent)

    async def close(self) -> None:
        """End every template and container."""
        await asyncio.gather(*(t.close() for t in self._templates.values()))
        if self._container_node is not None:
            await self._container_node.close()

    def _in_container(self, agent: Agent) -> bool:
        return agent.image is not None or self.tier == "container"

    def _containers(self) -> ContainerNode:
        if self._container_node is None:
            self._container_node = ContainerNode(self._config.isolation, root=self._root, environment=self.environment)
        return self._container_node

    async def _template(self, agent: Agent) -> TemplateProcess:
        key = (agent.runtime_id, agent.version)
        template = self._templates.get(key)
        if template is not None and template.alive:
            return template
        async with self._locks.setdefault(key, asyncio.Lock()):
            template = self._templates.get(key)
            if template is None or not template.alive:
                if template is not None:
                    await template.close()
                template = await self._load(agent)
                self._templates[key] = template
        return template

    async def _load(self, agent: Agent) -> TemplateProcess:
        log_path = self._state_dir / "logs" / f"{agent.name}.template.log"
        home = self._root / "home" / agent.name
        own = (
            home,
            self._sessions / agent.folder,
            self._state_dir / "logs" / agent.name,
            self._root / "s" / agent.folder,
        )
        for folder in own:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = {**UNTHREADED, **self.environment(agent), "HOME": str(home), "TMPDIR": str(home)}
        prefix: list[str] = []
        project: Path | None = None
        isolation = self._config.isolation
        if self.tier == "process":
            top = sandbox.project_of(agent.script)
            own_folder = Project.of(agent.script).folder  # the checkout around it stays read-only
            project = (own_folder if own_folder.is_relative_to(top) else top) if top.is_dir() else None
            for folder in isolation.writable_folders:
                folder.mkdir(parents=True, exist_ok=True)
            paths = await asyncio.to_thread(sandbox.interpreter_paths, agent.python)
            readable = (*paths, PACKAGE, top, *isolation.readable)
            writable = (*own, *isolation.writable_folders)
            shown = (*map(Path, sandbox.SYSTEM), *readable)
            cover = await asyncio.to_thread(Cover, agent.script, shown, writable, isolation.hidden, root=self._root)
            prefix = sandbox.command(readable, writable, cover.mounts)
            env[hints.VARIABLE] = hints.describe(
                [*sandbox.SYSTEM, *map(str, readable)], [*map(str, isolation.writable_folders)], project=str(top)
            )
        template = TemplateProcess(
            TemplateSpec(
                script=agent.script,
                python=agent.python,
                env=env,
                mode=self._config.start_mode,
                sandbox=prefix,
                memory_bytes=isolation.memory_bytes,
                log_path=log_path,
                project=project,
                copied=[*map(str, isolation.copied)],
            )
        )
        try:
            await template.start()
        except AgentLoadError as e:
            raise AgentLoadError(f"agent {agent.name}: {e}") from e
        if template.mode == "exec" and template.reason is not None:
            log.warning("agent %s: every session loads it anew, which is slow: %s", agent.name, template.reason)
        if template.no_view is not None:
            log.warning(
                "agent %s: its project is read-only in sessions, because the kernel allows no view for each (%s); "
                "--copy PATH gives each session a copy of a path",
                agent.name,
                template.no_view,
            )
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
            "AGENTCORE_RL_ROLLOUTS": "on",
        }
        if sys.platform == "darwin":
            env["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"  # else a forked child that uses Foundation is killed
        return {**env, **self._config.session_env, **agent.env}
