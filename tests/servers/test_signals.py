"""Commands end at SIGTERM, also where a script started them in the background, which makes them ignore Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentcore_rl_toolkit._servers.process import terminated_as_interrupted

BLOCK = """
import asyncio, signal, sys, threading
from agentcore_rl_toolkit._servers.process import terminated_as_interrupted

async def work():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        print("cleaned up", flush=True)

if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    with terminated_as_interrupted():
        if sys.argv[2] == "loop":
            asyncio.run(work())
        print("ready", flush=True)
        threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(("ctrl_c", "work"), [("ignored", "loop"), ("usual", "thread")])
def test_sigterm_ends_a_command_as_ctrl_c_does(ctrl_c: str, work: str) -> None:
    command = [sys.executable, "-c", BLOCK, ctrl_c, work]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=30)
    assert printed.splitlines() == [*(["cleaned up"] if work == "loop" else []), "interrupted"]
    assert process.returncode == 0


@pytest.mark.parametrize("ignored", [False, True])
def test_a_block_has_its_handlers_on_the_main_thread_only(ignored: bool) -> None:
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    usual = [lambda number, _: received.append(number), signal.SIG_DFL, signal.SIG_DFL]
    handlers = [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL] if ignored else usual  # as in a script with `nohup`
    before = [signal.signal(number, handler) for number, handler in zip(numbers, handlers, strict=True)]

    def inside() -> list[Any]:
        with terminated_as_interrupted():
            return [signal.getsignal(number) for number in numbers]

    try:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(inside).result() == handlers
        assert (inside()[1] is signal.SIG_IGN) is ignored
        with contextlib.suppress(KeyboardInterrupt), terminated_as_interrupted():
            signal.raise_signal(signal.SIGTERM)
            received.append(0)
        assert received == ([] if ignored else [signal.SIGINT, 0])
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
