"""Runtimes that start at the same moment, each of which removes the roots of those that are gone."""

from __future__ import annotations

import subprocess
import sys
import tempfile

START = """
from agentcore_rl_toolkit.runtime.roots import new_root
for number in range(60):
    root = new_root()
    (root.path / "mine").write_text(str(number))
    assert (root.path / "mine").read_text() == str(number)
    root.release() if number % 2 else root.discard()  # every other one is killed, as it were
"""


def test_nobody_takes_a_root_that_was_just_made_and_none_is_left() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # roots hold sockets, whose paths must be
        start_and_sweep({"TMPDIR": short, "PATH": "/usr/bin:/bin"})


def start_and_sweep(environment: dict[str, str]) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", START], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [(p.returncode, text) for p, text in zip(running, said, strict=True)] == [(0, "")] * 6
    sweep = "from agentcore_rl_toolkit.runtime.roots import base_dir, sweep; sweep(base_dir()); print(*base_dir().iterdir())"
    done = subprocess.run([sys.executable, "-c", sweep], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("", "")
