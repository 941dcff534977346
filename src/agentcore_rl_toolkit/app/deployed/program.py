"""An agent in another language: a program with a server, started for each session and led to the gateway by its environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...errors import ConfigError
from ..relay import Relay
from .clients import trust
from .forwarding import forward
from .model_calls import WIRES, answer, variables
from .start import PLACEHOLDER

START_S = 60.0
END_S = 5.0


class Program(Starlette):
    """The server of a program, as an app of this process.

    The program is started with the session. It must listen on the port that the variable ``port_variable`` names, on the loopback
    address, and answer `/ping` and `/invocations`. Its model calls reach the gateway through a `Relay`.

    Args:
        command: the program and its arguments.
        wires: the APIs whose variables are set: bedrock, openai, anthropic, gemini. Some agents choose a provider by them.

    Example:
        app = Program("node", "dist/main.js")
    """

    def __init__(self, *command: str, port_variable: str = "PORT", wires: tuple[str, ...] = WIRES) -> None:
        if not command or not set(wires) <= set(WIRES):
            raise ConfigError(f"Program needs a command, and wires of {', '.join(WIRES)}; got {command}, {wires}")
        self._command, self._port_variable = command, port_variable
        self._wires, self._url = wires, ""
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        super().__init__(routes=[Route("/{path:path}", self._forward, methods=methods)], lifespan=self._live)

    @contextlib.asynccontextmanager
    async def _live(self, _: Any) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as exits:
            relay = Relay()
            exits.callback(relay.end)
            port = exits.enter_context(reserved_port()).getsockname()[1]
            self._url = f"http://127.0.0.1:{port}"
            given = {k: v for k, v in os.environ.items() if v != PLACEHOLDER}  # only its wires have keys
            environment = {**given, **variables(relay.open(answer), self._wires), self._port_variable: str(port)}
            try:
                process = await asyncio.create_subprocess_exec(*self._command, env=environment, start_new_session=True)
            except OSError as e:
                raise ConfigError(f"{self._command[0]} cannot be started: {e}") from e
            exits.push_async_callback(_end, process)
            await self._wait_ready(process)
            yield

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the program answers /ping. Raises: ConfigError when it ends, or does not answer in time."""
        deadline_s = time.monotonic() + START_S
        while process.returncode is None and time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                async with httpx.AsyncClient(trust_env=False, verify=trust(), timeout=5) as client:
                    if (await client.get(f"{self._url}/ping")).status_code < 500:
                        return
            await asyncio.sleep(0.05)
        how = f"ended with {process.returncode}" if process.returncode is not None else "did not answer /ping"
        where = f"it must listen on the port in {self._port_variable}"
        raise ConfigError(f"{' '.join(self._command)} {how} within {START_S:g} s; {where}")

    async def _forward(self, request: Request) -> Response:
        path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        address = f"{self._url}{path}" + (f"?{request.url.query}" if request.url.query else "")
        return await forward(request, address, request.headers.raw, "the agent's program does not answer")


def reserved_port() -> socket.socket:
    """Return a UDP socket whose TCP port is free. While it is open, no other session gets the same number."""
    while True:
        place = socket.socket(type=socket.SOCK_DGRAM)
        place.bind(("127.0.0.1", 0))
        with contextlib.suppress(OSError), socket.create_server(place.getsockname()):
            return place
        place.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    for number, wait_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), wait_s)
            return
