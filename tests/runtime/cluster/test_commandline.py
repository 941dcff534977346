"""`runtime serve --ray` where it cannot work; `/_local/nodes` where there is no cluster; a folder on its way to the nodes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit._installation import install_command
from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.cluster import bundles

from ..conftest import AGENTS, Server


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_names_what_to_install() -> None:
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--ray", "auto"]
    command += ["--agent", f"probe={AGENTS / 'probe.py'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert install_command("ray") in done.stderr
    assert "Traceback" not in done.stderr


def test_runtime_on_one_machine_has_no_nodes(start_server: Callable[..., Server]) -> None:
    with pytest.raises(LocalRuntimeError, match="not found"):
        start_server().view.get("/_local/nodes")


def test_an_agents_folder_arrives_as_it_was_without_what_is_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    for name in ("agent.py", "data/rows.jsonl", ".env", "__pycache__/agent.pyc", "own/pyvenv.cfg", "own/lib.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    there = tmp_path / "node"
    bundles.unpack(bundles.pack(folder), there)
    assert sorted(p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()) == [
        "agent.py",
        "data/rows.jsonl",
    ]
