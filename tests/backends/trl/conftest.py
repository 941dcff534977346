"""An environment with TRL: this one if it has it, else a small one on top of it, built once under `.venvs/`."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venvs" / "trl-test"
WANTED = ["trl>=1.16,<2", "peft>=0.15"]
BUILD_LIMIT_S = 240


@pytest.fixture(scope="session")
def trl_python() -> str:
    """Path of a Python that can import TRL and this package; skips, saying why, where none can be made."""
    if importlib.util.find_spec("trl") and importlib.util.find_spec("peft"):
        return sys.executable
    python = ENVIRONMENT / "bin" / "python"
    ENVIRONMENT.parent.mkdir(exist_ok=True)
    with open(ENVIRONMENT.parent / "trl-test.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = ENVIRONMENT / "ready"
        stamp = f"{sysconfig.get_paths()['purelib']} {' '.join(WANTED)}"
        if not ready.exists() or ready.read_text() != stamp:
            trouble = _build(python)
            if trouble:
                pytest.skip(f"no environment with TRL could be made ({' '.join(WANTED)}): {trouble}")
            ready.write_text(stamp)
    return str(python)


def _build(python: Path) -> str | None:
    """Make the environment: what this one has stays visible through a .pth line, only TRL's own needs are installed."""
    if os.environ.get("AGENTCORE_RL_NO_INSTALL"):
        return "AGENTCORE_RL_NO_INSTALL is set"
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
        [*f"{python} -m pip install -q --disable-pip-version-check -c".split(), str(ROOT / "constraints.txt"), *WANTED],
    ]
    for number, command in enumerate(commands):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"{' '.join(command[1:4])} took longer than {BUILD_LIMIT_S} s"
        if done.returncode != 0:
            return (done.stderr or done.stdout)[-400:]
        if number == 0:
            site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
            (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return None
