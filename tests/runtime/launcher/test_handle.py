"""The runtime's end of a template process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentcore_rl_toolkit.runtime.launcher.handle import CommandProcess, TemplateProcess


async def test_a_command_that_nobody_waits_for_any_more_keeps_no_other_from_its_end() -> None:
    spec: Any = SimpleNamespace(mode="fork", isolation={}, script=Path("agent.py"))
    template = TemplateProcess(spec)
    first, second, third = (CommandProcess(template, name, "s") for name in "abc")
    template.commands = {"a": first, "b": second, "c": third}
    for given_up in (first, second):
        given_up.ended.cancel()
    answer = asyncio.StreamReader()
    answer.feed_data(b'{"ev": "command_exit", "id": "a", "status": 0}\n')
    answer.feed_eof()
    await asyncio.wait_for(template._read(answer), 30)
    assert third.ended.result() == -1
    assert template.closed
