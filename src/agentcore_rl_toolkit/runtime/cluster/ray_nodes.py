"""Machines of a Ray cluster. Ray says which there are and keeps one small actor on each, which keeps the node agent.

The actor does not run sessions: it starts the node agent as a process of its own and holds its lifeline. When the actor, its
node or the router's Ray job ends, however that happens, the lifeline breaks and the agent takes its sessions down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..._installation import missing_extra
from ...errors import ConfigError, LocalRuntimeError
from .machines import AgentAddress, ClusterConfig, Machine

ACTOR_CPUS = 0.1
# Shares of the time in which a node has to be ready: so the cause is named before the whole is over.
CONNECT_SHARE, AGENT_SHARE, PLACE_SHARE = 0.65, 0.75, 0.85
STOP_TIMEOUT_S = 12.0
CALL_TIMEOUT_S = 15.0


class AgentKeeper:
    """Runs inside the Ray actor: starts a node agent and ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host: str, token: str, within_s: float) -> dict[str, Any]:
        """Start the agent on this address of the node. Raises: RuntimeError with its output when it does not come up."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentcore_rl_toolkit.runtime.cluster.agent", "--host", host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The mark: a runtime on the same machine takes nothing that comes from here for its user's.
            env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            start_new_session=True,  # a signal to the actor's group is not one to the agent's sessions
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(token.encode() + b"\n")
        self._process.stdin.flush()
        late = threading.Timer(within_s, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            raise RuntimeError(
                f"the node agent did not start on {host} (exit status {self._process.wait(5)}); its output is in the "
                "actor's log of Ray"
            )
        return {"host": host, **json.loads(line)}

    def stop(self) -> int | None:
        """Cut the lifeline and wait. Returns the agent's exit status."""
        if self._process is None:
            return None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            return self._process.wait(STOP_TIMEOUT_S - 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


async def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Run a call that may never return: not in the main thread, where Ray would take over the signals, and not in one
    that this process would wait for at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as e:  # handed to the caller, whatever it is
            error = e
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, daemon=True, name="connect to Ray").start()
    await done


class RayMachines:
    """Machines of the Ray cluster at ``address`` (None: Ray's own choice, a running one). Only those with CPUs count.

    ``join_timeout_s``: as `ClusterConfig` has it, the seconds in which a node has to be ready.
    """

    def __init__(self, address: str | None = None, *, join_timeout_s: float = ClusterConfig.join_timeout_s) -> None:
        self._address = address or "auto"
        self._connect_s = join_timeout_s * CONNECT_SHARE
        self._agent_s = join_timeout_s * AGENT_SHARE
        self._place_s = join_timeout_s * PLACE_SHARE
        self._ray: Any = None
        self._actors: dict[str, Any] = {}

    async def open(self) -> None:
        """Connect as a Ray driver. Raises: MissingExtraError, ConfigError."""
        try:
            import ray
        except ImportError as e:
            raise missing_extra("a Ray cluster needs Ray", "ray") from e

        def connect() -> None:
            ray.init(
                address=self._address,
                namespace=f"agentcore-rl-{os.getpid()}",
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )

        try:
            async with asyncio.timeout(self._connect_s):
                await _in_daemon_thread(connect)
        except TimeoutError as e:
            raise ConfigError(f"no Ray cluster answers at {self._address} within {self._connect_s:g} s") from e
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise ConfigError(f"cannot connect to the Ray cluster at {self._address}: {e}") from e
        self._ray = ray

    async def machines(self) -> list[Machine]:
        def look() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = self._ray.nodes()
            return found

        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                nodes = await asyncio.to_thread(look)
        except TimeoutError as e:
            raise LocalRuntimeError(f"Ray did not answer within {CALL_TIMEOUT_S:g} s") from e
        except Exception as e:  # Ray's errors have no common base
            raise LocalRuntimeError(f"Ray: {e}") from e
        return [
            Machine(
                node_id=node["NodeID"],
                host=node["NodeManagerAddress"],
                cpus=node["Resources"]["CPU"],
                memory_bytes=node["Resources"].get("memory"),
            )
            for node in nodes
            if node["Alive"] and node["Resources"].get("CPU", 0.0) >= ACTOR_CPUS
        ]

    async def place(self, machine: Machine, token: str) -> AgentAddress:
        """One actor on exactly this node; its agent listens on the address by which Ray knows the node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        def create() -> Any:
            options = {
                "num_cpus": ACTOR_CPUS,
                "max_restarts": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(machine.node_id, soft=False),
            }
            return self._ray.remote(**options)(AgentKeeper).remote()

        try:
            actor = self._actors[machine.node_id] = await asyncio.to_thread(create)
            async with asyncio.timeout(self._place_s):
                answer = await asyncio.wrap_future(actor.start.remote(machine.host, token, self._agent_s).future())
        except TimeoutError as e:
            raise LocalRuntimeError(f"Ray did not start the node agent on {machine.node_id} in time") from e
        except Exception as e:
            raise LocalRuntimeError(f"the node agent on {machine.node_id} did not start: {e}") from e
        return AgentAddress(host=answer["host"], port=answer["port"], pid=answer["pid"])

    async def remove(self, node_id: str) -> None:
        actor = self._actors.pop(node_id, None)
        if actor is None:
            return
        with contextlib.suppress(Exception):  # the node or the actor may be gone, which is what is wanted
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.wrap_future(actor.stop.remote().future())
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self._ray.kill, actor)

    async def close(self) -> None:
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)
