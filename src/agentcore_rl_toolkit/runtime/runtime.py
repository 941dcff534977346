"""A local runtime: its agents, its sessions and the folder they live in."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._servers.tasks import Tasks
from ..contract import AS_IS
from ..errors import ConfigError, LocalRuntimeError
from ..isolation.cover import may_show
from ..store import parse_url
from . import roots
from .agents import environments
from .agents.agent import Agent
from .agents.registry import DEFAULT, Record, Registry
from .agents.version_fields import LOCAL_ARTIFACT
from .api.quotas import Quotas
from .config import RuntimeConfig
from .launcher.session_log import KeptLogs
from .local_node import LocalNode
from .metrics import Metrics
from .sessions.session import Session
from .sessions.table import Launcher, SessionTable
from .wire import Target, WireError, not_found

log = logging.getLogger(__name__)


class Runtime:
    """The runtime without its HTTP interface. Use as: ``start``, then serve, then ``close``. Raises: ConfigError."""

    def __init__(self, config: RuntimeConfig, *, launcher: Launcher | None = None) -> None:
        self.config = config
        self._root_lock = roots.new_root()
        self.root = self._root_lock.path  # its own folder for as long as it runs
        self.state_dir = config.state_dir or self.root / "state"
        try:
            self._state_lock = roots.own_state(self.state_dir)
        except ConfigError:
            roots.discard_root(self._root_lock)
            raise
        self.registry = Registry(
            region=config.region,
            account_id=config.account_id,
            idle_timeout_s=config.times.idle_timeout_s,
            max_lifetime_s=config.times.max_lifetime_s,
        )
        self.quotas, self.faults, self.metrics = Quotas(config.quotas), config.faults, Metrics()
        self.launcher = launcher or LocalNode(config, state_dir=self.state_dir, root=self.root)
        self.table = SessionTable(self.launcher, config, self.metrics, self._admit, self._on_gone)
        self._closing = self._ended = False
        self._background = Tasks()
        self._kept_logs = KeptLogs()
        self._loading: dict[tuple[str, int], asyncio.Task[None]] = {}  # the keys are versions

    async def start(self, agents: Sequence[tuple[str, Path]]) -> dict[str, str]:
        """Load the agents. Returns name -> ARN. Raises: AgentLoadError, ConfigError."""
        await self.launcher.start()
        records = []
        for name, script in agents:
            fields = {
                "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": f"{LOCAL_ARTIFACT}{script}"}},
                "roleArn": f"arn:aws:iam::{self.config.account_id}:role/local",
                "networkConfiguration": {"networkMode": "PUBLIC"},
            }
            records.append(self.registry.create(name, fields, salt=str(script)))
        await asyncio.gather(*(self._load(record.latest, try_here=True) for record in records))
        return {record.name: self.registry.arn(record.id) for record in records}

    def _admit(self, agent: Agent, endpoint: str, live: int) -> None:
        if self._closing:
            raise WireError("InternalServerException", "The runtime is shutting down.")
        self.quotas.new_session(agent.runtime_id, endpoint, live, time.monotonic())

    # -- deploying
    def deploy(self, agent: Agent) -> None:
        """Load a version in the background. Its status then tells the result."""
        self._loading[agent.key] = self._background.start(self._deploy(agent))

    def reload(self, name: str) -> Record:
        """Create a version of an agent from its file as it is now, in the same environment. Raises: WireError 404."""
        record = self.registry.by_name(name)
        if record is None:
            raise not_found(f"Agent {name}")
        old = record.latest
        agent = self.registry.update(record, old.fields)
        agent.python = old.python
        self.deploy(agent)
        return record

    def hide(self, paths: Sequence[str]) -> list[str]:
        """Hide more files from sessions of agents that are loaded from now on. Returns the loaded agents that may show one."""
        isolation = self.config.isolation
        new = {Path(os.path.realpath(path)) for path in paths} - isolation.hidden
        isolation.hidden.update(new)
        if self.launcher.tier == "none":
            return []
        latest = [record.latest for record in self.registry.records.values()]
        agents = [agent for agent in latest if agent.loaded and agent.image is None]
        return [agent.name for agent in agents if may_show(new, agent.script, isolation.readable)]

    async def _deploy(self, agent: Agent) -> None:
        try:
            await self._load(agent)
        except Exception as e:  # any error: otherwise callers would wait forever for this version
            expected = isinstance(e, (LocalRuntimeError, ConfigError, OSError))
            if not expected:
                log.exception("an agent version did not load", extra={"agent": agent.name, "version": agent.version})
            self.registry.set_loaded(agent, str(e) if expected else f"{type(e).__name__}: {e}")
        finally:
            del self._loading[agent.key]

    async def _load(self, agent: Agent, *, try_here: bool = False) -> None:
        """Load a version. ``try_here``: use this environment if it has the agent's packages."""
        if agent.image is None and (agent.python is None or not agent.python.exists()):
            if not agent.script.is_file():
                raise ConfigError(f"there is no agent file {agent.script}")
            if try_here and await asyncio.to_thread(environments.fits_here, agent.script):
                agent.python = Path(sys.executable)
            else:
                if try_here:
                    log.warning("agent %s gets its own environment, for its dependency file", agent.name)
                as_is = AS_IS in agent.env or AS_IS in self.config.session_env
                agent.python = await asyncio.to_thread(environments.build, agent.script, toolkit=as_is)
        try:
            await self.launcher.prepare(agent)
        except BaseException:
            self._background.start(self.launcher.forget(agent))
            raise
        self.registry.set_loaded(agent, None)
        for other in self.registry.get(agent.runtime_id).versions.values():
            if other.loaded:
                self._forget_if_unused(other)

    def _forget_if_unused(self, agent: Agent) -> None:
        record = self.registry.records.get(agent.runtime_id)
        served = record is not None and any(e.version == agent.version for e in record.endpoints.values())
        if not served and not self.table.sessions_of(agent):
            self._background.start(self.launcher.forget(agent))

    async def remove(self, record: Record) -> None:
        """Stop the sessions of a deleted agent. The end of the last one ends the processes of its version."""
        for agent in record.versions.values():
            loading = self._loading.get(agent.key)
            if loading is not None:
                loading.cancel()
                await asyncio.wait([loading])
            for session in self.table.sessions_of(agent):
                self.table.stop(session.key)
            self._forget_if_unused(agent)

    # -- serving
    async def find(self, target: Target) -> Agent:
        """Find the agent version that a request is for. Wait if the only one is being loaded.

        Raises: WireError 400, 404, 424.
        """
        while True:  # the awaited version may have failed, or be deleted
            record = self.registry.find(target)
            agent = record.versions[record.endpoint(target.endpoint).version]
            if agent.loaded:
                return agent
            awaited = [agent, record.latest] if target.endpoint == DEFAULT else [agent]
            loading = next((self._loading[a.key] for a in awaited if a.key in self._loading), None)
            if loading is None:
                why = agent.failure or "it is not loaded"
                raise WireError("RuntimeClientError", f"The agent runtime is not ready: {why}", localDetail=why)
            await asyncio.wait([loading])

    def status(self) -> dict[str, Any]:
        """Return the answer of `/_local/status`."""
        return {
            "state_dir": str(self.state_dir),
            "isolation": {"tier": self.launcher.tier},
            "quotas": self.config.quotas.name,
            "sessions": len(self.table.sessions),
            "started": self.table.started_total,
            "ended": self.table.ended_total,
            "templates": self.launcher.describe(),
            "agents": [
                {"name": r.name, "arn": self.registry.arn(r.id), "version": r.latest.version, "status": r.latest.status}
                for r in self.registry.records.values()
            ],
        }

    async def end_sessions(self) -> None:
        """End every session, and start none any more."""
        self._closing = True
        await self.table.close()
        self._ended = True

    async def close(self) -> None:
        """End every session and template, and remove what is not to be kept."""
        if not self._ended:
            await self.end_sessions()
        await self._background.cancel()
        await self.launcher.close()
        self._state_lock.release()
        roots.discard_root(self._root_lock)

    def _on_gone(self, session: Session) -> None:
        self._forget_if_unused(session.agent)
        self._kept_logs.keep(session.place.log_path)


def store_folder(text: str) -> Path | None:
    """Return the folder of a ``file://`` store or a plain path, None for a store elsewhere. Raises: ConfigError."""
    if "://" not in text:
        return Path(text).resolve()
    url = parse_url(text)
    return Path(url.prefix) if url.scheme == "file" else None
