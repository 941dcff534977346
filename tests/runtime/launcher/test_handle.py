"""A template process and its forks, by the launcher's end of them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import AgentLoadError, LocalRuntimeError
from agentcore_rl_toolkit.runtime.launcher.handle import TemplateProcess
from agentcore_rl_toolkit.runtime.launcher.place import CommandEnd, Place

from ..conftest import alive, write_agent


async def test_a_session_its_commands_and_its_template_end(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    sockets = tempfile.mkdtemp(dir="/tmp")  # paths of sockets are short, on macOS too
    places = [Place(name, tmp_path / "d" / name, tmp_path / name, f"{sockets}/{name}") for name in "ab"]
    agent = write_agent(tmp_path / "agent" / "agent.py", "")
    options = {"script": agent, "env": dict(os.environ), "log_path": tmp_path / "log", "project": agent.parent}
    with pytest.raises(AgentLoadError, match=r"^cannot run /absent/python: "):
        await TemplateProcess(**options, python=Path("/absent/python")).start()
    template = TemplateProcess(**options)
    assert not template.alive
    await template.start()
    assert template.alive
    session, output = await template.spawn(places[0]), {"stdout": b"", "stderr": b""}

    async def write(name: str, data: bytes) -> None:
        output[name] += data
        assert template.describe()["sessions"] == 1  # a command is no session

    assert await session.command("echo on; echo off >&2; exit 3", write, 60.0) == CommandEnd(3)
    assert await session.command("echo on; sleep 600", write, 2.0) == CommandEnd(-9, timed_out=True)
    assert output == {"stdout": b"on\non\n", "stderr": b"off\n"}
    shutil.rmtree(sockets)
    with pytest.raises(LocalRuntimeError, match=r"^FileNotFoundError: "):
        await template.spawn(places[1])
    absent = "FileNotFoundError: [Errno 2] No such file or directory"
    assert await session.command("true", write, 60.0) == CommandEnd(-1, error=absent)
    await template.close()
    assert session.ended.done()
    assert template.pid is not None
    assert not alive(template.pid)
    with pytest.raises(LocalRuntimeError, match=r"^the agent's template process has ended$"):
        await template.spawn(places[1])
    with pytest.raises(LocalRuntimeError, match=r"^the session's process ended with status -9$"):
        await template.fork("b", "").started
    assert await session.ended == -signal.SIGKILL
