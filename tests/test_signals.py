"""Commands end at SIGTERM, also where a script started them in the background, which makes them ignore Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
