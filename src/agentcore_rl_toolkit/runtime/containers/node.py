"""Sessions that are containers: one per session, of an agent's image, or of the machine's own files for an agent given by path.

Theory of operation. A container is created, started, and asked ``/ping`` on port 8080 until it answers 200; its session has
started then. Its server is reached inside its own network namespace (see `containers.network`), or, where that cannot be
entered, through a port published on 127.0.0.1. The engine tells when it has ended; its log is read to the end, the reason
asked for, and the container removed. Every container carries this runtime's root folder as a label, by which the next
runtime removes what a killed one left behind, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import AgentLoadError, ConfigError, LocalRuntimeError, MissingExtraError
from ...isolation.engines import find_engine
from ...isolation.relay import Relay
from ...isolation.spec import IsolationSpec, parse_endpoint
from .. import roots
from ..agents.agent import Agent
from ..config import IsolationConfig
from ..sessions.node import INHERITED, SessionOrder
from ..sessions.records import VARIABLE
from . import images, network
from .client import Engine, EngineError
from .host_files import HostFiles
from .process import AGENT_PORT, ContainerPlan, ContainerProcess

log = logging.getLogger(__name__)

RUNTIME_LABEL, MACHINE_LABEL, SESSION_LABEL = "agentcore-rl.runtime", "agentcore-rl.machine", "agentcore-rl.session"
HOST_NAME = "host.docker.internal"  # this machine, as seen from a container with a network
LOG_OPTIONS = {"docker": ("json-file", {"max-size": "50m"}), "podman": ("k8s-file", {"max-size": "50m"})}


class ContainerNode:
    """Starts container sessions on this machine. The engine is looked for when the first agent needs it.

    ``environment`` gives an agent's variables; ``endpoints`` are the ``127.0.0.1:PORT`` that every session may reach, at that
    address, unless its network is "none"; ``records`` is the socket that takes sessions' records (`Records`).
    """

    def __init__(
        self,
        config: IsolationConfig,
        *,
        root: Path,
        environment: Callable[[Agent], dict[str, str]],
        endpoints: tuple[str, ...] = (),
        gvisor: bool = False,
        publish: bool | None = None,
        records: Path | None = None,
    ) -> None:
        self._config = config
        self._root = root
        self._environment = environment
        self._endpoints = tuple(dict.fromkeys(endpoints))
        self._gvisor = gvisor
        self._publish = publish
        self._records = records
        self._engine: Engine | None = None
        self.relay: Relay | None = None
        self._opening = asyncio.Lock()
        self._images: dict[tuple[str, int], str] = {}
        self._host = HostFiles(config)
        self.running: set[ContainerProcess] = set()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise LocalRuntimeError("no container engine was opened yet")
        return self._engine

    async def open(self) -> None:
        """Find the engine, and remove containers of this user's runtimes that are gone. Raises: ConfigError, EngineError."""
        async with self._opening:
            if self._engine is not None:
                return
            address = await asyncio.to_thread(find_engine, self._config.engine)
            mark = {roots.MARKER: roots.marker(self._root)}
            engine = Engine(address, self._root / "engine", gvisor=self._gvisor, env=mark)
            self._networked(address.url)
            try:
                await engine.start()
                await self._sweep(engine)
                if self._endpoints and self._config.network != "none" and not self._publish:
                    self.relay = Relay(self._root / "containers", self._endpoints)
                    await self.relay.start()
            except BaseException:
                await engine.close()
                raise
            self._engine = engine

    def _networked(self, url: str | None) -> None:
        """Decide how sessions are reached. Raises: ConfigError when the network mode cannot be held that way."""
        why = "a gVisor sandbox has a network stack of its own" if self._gvisor else network.unreachable()
        if url is not None and not url.startswith("unix://"):
            why = "the engine is on another machine"
        if self._publish is None:
            self._publish = why is not None
        if self._gvisor and self._config.processes is not None:
            raise ConfigError(
                "isolation tier 'gvisor' cannot bound processes: the engine counts the sandbox's own threads"
            )
        if self._publish and self._config.network != "host":
            raise ConfigError(f"containers cannot have network={self._config.network!r} here: {why}")

    async def _sweep(self, engine: Engine) -> None:
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
                found = await images.fetch(self.engine, agent.image)
            else:
                found = await self._host.prepare(self.engine, agent)
        except (ConfigError, LocalRuntimeError, MissingExtraError) as e:
            raise AgentLoadError(f"agent {agent.name}: {e}") from e
        for endpoint in self._endpoints:
            if parse_endpoint(endpoint)[1] == AGENT_PORT and self.relay is not None:
                raise AgentLoadError(
                    f"endpoint {endpoint} has the port that agents in containers listen on; use another"
                )
        self._images[agent.runtime_id, agent.version] = found

    async def start_session(self, order: SessionOrder) -> ContainerProcess:
        """Start a container. Raises: AgentLoadError."""
        key = (order.agent.runtime_id, order.agent.version)
        if key not in self._images:
            await self.prepare(order.agent)
        await asyncio.to_thread(order.log_path.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(self._make_folder, order)
        settings = self._settings(order, self._images[key])
        mark = roots.marker(self._root)
        plan = ContainerPlan(
            settings=settings,
            name=f"agentcore-rl-{mark[:12]}-{order.session_id}",
            mark=mark,
            publish=bool(self._publish),
            offer=self._offer(order) if self.relay is not None else None,
            disk_bytes=self._config.disk_bytes,
            own_directories=self._config.writable if order.agent.image is None else (),
        )
        process = ContainerProcess(self.engine, order, plan)
        self.running.add(process)
        process.ended.add_done_callback(lambda _: self.running.discard(process))
        return process

    def _make_folder(self, order: SessionOrder) -> None:
        order.directory.mkdir(mode=0o700, parents=True)
        if order.agent.image is None:
            self._host.fill(order)

    def _offer(self, order: SessionOrder) -> IsolationSpec:
        assert self.relay is not None
        return IsolationSpec(
            session_dir=order.directory, network="loopback", endpoints=self._endpoints, relay=self.relay.path
        )

    def describe(self) -> list[dict[str, Any]]:
        """The agents whose images are here, in the form of templates."""
        return [
            {
                "runtime_id": runtime_id,
                "version": version,
                "start": "container",
                "reason": f"{self.engine.address}, image {image}",
                "pid": None,
                "sessions": sum(p.agent_key == (runtime_id, version) for p in self.running),
            }
            for (runtime_id, version), image in self._images.items()
        ]

    async def forget(self, agent: Agent) -> None:
        """End its sessions."""
        self._images.pop((agent.runtime_id, agent.version), None)
        await self._end([p for p in self.running if p.agent_key == (agent.runtime_id, agent.version)])

    async def forget_if_unused(self, agent: Agent) -> None:
        if not any(p.agent_key == (agent.runtime_id, agent.version) for p in self.running):
            self._images.pop((agent.runtime_id, agent.version), None)

    async def close(self) -> None:
        """End every session, then a service that was started for them."""
        await self._end(list(self.running))
        if self.relay is not None:
            await self.relay.aclose()
        if self._engine is not None:
            await self._engine.close()

    async def _end(self, processes: list[ContainerProcess]) -> None:
        for process in processes:
            process.stop(0.0)
        await asyncio.gather(*(p.ended for p in processes))

    # -- what a container is made from
    def _settings(self, order: SessionOrder, image: str) -> dict[str, Any]:
        agent, c = order.agent, self._config
        env = {**self._environment(agent), **order.env}
        if agent.image is not None:
            env = {k: v for k, v in env.items() if k not in INHERITED or k in agent.env}
        env["DOCKER_CONTAINER"] = "1"  # the SDK then listens on all addresses
        host: dict[str, Any] = {
            "NetworkMode": "bridge" if c.network == "host" else "none",
            "SecurityOpt": ["no-new-privileges"],
            "Ulimits": _ulimits(self.engine.name, c.file_bytes if c.file_bytes is not None else c.disk_bytes),
            "RestartPolicy": {"Name": "no"},
        }
        kind, options = LOG_OPTIONS[self.engine.name]
        host["LogConfig"] = {"Type": kind, "Config": options}
        if c.network == "host":
            host["ExtraHosts"] = [f"{HOST_NAME}:host-gateway"]
        if c.memory_bytes is not None:
            host |= {"Memory": c.memory_bytes, "MemorySwap": c.memory_bytes}
        if c.cpus is not None:
            host["NanoCpus"] = int(c.cpus * 1e9)
        if c.processes is not None:
            host["PidsLimit"] = c.processes
        if self._publish:
            host["PortBindings"] = {f"{AGENT_PORT}/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]}
            env = {k: _seen_from_inside(v, self._endpoints) for k, v in env.items() if k != VARIABLE}
        elif self._records is not None:
            host["Binds"] = [f"{self._records}:{self._records}"]
        if self._gvisor and self.engine.name == "docker":
            host["Runtime"] = "runsc"
        settings: dict[str, Any] = {
            "Image": image,
            "ExposedPorts": {f"{AGENT_PORT}/tcp": {}},
            "Labels": {
                RUNTIME_LABEL: str(self._root),
                MACHINE_LABEL: _machine(),
                SESSION_LABEL: order.directory.name,
            },
            "HostConfig": host,
        }
        if agent.image is None:
            self._host.settings(order, settings, env)
        settings["Env"] = [f"{k}={v}" for k, v in env.items()]
        return settings


def _seen_from_inside(value: str, endpoints: tuple[str, ...]) -> str:
    """An address of this machine's loopback as a container can use it, where no listener can be put inside."""
    for endpoint in endpoints:
        port = parse_endpoint(endpoint)[1]
        for host in ("127.0.0.1", "localhost"):
            if value == f"http://{host}:{port}" or value.startswith(f"http://{host}:{port}/"):
                return value.replace(host, HOST_NAME, 1)
    return value


def _machine() -> str:
    """Which user of which machine a container belongs to; an engine may serve several."""
    return f"{platform.node()}:{os.getuid()}"


def _ulimits(engine: str, file_bytes: int | None) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    if engine == "podman":
        # Its defaults exceed what may be set without CAP_SYS_RESOURCE. Ours are always allowed, but for the number of processes,
        # which Podman lowers for itself to the kernel's largest process id.
        with contextlib.suppress(OSError, ValueError):
            most = int(Path("/proc/sys/kernel/pid_max").read_text())
            for name, which, highest in (
                ("nofile", resource.RLIMIT_NOFILE, sys.maxsize),
                ("nproc", resource.RLIMIT_NPROC, most),
            ):
                soft, hard = (
                    highest if n == resource.RLIM_INFINITY else min(n, highest) for n in resource.getrlimit(which)
                )
                found.append({"Name": name, "Soft": soft, "Hard": hard})
    if file_bytes is not None:
        found.append({"Name": "fsize", "Soft": file_bytes, "Hard": file_bytes})
    return found


__all__ = ["ContainerNode", "ContainerProcess", "EngineError"]
