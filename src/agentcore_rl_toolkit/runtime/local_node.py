"""Sessions of this machine: forked from a warm template, or one container each."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from .._servers.peers import owner_of
from ..errors import AgentLoadError
from ..isolation import choose_tier
from ..isolation.linux import cgroups
from ..isolation.relay import Relay
from ..isolation.tiers import loader_unavailable
from .agents.agent import Agent, runtime_arn
from .config import RuntimeConfig
from .containers.node import ContainerNode
from .launcher.handle import TemplateProcess, TemplateSpec
from .roots import MARKER, marker
from .sessions.node import INHERITED, SessionOrder
from .sessions.records import VARIABLE, Records, Writer

log = logging.getLogger(__name__)

CONTAINER_TIERS = ("docker", "gvisor")
# OpenBLAS, and so numpy, starts its threads when it is imported; a process that has threads cannot be forked.
UNTHREADED = {"OPENBLAS_NUM_THREADS": "1"}


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
        self._endpoints = config.isolation.endpoints
        self._templates: dict[tuple[str, int], TemplateProcess] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._relay: Relay | None = None
        self._container_node: ContainerNode | None = None
        # Of control groups, which the next runtime knows by it for those of a killed one.
        self._tag = cgroups.owned(hashlib.sha256(str(root).encode()).hexdigest()[:8] + "-")
        self._confines_loading = False
        self._records: Records | None = None
        self.tier = ""

    async def start(self) -> None:
        """Choose the isolation tier. Raises: ConfigError when the one asked for is not usable here."""
        wanted = self._config.isolation
        tier = await asyncio.to_thread(choose_tier, wanted.tier, network=wanted.network)
        self.tier = tier.name
        if tier.name in ("namespaces", "landlock"):
            why = await asyncio.to_thread(loader_unavailable, tier.name)
            self._confines_loading = why is None
            if why is not None:
                log.warning("agents are loaded without confinement, only their sessions are confined: %s", why)
        if sys.platform.startswith("linux"):  # elsewhere nobody could say which session connects
            self._records = Records(self._root / "records", self._writer_of)
            await self._records.start()
        if tier.name in CONTAINER_TIERS:
            await self._containers().open()
        if tier.name == "process":
            log.warning("sessions are plain processes: nothing keeps them from other files and processes of this user")
        if wanted.network == "loopback" and self._endpoints and tier.name == "namespaces":
            self._relay = Relay(self._root / "relay", self._endpoints)
            await self._relay.start()

    def carried(self, client: tuple[str, int], server: tuple[str, int]) -> tuple[int, str] | None:
        """Whose the connection between these two ends is, where a relay of this node carries it: see `Relay.owner_of`."""
        relays = (self._relay, self._container_node.relay if self._container_node is not None else None)
        return next((o for relay in relays if relay is not None and (o := relay.owner_of(client, server))), None)

    async def prepare(self, agent: Agent) -> None:
        """Load the agent's template, or see to its image. Raises: AgentLoadError with its traceback."""
        if self._in_container(agent):
            if self._config.strict_snapshot:
                raise AgentLoadError(
                    f"agent {agent.name}: --strict-snapshot needs forked sessions; containers start cold"
                )
            await self._containers().prepare(agent)
        else:
            await self._template(agent)

    async def start_session(self, order: SessionOrder) -> Any:
        """Fork a session, or start a container. Raises: AgentLoadError, LocalRuntimeError."""
        for path in (order.log_path, order.directory, Path(order.socket_path)):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._in_container(order.agent):
            return await self._containers().start_session(order)
        template = await self._template(order.agent)
        return template.spawn(
            order.session_id, order.socket_path, order.directory, order.log_path, order.env, order.agent.script.parent
        )

    def describe(self) -> list[dict[str, Any]]:
        """The loaded agents: how they start their sessions, and why not by fork."""
        containers = self._container_node.describe() if self._container_node is not None else []
        return containers + [
            {
                "runtime_id": runtime_id,
                "version": version,
                "start": t.mode,
                "reason": t.reason,
                "confined": t.confined and bool(t.spec.isolation.get("tier", "process") != "process"),
                "pid": t.pid,
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
        if self._in_container(agent):
            await self._containers().forget_if_unused(agent)
            return
        template = self._templates.get((agent.runtime_id, agent.version))
        if template is not None and not template.sessions:
            await self.forget(agent)

    async def close(self) -> None:
        """End every template and container."""
        await asyncio.gather(*(t.close() for t in self._templates.values()))
        await asyncio.to_thread(_remove_empty, self._sessions)
        # What a killed predecessor left whose processes were gone only after our start.
        await asyncio.to_thread(cgroups.sweep)
        if self._container_node is not None:
            await self._container_node.close()
        if self._relay is not None:
            await self._relay.aclose()
        if self._records is not None:
            await self._records.aclose()

    def _writer_of(self, pid: int) -> Writer | None:
        """The session of this node that a process belongs to."""
        found = [p for template in self._templates.values() for p in template.sessions.values()]
        firsts: dict[int, Writer] = {first: p for p in found for first in (p.pid, *p.command_pids) if first}
        if self._container_node is not None:
            firsts |= {p.pid: p for p in self._container_node.running if p.pid}
        return owner_of(pid, firsts)

    def _in_container(self, agent: Agent) -> bool:
        return agent.image is not None or self.tier in CONTAINER_TIERS

    def _containers(self) -> ContainerNode:
        if self._container_node is None:
            self._container_node = ContainerNode(
                self._config.isolation,
                root=self._root,
                environment=self.environment,
                endpoints=self._endpoints,
                gvisor=self.tier == "gvisor",
                records=self._records.path if self._records is not None else None,
            )
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
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = self._root / "home" / agent.name
        places = (
            self._sessions / agent.folder,
            self._state_dir / "logs" / agent.name,
            self._root / "s" / agent.folder,
        )
        for folder in (home, *places):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        loader = {
            "home": str(home),
            "writable": [str(p) for p in places],
            "group": f"{self._tag}{agent.folder}",
        }
        template = TemplateProcess(
            TemplateSpec(
                script=agent.script,
                python=agent.python,
                env={**UNTHREADED, **self.environment(agent), "HOME": str(home), "TMPDIR": str(home)},
                mode=self._config.start_mode,
                strict_snapshot=self._config.strict_snapshot,
                isolation=self._isolation(agent),
                loader=loader if self._confines_loading else None,
                disk_bytes=self._config.isolation.disk_bytes,
                log_path=log_path,
            )
        )
        try:
            await template.start()
        except AgentLoadError as e:
            raise AgentLoadError(f"agent {agent.name}: {e}") from e
        return template

    def _isolation(self, agent: Agent) -> dict[str, Any]:
        c = self._config.isolation
        limits = {
            "memory_bytes": c.memory_bytes,
            "cpus": c.cpus,
            "processes": c.processes,
            "file_bytes": c.file_bytes if c.file_bytes is not None else c.disk_bytes,
        }
        if self.tier == "process" and not any(limits.values()):
            return {}
        package = Path(__file__).resolve().parents[1]
        return {
            "tier": self.tier,
            "name_prefix": self._tag,
            "read_only": [str(p) for p in (agent.script.parent, package, *c.read_only, *self._sockets())],
            "writable": [str(p) for p in c.writable],
            # An agent's folder may lie around them: everything of this and of other runtimes, but what is named on its own.
            "hidden": [str(self._root.parent), str(self._state_dir)],
            "limits": limits,
            "network": c.network,
            "endpoints": list(self._endpoints) if c.network == "loopback" else [],
            "relay": str(self._relay.path) if self._relay is not None else None,
        }

    def _sockets(self) -> tuple[Path, ...]:
        return (self._records.path,) if self._records is not None else ()

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
            MARKER: marker(self._root),
        }
        if self._records is not None:
            env[VARIABLE] = str(self._records.path)
        if sys.platform == "darwin":
            env["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"  # else a forked child that uses Foundation is killed
        return {**env, **self._config.session_env, **agent.env}


def _remove_empty(folder: Path) -> None:
    """Remove the folders of agent versions, in which no session has left anything."""
    for inner in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            inner.rmdir()
