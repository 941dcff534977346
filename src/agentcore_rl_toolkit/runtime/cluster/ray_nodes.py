"""Lists the machines of a Ray cluster and keeps an actor on each. Calls of Ray that may block run in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

from ..._installation import missing_extra
from ...errors import AgentCoreRLError, ConfigError, LocalRuntimeError
from .actor import NodeActor

ACTOR_CPUS = 0.1
CALL_TIMEOUT_S = 15.0
MAX_CALLS = 100_000  # calls at once to one actor: one waits for each session


class Machine(NamedTuple):
    """A machine that may run sessions. Units: cores, bytes; ``memory_bytes`` None: not known."""

    node_id: str
    host: str
    cpus: float
    memory_bytes: float | None = None


class RayNodes:
    """Machines of the Ray cluster at ``address`` (auto: the running one of this machine). Only those with CPUs count."""

    def __init__(self, address: str = "auto") -> None:
        self._address = address
        self._ray: Any = None

    async def connect(self, within_s: float) -> None:
        """Connect as a Ray driver. Raises: MissingExtraError, ConfigError."""
        try:
            import ray
        except ImportError as e:
            raise missing_extra("a Ray cluster needs Ray", "ray") from e
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.WARNING}
        done: Future[None] = Future()

        def connect() -> None:
            try:
                ray.init(address=self._address, namespace=f"agentcore-rl-{os.getpid()}", **quiet)
                done.set_result(None)
            except BaseException as e:  # any error is passed to the caller
                done.set_exception(e)

        # It may never return. In the main thread Ray would replace signal handlers, and a pool would wait for its threads.
        threading.Thread(target=connect, daemon=True, name="connect to Ray").start()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), within_s)
        except TimeoutError as e:
            raise ConfigError(f"no Ray cluster answers at {self._address} within {within_s:g} s") from e
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise ConfigError(f"cannot connect to the Ray cluster at {self._address}: {e}") from e
        self._ray = ray

    async def machines(self) -> list[Machine]:
        """List the machines that are alive. Raises: Ray's errors, TimeoutError."""
        nodes = await asyncio.wait_for(asyncio.to_thread(self._ray.nodes), CALL_TIMEOUT_S)
        found = ((node, node["Resources"]) for node in nodes if node["Alive"])
        return [
            Machine(node["NodeID"], node["NodeManagerAddress"], resources["CPU"], resources.get("memory"))
            for node, resources in found
            if resources.get("CPU", 0.0) >= ACTOR_CPUS
        ]

    async def place(self, machine: Machine) -> Any:
        """Start an actor on exactly this machine."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
        options: dict[str, Any] = {"num_cpus": ACTOR_CPUS, "max_restarts": 0, "max_concurrency": MAX_CALLS}
        remote = self._ray.remote(scheduling_strategy=strategy, **options)
        return await asyncio.to_thread(lambda: remote(NodeActor).remote())

    async def remove(self, actor: Any, within_s: float) -> None:
        """End an actor and its sessions. An actor that has already ended is no error."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(result_of(actor.close.remote()), within_s)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self._ray.kill, actor)

    async def close(self) -> None:
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)


async def result_of(reference: Any) -> Any:
    """Wait for the result of an actor's method. Raises: AgentCoreRLError of the method, otherwise LocalRuntimeError."""
    try:
        return await asyncio.wrap_future(reference.future())
    except Exception as e:  # Ray's errors have no common base
        cause = getattr(e, "cause", None)
        if isinstance(cause, AgentCoreRLError):
            raise cause from e
        raise LocalRuntimeError(str(cause or e)) from e
