"""The life of a container, with an engine that is a script."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.containers import process
from agentcore_rl_toolkit.runtime.containers.client import EngineError
from agentcore_rl_toolkit.runtime.containers.process import ContainerProcess
from agentcore_rl_toolkit.runtime.launcher.place import CommandEnd

MEMORY = {"Memory": 96 * 2**20}
KILLED = CommandEnd(-signal.SIGKILL)


def opened(value: Any) -> MagicMock:
    return MagicMock(**{"return_value.__aenter__.return_value": value, "return_value.__aexit__.return_value": None})


def printing(*messages: tuple[int, bytes]) -> Any:
    read = [SimpleNamespace(stream=stream, data=data) for stream, data in messages]
    return SimpleNamespace(read_out=AsyncMock(side_effect=[*read, None]))


def shown(code: int, **state: bool) -> dict[str, Any]:
    ports = {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "4321"}]}
    return {"State": {"Running": False, "ExitCode": code, **state}, "NetworkSettings": {"Ports": ports}}


def requests(engine: Any) -> list[str]:
    names = ("create", "start", "kill", "delete")
    return [call[2].get("signal", call[0]) for call in engine.mock_calls if call[0] in names]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine, and its one container."""
    monkeypatch.setattr(process, "PAUSES_S", (0.0,) * 5)
    engine = AsyncMock(containers=None)
    engine.containers, engine.name = engine, "docker"
    engine.asked, engine.container, engine.attach = opened(engine), opened(engine), opened(printing((1, b"said")))
    engine.show.return_value = shown(0, Running=True)
    return engine


@pytest.fixture
def make(engine: Any, tmp_path: Path) -> Callable[..., ContainerProcess]:
    return lambda **host: ContainerProcess(engine, {"HostConfig": host}, "c-1", tmp_path / "log")


@pytest.mark.parametrize(
    ("state", "host", "status", "death"),
    [
        (shown(7), MEMORY, 7, "its container ended with status 7"),
        (shown(128), {}, 128, "its container ended with status 128"),
        (shown(129), MEMORY, -1, "its container ended with status 129"),
        (shown(137), MEMORY, -9, "killed from outside, as the kernel does above its memory limit (96 MiB)"),
        (shown(137, OOMKilled=True), MEMORY, -9, "killed for using more than its memory limit (96 MiB)"),
        (shown(137, OOMKilled=True), {}, -9, "killed for using more than the machine's memory"),
    ],
)
async def test_the_end_of_a_container_has_a_status_and_a_cause(
    engine: Any,
    make: Callable[..., ContainerProcess],
    tmp_path: Path,
    caplog: Any,
    state: Any,
    host: Any,
    status: int,
    death: str,
) -> None:
    session = make(**host)
    await session.start()
    engine.show.return_value = state
    engine.delete.side_effect = [
        EngineError("busy", status=500),
        EngineError("busy", status=409),
        EngineError("gone", status=404),
    ]
    assert await session.ended == status
    assert str(session.death).removeprefix("the session was ") == death
    assert requests(engine) == ["create", "start", "delete", "delete", "delete"]
    assert ((tmp_path / "log").read_bytes(), caplog.text) == (b"said", "")


@pytest.mark.parametrize("grace_s", [0.0, 0.01])
async def test_a_stopped_container_gets_its_signals(
    engine: Any, make: Callable[..., ContainerProcess], grace_s: float
) -> None:
    def kill(signal: str) -> None:
        if signal == "SIGKILL":
            engine.show.return_value = shown(137)

    engine.kill.side_effect = kill
    session = make(**MEMORY)
    await session.start()
    session.stop(grace_s)
    assert (await session.ended, session.death) == (-9, None)
    signals = ["SIGTERM", "SIGKILL"] if grace_s else ["SIGKILL"]
    assert requests(engine) == ["create", "start", *signals, "delete"]


@pytest.mark.parametrize("refused", ["create", "start", ""])
async def test_a_container_that_does_not_start_or_is_stopped_before_is_removed(
    engine: Any, make: Callable[..., ContainerProcess], refused: str
) -> None:
    session = make()
    if refused:
        getattr(engine, refused).side_effect = EngineError("no room", status=500)
    else:
        session.stop(0.0)
    with pytest.raises(LocalRuntimeError, match="no room" if refused else "ended with status None"):
        await session.start()
    assert requests(engine) == (["create", "start", "delete"] if refused == "start" else ["create", "delete"])


@pytest.mark.parametrize(
    ("output", "code", "end", "written"),
    [
        ([(1, b"4"), (1, b"2\nout"), (2, b"errors")], 3, CommandEnd(3), {"stdout": b"out", "stderr": b"errors"}),
        ([(1, b"42\n")], 128, CommandEnd(128), {"stdout": b"", "stderr": b""}),
        ([(2, b"1\n"), (1, b"42\n"), (1, b"7\n")], 137, KILLED, {"stdout": b"7\n", "stderr": b"1\n"}),
        ([], 126, CommandEnd(-1, error="the container has no /bin/sh to run it with"), {"stdout": b"", "stderr": b""}),
    ],
)
async def test_a_command_ends_with_its_status_and_output(
    engine: Any, make: Callable[..., ContainerProcess], output: Any, code: int, end: CommandEnd, written: Any
) -> None:
    found: dict[str, bytes] = {}

    async def write(name: str, data: bytes) -> None:
        found[name] = found.get(name, b"") + data

    session = make()
    await session.start()
    run = engine.exec.return_value
    run.start, run.inspect.return_value = opened(printing(*output)), {"ExitCode": code}
    assert (await session.command("true", write, 60), found) == (end, written)
    hung = SimpleNamespace(read_out=AsyncMock(side_effect=[SimpleNamespace(stream=1, data=b"42\n"), TimeoutError]))
    run.start = lambda detach: asyncio.sleep(0) if detach else opened(hung)()
    assert await session.command("sleep", write, 60) == CommandEnd(-signal.SIGKILL, timed_out=True)
    assert engine.exec.call_args[0][0][-1] == "kill -9 -42 || kill -9 42"
    engine.exec.side_effect = EngineError("no room", status=500)
    assert await session.command("true", write, 60) == CommandEnd(-1, error="no room")
    engine.show.return_value = shown(0)
    await session.ended
    assert await session.command("true", write, 60) == KILLED
