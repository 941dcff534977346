"""Sessions that are containers: one per session, of an agent's image, or of the machine's own files for an agent given by path.

A container is created, started, and reached through a port that is published on 127.0.0.1; the session table asks its server
until it is healthy. Every container carries this runtime's root folder as a label, by which the next runtime removes what a
killed one left behind, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import AgentLoadError, ConfigError, LocalRuntimeError, MissingExtraError
from ...isolation.cover import Cover
from ..agents.agent import Agent
from ..config import IsolationConfig
from ..sessions.session import INHERITED, Session
from . import host_files
from .client import ContainerEngine, fetch
from .process import AGENT_PORT, ContainerProcess

log = logging.getLogger(__name__)

RUNTIME_LABEL, MACHINE_LABEL = "agentcore-rl.runtime", "agentcore-rl.machine"
DOCKER_HOST_NAME = "host.docker.internal"  # this machine, as seen from a container


class ContainerNode:
    """Starts container sessions on this machine. The engine is looked for when the first agent needs it.

    ``environment`` gives an agent's variables.
    """

    def __init__(self, config: IsolationConfig, *, root: Path, environment: Callable[[Agent], dict[str, str]]) -> None:
        self._config = config
        self._root = root
        self._environment = environment
        self._covers: dict[tuple[str, int], Cover] = {}
        self._engine: ContainerEngine | None = None
        self._opening = asyncio.Lock()
        self._images: dict[tuple[str, int], str] = {}
        self._running: set[ContainerProcess] = set()

    @property
    def engine(self) -> ContainerEngine:
        if self._engine is None:
            raise LocalRuntimeError("no container engine was opened yet")
        return self._engine

    async def open(self) -> None:
        """Find the engine, and remove containers of this user's runtimes that are gone. Raises: ConfigError, EngineError."""
        async with self._opening:
            if self._engine is not None:
                return
            engine = ContainerEngine()
            try:
                await engine.start()
                if engine.name == "podman" and self._config.container_runtime is not None:
                    raise ConfigError(
                        "Podman takes its runtime from containers.conf ([engine], runtime), not from --runtime"
                    )
                await self._sweep(engine)
            except BaseException:
                await engine.close()
                raise
            self._engine = engine

    async def _sweep(self, engine: ContainerEngine) -> None:
        for found in await engine.with_labels([f"{MACHINE_LABEL}={_machine()}"]):
            root = Path(found["Labels"].get(RUNTIME_LABEL, ""))
            if root.parent == self._root.parent and not await asyncio.to_thread(root.exists):
                log.info("removing container %s of a runtime that is gone", found.id[:12])
                await engine.remove(found.id)

    async def prepare(self, agent: Agent) -> None:
        """See to the agent's image. Raises: AgentLoadError with the reason."""
        try:
            await self.open()
            if agent.image is not None:
                found = await fetch(self.engine, agent.image)
            else:
                found = await host_files.prepare(self.engine)
        except (ConfigError, LocalRuntimeError, MissingExtraError) as e:
            raise AgentLoadError(f"agent {agent.name}: {e}") from e
        self._images[agent.runtime_id, agent.version] = found

    async def spawn(self, session: Session) -> ContainerProcess:
        """Start a container. Raises: AgentLoadError."""
        key = (session.agent.runtime_id, session.agent.version)
        if key not in self._images:
            await self.prepare(session.agent)
        settings = await asyncio.to_thread(self._settings, session, self._images[key])
        process = ContainerProcess(self.engine, session, settings, f"agentcore-rl-{self._root.name}-{session.name}")
        self._running.add(process)
        process.ended.add_done_callback(lambda _: self._running.discard(process))
        return process

    def describe(self) -> list[dict[str, Any]]:
        """The agents whose images are here, in the form of templates."""
        return [
            {
                "runtime_id": runtime_id,
                "version": version,
                "start": "container",
                "reason": f"{self.engine}, image {image}",
                "pid": None,
                "sessions": sum(p.agent_key == (runtime_id, version) for p in self._running),
            }
            for (runtime_id, version), image in self._images.items()
        ]

    async def forget(self, agent: Agent) -> None:
        """End its sessions."""
        self._images.pop((agent.runtime_id, agent.version), None)
        await self._end([p for p in self._running if p.agent_key == (agent.runtime_id, agent.version)])

    async def close(self) -> None:
        """End every session."""
        await self._end(list(self._running))
        if self._engine is not None:
            await self._engine.close()

    async def _end(self, processes: list[ContainerProcess]) -> None:
        for process in processes:
            process.stop(0.0)
        await asyncio.gather(*(p.ended for p in processes))

    def _settings(self, session: Session, image: str) -> dict[str, Any]:
        """The configuration of a session's container, and the session's folder. Blocks."""
        agent, c = session.agent, self._config
        session.directory.mkdir(mode=0o700, parents=True)
        env = {**self._environment(agent), "DOCKER_CONTAINER": "1"}  # the SDK then listens on all addresses
        for folder in c.writable_folders:
            folder.mkdir(parents=True, exist_ok=True)
        shown = filter(Path.exists, dict.fromkeys((*c.readable, *c.writable_folders)))
        host: dict[str, Any] = {
            "NetworkMode": "bridge",
            "PortBindings": {f"{AGENT_PORT}/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]},
            "SecurityOpt": ["no-new-privileges"],
            "RestartPolicy": {"Name": "no"},
            "Mounts": [host_files.mount(p, read_only=p not in c.writable_folders) for p in shown],
        }
        if c.memory_bytes is not None:
            host |= {"Memory": c.memory_bytes, "MemorySwap": c.memory_bytes}
        if self.engine.name == "docker":  # Podman names this machine host.containers.internal itself
            host["ExtraHosts"] = [f"{DOCKER_HOST_NAME}:host-gateway"]
        if self.engine.name == "podman" and sys.platform == "linux":
            host["Ulimits"] = _own_limits()
        if c.container_runtime is not None:
            host["Runtime"] = c.container_runtime
        settings: dict[str, Any] = {
            "Image": image,
            "ExposedPorts": {f"{AGENT_PORT}/tcp": {}},
            "Labels": {RUNTIME_LABEL: str(self._root), MACHINE_LABEL: _machine()},
            "HostConfig": host,
        }
        if agent.image is None:
            if (key := (agent.runtime_id, agent.version)) not in self._covers:
                self._covers[key] = host_files.cover(agent, c, self._root)
            host_files.add(session, settings, env, self._covers[key], c.copied)
        else:
            env = {k: v for k, v in env.items() if k not in INHERITED or k in agent.env}
        settings["Env"] = [f"{k}={v}" for k, v in env.items()]
        return settings


def _own_limits() -> list[dict[str, Any]]:
    """This process's own limits: Podman's defaults may be above what can be set here without CAP_SYS_RESOURCE."""
    found = []
    most = int(Path("/proc/sys/kernel/pid_max").read_text())  # to which Podman lowers the number of processes
    for name, which, highest in (
        ("nofile", resource.RLIMIT_NOFILE, sys.maxsize),
        ("nproc", resource.RLIMIT_NPROC, most),
    ):
        soft, hard = (highest if n == resource.RLIM_INFINITY else min(n, highest) for n in resource.getrlimit(which))
        found.append({"Name": name, "Soft": soft, "Hard": hard})
    return found


def _machine() -> str:
    """Which user of which machine a container belongs to; an engine may serve several."""
    return f"{platform.node()}:{os.getuid()}"
