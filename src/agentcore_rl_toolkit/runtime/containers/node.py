"""Sessions that are containers: one per session, of an agent's image, or of the machine's own files for an agent given by path.

A container is created, started, and reached through a port that is published on 127.0.0.1. The session table pings its server
until it is healthy. Every container has this runtime's root folder as a label. By it, the next runtime removes the containers
of a killed one, and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ...errors import AgentLoadError, ConfigError, LocalRuntimeError, MissingExtraError
from ...isolation import hints
from ...isolation.cover import Cover
from ..agents.agent import Agent
from ..config import INHERITED, IsolationConfig
from ..launcher.place import Place
from . import host_files
from .client import ContainerEngine, EngineError
from .process import AGENT_PORT, ContainerProcess

RUNTIME_LABEL, MACHINE_LABEL = "agentcore-rl.runtime", "agentcore-rl.machine"
DOCKER_HOST_NAME = "host.docker.internal"  # this machine, as seen from a container


class ContainerNode:
    """The container engine of this machine. It is looked for when the first agent needs it."""

    def __init__(self, config: IsolationConfig, *, root: Path) -> None:
        self._config, self._root = config, root
        self._engine: ContainerEngine | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> ContainerEngine:
        """Find the engine, and remove containers of this user's ended runtimes. Raises: ConfigError, EngineError."""
        async with self._opening:
            if self._engine is None:
                engine = ContainerEngine()
                async with contextlib.AsyncExitStack() as exits:
                    exits.push_async_callback(engine.close)
                    await engine.start()
                    if engine.name == "podman" and self._config.container_runtime is not None:
                        raise ConfigError(
                            "Podman takes its runtime from containers.conf ([engine], runtime), not from --runtime"
                        )
                    await self._sweep(engine)
                    exits.pop_all()
                self._engine = engine
            return self._engine

    async def _sweep(self, engine: ContainerEngine) -> None:
        async with engine.asked() as docker:
            ours = await docker.containers.list(all=True, filters={"label": [f"{MACHINE_LABEL}={_machine()}"]})
        for found in ours:
            root = Path(found["Labels"].get(RUNTIME_LABEL, ""))
            if root.parent == self._root.parent and not await asyncio.to_thread(root.exists):
                with contextlib.suppress(EngineError):  # another runtime removes it, too
                    async with engine.asked():
                        await found.delete(force=True, v=True)

    async def load(self, agent: Agent, env: Mapping[str, str]) -> ContainerImage:
        """Prepare an agent's image. ``env`` has its variables. Raises: AgentLoadError with the reason."""
        try:
            engine = await self.open()
            image = await (host_files.prepare(engine) if agent.image is None else engine.fetch(agent.image))
        except (ConfigError, LocalRuntimeError, MissingExtraError) as e:
            raise AgentLoadError(f"agent {agent.name}: {e}") from e
        return ContainerImage(engine, image, agent, env, self._config, self._root)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


@dataclass(eq=False)
class ContainerImage:
    """An agent version whose sessions are containers of an image."""

    engine: ContainerEngine
    image: str
    agent: Agent
    env: Mapping[str, str]
    config: IsolationConfig
    root: Path
    cover: Cover | None = None
    running: set[ContainerProcess] = field(default_factory=set)
    alive: ClassVar = True

    async def spawn(self, place: Place) -> ContainerProcess:
        """Start a container. Raises: LocalRuntimeError."""
        settings = await asyncio.to_thread(self._settings, place)
        name = f"agentcore-rl-{self.root.name}-{self.agent.folder}-{place.name}"
        process = ContainerProcess(self.engine, settings, name, place.log_path)
        self.running.add(process)
        process.ended.add_done_callback(lambda _: self.running.discard(process))
        await process.start()
        return process

    def describe(self) -> dict[str, Any]:
        reason = f"{self.engine}, image {self.image}"
        return {"start": "container", "reason": reason, "pid": None, "sessions": len(self.running)}

    async def close(self) -> None:
        """End every session."""
        processes = list(self.running)
        for process in processes:
            process.stop(0.0)
        await asyncio.gather(*(p.ended for p in processes))

    def _settings(self, place: Place) -> dict[str, Any]:
        """Return the configuration of a session's container, and create the session's folder. Blocks."""
        c, agent, podman = self.config, self.agent, self.engine.name == "podman"
        place.directory.mkdir(mode=0o700, parents=True)
        env = {**self.env, "DOCKER_CONTAINER": "1"}  # the SDK then listens on all addresses
        env[hints.VARIABLE] = hints.describe(["/"], c.writable_folders, store=c.store)
        shown = filter(Path.exists, dict.fromkeys((*c.readable, *c.writable_folders)))
        sources: dict[Path, str] = {}
        if place.store is not None:
            place.store.make()
            sources[place.store.root] = str(place.store.path)
        host: dict[str, Any] = {
            "NetworkMode": "bridge",
            "PortBindings": {f"{AGENT_PORT}/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]},
            "SecurityOpt": ["no-new-privileges"],
            "RestartPolicy": {"Name": "no"},
            "Mounts": [
                host_files.mount(p, source=sources.get(p), read_only=p not in c.writable_folders) for p in shown
            ],
        }
        if c.memory_bytes is not None:
            host |= {"Memory": c.memory_bytes, "MemorySwap": c.memory_bytes}
        if not podman:  # Podman names this machine host.containers.internal itself
            host["ExtraHosts"] = [f"{DOCKER_HOST_NAME}:host-gateway"]
        if podman and sys.platform == "linux":
            host["Ulimits"] = _own_limits()
        if c.container_runtime is not None:
            host["Runtime"] = c.container_runtime
        settings: dict[str, Any] = {
            "Image": self.image,
            "ExposedPorts": {f"{AGENT_PORT}/tcp": {}},
            "Labels": {RUNTIME_LABEL: str(self.root), MACHINE_LABEL: _machine()},
            "HostConfig": host,
        }
        if agent.image is None:
            if self.cover is None:
                readable = [*host_files.shown(agent), *c.readable]
                self.cover = Cover(agent.script, readable, c.writable_folders, c.hidden, root=self.root)
            host_files.add(agent, place.directory, settings, env, self.cover, c.copied)
        else:
            env = {k: v for k, v in env.items() if k not in INHERITED or k in agent.env}
        settings["Env"] = [f"{k}={v}" for k, v in env.items()]
        return settings


def _own_limits() -> list[dict[str, Any]]:
    """Return this process's own limits: Podman's defaults may be higher than is allowed without CAP_SYS_RESOURCE."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())  # Podman lowers the number of processes to this
    found = []
    for name, which, highest in (
        ("nofile", resource.RLIMIT_NOFILE, sys.maxsize),
        ("nproc", resource.RLIMIT_NPROC, most),
    ):
        soft, hard = (highest if n == resource.RLIM_INFINITY else min(n, highest) for n in resource.getrlimit(which))
        found.append({"Name": name, "Soft": soft, "Hard": hard})
    return found


def _machine() -> str:
    """Return the user and machine that a container belongs to. An engine may serve several."""
    return f"{platform.node()}:{os.getuid()}"
