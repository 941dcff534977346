"""Sessions of this machine: forked from a warm template, or one container each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .._servers.tasks import Tasks
from ..errors import AgentLoadError
from ..isolation import hints, sandbox
from ..isolation.cover import Cover
from ..isolation.project import Project
from ..isolation.sandbox import choose_tier
from ..store.local import SessionFolder
from . import roots
from .agents.agent import Agent, runtime_arn
from .config import INHERITED, RuntimeConfig
from .containers.node import ContainerImage, ContainerNode
from .launcher.handle import TemplateProcess
from .launcher.place import Place, SessionProcess
from .launcher.session_log import read_log, shorten

log = logging.getLogger(__name__)

# OpenBLAS, and so numpy, starts its threads at its import. A process with threads cannot be forked.
UNTHREADED = {"OPENBLAS_NUM_THREADS": "1"}
PACKAGE = Path(__file__).resolve().parents[1]
CLEAN_UP_THREADS = 4
LOG_CHECK_S = 2.0


class LocalNode:
    """Runs sessions on this machine: processes forked from one template per agent version, and containers.

    Logs are kept below ``state_dir``, sockets below ``root``. A cluster has one of these on each of its nodes.
    """

    def __init__(self, config: RuntimeConfig, *, state_dir: Path, root: Path) -> None:
        self.tier = ""
        self._config, self._state_dir, self._root = config, state_dir, root
        for folder in (state_dir / "sessions", state_dir / "logs", root / "s"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.isolation.hidden.add(state_dir)
        self._agents: dict[tuple[str, int], TemplateProcess | ContainerImage] = {}
        self._locks: defaultdict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._logs: dict[Path, Path] = {}  # folder -> log, for live sessions and templates
        self._background = Tasks()
        self._containers = ContainerNode(config.isolation, root=root)
        # Removing a session's files can take minutes, and must not delay other work.
        self._clean_up = ThreadPoolExecutor(CLEAN_UP_THREADS, thread_name_prefix="clean-up")

    async def start(self) -> None:
        """Choose the isolation tier. Raises: ConfigError when the one asked for is not usable here."""
        self.tier, why = await asyncio.to_thread(choose_tier, self._config.isolation.tier)
        if why is not None:
            log.warning("sessions run without a sandbox and can change this user's files: %s", why)
        for folder in self._config.isolation.writable_folders:
            if not folder.exists():
                folder.mkdir(parents=True)
        if self._config.isolation.store is not None:
            (self._root / roots.STORE).symlink_to(self._config.isolation.store)
        if self.tier == "container":
            await self._containers.open()
        self._background.start(self._bound_logs())

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            await asyncio.to_thread(shorten, *self._logs.values())

    # -- agents
    async def prepare(self, agent: Agent) -> TemplateProcess | ContainerImage:
        async with self._locks[agent.key]:
            loaded = self._agents.get(agent.key)
            if loaded is None or not loaded.alive:
                if loaded is not None:
                    await loaded.close()
                if agent.image is not None or self.tier == "container":
                    loaded = await self._containers.load(agent, self.environment(agent))
                else:
                    loaded = await self._load_template(agent)
                self._agents[agent.key] = loaded
        return loaded

    def describe(self) -> list[dict[str, Any]]:
        """Describe the loaded agents: how they start their sessions, and why not by fork."""
        return [
            {"runtime_id": runtime_id, "version": version, **loaded.describe()}
            for (runtime_id, version), loaded in self._agents.items()
        ]

    async def forget(self, agent: Agent) -> None:
        """End an agent version's template, or its containers, and with it its sessions. A later session loads it again."""
        async with self._locks[agent.key]:  # wait for an agent that is being loaded
            loaded = self._agents.pop(agent.key, None)
            if loaded is not None:
                await loaded.close()

    async def close(self) -> None:
        await self._background.cancel()
        await asyncio.gather(*(loaded.close() for loaded in self._agents.values()))
        await self._containers.close()

    # -- sessions
    def place(self, agent: Agent, name: str, log: str) -> Place:
        folder = self._state_dir / "sessions" / agent.folder / name
        socket = self._root / "s" / agent.folder / f"{name}.s"
        root = self._config.isolation.store
        store = SessionFolder(root, f"{self._root.name}-{agent.folder}-{name}") if root is not None else None
        return Place(name, folder, self._state_dir / "logs" / agent.name / log, str(socket), store)

    async def spawn(self, agent: Agent, place: Place) -> SessionProcess:
        for path in (place.log_path, place.directory, Path(place.socket_path)):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs[place.directory] = place.log_path
        return await (await self.prepare(agent)).spawn(place)

    async def discard(self, place: Place) -> None:
        """Remove the session's folder and socket, and its log when it is empty."""

        def remove() -> None:
            if place.store is not None and place.store.path.exists():
                place.store.merge()
            roots.remove(place.directory)
            with contextlib.suppress(OSError):
                Path(place.socket_path).unlink(missing_ok=True)
            self._logs.pop(place.directory, None)
            shorten(place.log_path)
            with contextlib.suppress(OSError):
                if place.log_path.lstat().st_size == 0:
                    place.log_path.unlink()

        await asyncio.get_running_loop().run_in_executor(self._clean_up, remove)

    async def read_log(self, session: Mapping[str, Any], offset: int, size: int) -> bytes:
        return read_log(session["log"], offset, size)

    async def _load_template(self, agent: Agent) -> TemplateProcess:
        isolation = self._config.isolation
        home = self._root / "home" / agent.name
        logs = self._state_dir / "logs"
        own = (home, self._state_dir / "sessions" / agent.folder, logs / agent.name, self._root / "s" / agent.folder)
        tmp = self._root / "tmp" / agent.folder
        await asyncio.to_thread(roots.remove, tmp)  # that of a template which has ended
        for folder in (*own, tmp):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = {**UNTHREADED, **self.environment(agent), "HOME": str(home), "TMPDIR": str(home)}
        template = TemplateProcess(
            script=agent.script,
            python=agent.interpreter,
            env=env,
            mode=self._config.start_mode,
            memory_bytes=isolation.memory_bytes,
            log_path=logs / f"{agent.name}.template.log",
            copied=[*map(str, isolation.copied)],
        )
        if self.tier == "process":
            top = sandbox.project_of(agent.script)
            own_folder = Project.of(agent.script).folder  # the checkout around it stays read-only
            template.project = (own_folder if own_folder.is_relative_to(top) else top) if top.is_dir() else None
            paths = await asyncio.to_thread(sandbox.interpreter_paths, agent.interpreter)
            readable = (*paths, PACKAGE, top, *isolation.readable)
            writable = (*own, *isolation.writable_folders)
            shown = (*map(Path, sandbox.SYSTEM), *readable)
            cover = await asyncio.to_thread(Cover, agent.script, shown, writable, isolation.hidden, root=self._root)
            template.sandbox = sandbox.command(readable, writable, cover.mounts, str(tmp))
            env[hints.VARIABLE] = hints.describe(shown, isolation.writable_folders, store=isolation.store)
        self._logs[tmp] = template.log_path
        try:
            await template.start()
        except AgentLoadError as e:
            raise AgentLoadError(f"agent {agent.name}: {e}") from e
        if template.reason is not None:
            how = "loads it again, which is slow" if template.mode == "exec" else "runs its file again"
            log.warning("agent %s: every session %s: %s", agent.name, how, template.reason)
        if template.no_view is not None:
            text = "agent %s: its project is read-only in sessions, because the kernel allows no view for each (%s); %s"
            log.warning(text, agent.name, template.no_view, "--copy PATH gives each session a copy of a path")
        if template.no_overlay:
            text = "agent %s: its sessions share %s as in the sandbox, because the kernel allows no overlay there"
            log.warning(text, agent.name, ", ".join(template.no_overlay))
        return template

    def environment(self, agent: Agent) -> dict[str, str]:
        """Return the variables of an agent's process: a few inherited names, what AWS sets, then what the user set."""
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
        if sys.platform == "darwin":  # otherwise macOS kills a forked child that uses Foundation
            env["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"
        given = {**self._config.session_env, **agent.env}
        if "AWS_REGION" in given:  # boto3 reads the other name
            given.setdefault("AWS_DEFAULT_REGION", given["AWS_REGION"])
        return {**env, **given}
