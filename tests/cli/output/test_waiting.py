"""What takes long says so."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.cli.output.terminal import Waiting


def test_what_takes_long_says_so_once_and_then_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((100.0, 100.5, 102.9, 103.1, 110.0, 118.2, 119.0))
    wait = Waiting("loading agent.py", clock=lambda: next(times))
    for _ in range(6):
        wait()
    assert capsys.readouterr().err == "still loading agent.py (3 s)\nstill loading agent.py (18 s)\n"
