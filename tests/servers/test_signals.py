"""Commands end at SIGTERM, also where a script started them in the background, which makes them ignore Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
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


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN])
@pytest.mark.parametrize("ctrl_c", ["ignored", "handled"])
def test_a_block_has_its_handlers_on_the_main_thread_only(ctrl_c: str, hangup: Any) -> None:
    received: list[int] = []
    handlers = {
        signal.SIGINT: signal.SIG_IGN if ctrl_c == "ignored" else lambda number, _: received.append(number),
        signal.SIGHUP: hangup,  # `nohup` ignores it
        signal.SIGTERM: signal.SIG_DFL,
    }

    def found() -> dict[int, Any]:
        return {number: signal.getsignal(number) for number in handlers}

    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    inside: list[dict[int, Any]] = []

    def enter() -> None:
        with terminated_as_interrupted():
            inside.append(found())

    try:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert inside == [handlers]
        try:
            with terminated_as_interrupted():
                assert (signal.getsignal(signal.SIGHUP) is hangup) is (hangup is signal.SIG_IGN)
                signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            received.append(0)
        assert received == ([0] if ctrl_c == "ignored" else [signal.SIGINT])
        assert found() == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
