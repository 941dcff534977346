"""`runtime serve --ray` where it cannot work; `/_local/nodes` where there is no cluster; a folder on its way to the nodes."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from agentcore_rl_toolkit._installation import install_command
from agentcore_rl_toolkit.errors import ConfigError, LocalRuntimeError
from agentcore_rl_toolkit.runtime.cluster.bundle import pack, pack_project, unpack
from agentcore_rl_toolkit.runtime.cluster.cluster import Cluster, _capacity
from agentcore_rl_toolkit.runtime.config import RuntimeConfig

from ..conftest import AGENTS, Server


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_names_what_to_install() -> None:
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--ray", "auto"]
    command += ["--agent", f"probe={AGENTS / 'probe.py'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert install_command("ray") in done.stderr
    assert "Traceback" not in done.stderr


def test_runtime_on_one_machine_has_no_nodes(server: Server) -> None:
    with pytest.raises(LocalRuntimeError, match="not found"):
        server.view.get("/_local/nodes")


def test_an_agents_folder_arrives_as_it_was_without_what_is_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    for name in ("agent.py", "data/rows.jsonl", ".env", "__pycache__/agent.pyc", "own/pyvenv.cfg", "own/lib.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "nothing").symlink_to("gone")
    (folder / "round").symlink_to(folder)
    (folder / "prompt.md").symlink_to(tmp_path / "shared.md")
    (tmp_path / "shared.md").write_text("prompt.md")
    there = tmp_path / "node"
    unpack(pack(folder), there)
    assert sorted(p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()) == [
        "agent.py",
        "data/rows.jsonl",
        "prompt.md",
    ]
    assert (there / "prompt.md").read_text() == "prompt.md"


def test_an_agent_in_a_package_arrives_with_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"shop/__init__.py": "", "shop/common.py": "X = 1", "shop/agents/__init__.py": "", "data": "x" * 5_000}
    files |= {"shop/agents/agent.py": "from ..common import X", "shop/pyproject.toml": "[project]"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".git").mkdir()
    agent = tmp_path / "shop/agents/agent.py"
    found, data = pack_project(agent)
    assert found == "shop/agents/agent.py"
    unpack(data, tmp_path / "node")
    assert (tmp_path / "node/shop/common.py").read_text() == "X = 1"
    monkeypatch.setattr("agentcore_rl_toolkit.runtime.cluster.bundle.MAX_BUNDLE_BYTES", 3)
    with pytest.raises(ConfigError, match="too much to send"):
        pack_project(agent)


def test_a_cluster_that_does_not_answer_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    late, waited = threading.Event(), []
    ray = ModuleType("ray")
    ray.init = lambda **_: waited.append(late.wait(5))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("agentcore_rl_toolkit.runtime.cluster.cluster.CONNECT_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=r"Ray cluster at 10\.0\.0\.1:6379: it does not answer within 0\.1 s"):
        asyncio.run(Cluster(RuntimeConfig(), "10.0.0.1:6379").start())
    assert waited == []
    late.set()


@pytest.mark.parametrize(
    ("cpus", "memory_mb", "session_mb", "capacity"),
    [(0.01, 9e9, None, 1), (2, 9e9, None, 100), (4, 640, None, 8), (4, 640, 128, 4), (0.1, 640, 1, 5), (1, 1, None, 1)],
)
def test_a_node_has_room_for_its_share(cpus: float, memory_mb: float, session_mb: int | None, capacity: int) -> None:
    resources = {"CPU": cpus, "memory": memory_mb * 2**20}
    assert _capacity(resources, session_mb and session_mb * 2**20) == capacity
    assert _capacity({"CPU": cpus}, None) == max(1, int(50 * cpus))
