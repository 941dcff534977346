"""An engine that breaks its connections or does not answer for a while, and one that serves two runtimes at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import Server, wait_for
from ..container_images import containers
from .test_node import Agent

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]


class Proxy:
    """Passes connections on to the engine. It can break all of them, and accept none."""

    def __init__(self, path: Path, engine: Path) -> None:
        self.path, self.is_away = path, False
        self._engine, self._open = engine, set[asyncio.StreamWriter]()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_unix_server(self._connected, self.path):
            self._ready.set()
            await self._stop.wait()
            await self._break_all()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_away:
            writer.transport.abort()
            return
        there, back = await asyncio.open_unix_connection(self._engine)
        self._open |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(64_000):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _break_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    def break_all(self) -> None:
        asyncio.run_coroutine_threadsafe(self._break_all(), self._loop).result(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@pytest.fixture
def proxy(engine_storage: Path, tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path / "engine.sock", engine_storage / "podman" / "podman.sock")
    yield proxy
    proxy.close()


@pytest.fixture
def server(proxy: Proxy, start_server: Callable[..., Server]) -> Server:
    return start_server("--set", "stop_grace=1", CONTAINER_HOST=f"unix://{proxy.path}")


def test_a_session_outlives_the_engines_streams_and_its_container_goes_with_it(proxy: Proxy, server: Server) -> None:
    agent, dying, stopped = Agent(server), new_session_id(), new_session_id()
    hosts = [agent.invoke({}, session_id)["host"] for session_id in (dying, stopped)]
    for _ in range(3):
        proxy.break_all()
        assert [agent.invoke({}, session_id)["host"] for session_id in (dying, stopped)] == hosts
    with pytest.raises(Exception, match="ended with status 7"):
        agent.invoke({"do": "die"}, dying)
    proxy.break_all()
    agent.stop(stopped)
    wait_for(lambda: containers() == [])


def test_a_container_is_removed_when_the_engine_answers_again(proxy: Proxy, server: Server) -> None:
    agent, session_id = Agent(server), new_session_id()
    agent.invoke({}, session_id)
    proxy.is_away = True
    proxy.break_all()
    agent.stop(session_id)
    threading.Timer(3.0, setattr, (proxy, "is_away", False)).start()
    wait_for(lambda: containers() == [])
    ended = wait_for(lambda: server.ended(session_id))
    assert ended["state"] == "stopped"


def test_a_runtime_ends_without_its_engine_and_the_next_one_removes_the_container(
    proxy: Proxy, server: Server, start_server: Callable[..., Server]
) -> None:
    Agent(server).invoke({}, new_session_id())
    proxy.is_away = True
    proxy.break_all()
    server.process.terminate()
    assert server.process.wait(60) == 0
    [left] = containers()
    proxy.is_away = False
    Agent(start_server(CONTAINER_HOST=f"unix://{proxy.path}"))
    assert left not in containers()


def test_two_runtimes_remove_their_own_containers_only(
    engine_storage: Path, start_server: Callable[..., Server]
) -> None:
    first, second = (Agent(start_server("--set", "stop_grace=1")) for _ in range(2))
    stays = new_session_id()
    host = first.invoke({}, stays)["host"]

    def life(agent: Agent) -> None:
        session_id = new_session_id()
        agent.invoke({}, session_id)
        agent.stop(session_id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(life, [first, second] * 4))
    wait_for(lambda: len(containers()) == 1)
    second.server.stop()
    assert first.invoke({}, stays)["host"] == host
    first.server.stop()
    wait_for(lambda: containers() == [])
