"""Environments of deployed agents: when two are the same, and who waits for whom."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.agents import environments
from agentcore_rl_toolkit.runtime.agents.environments import Dependencies

from ..conftest import wait_for


def agent_in(folder: Path) -> Dependencies:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").touch()
    return Dependencies.beside(folder / "agent.py")


@pytest.mark.parametrize(
    ("requirements", "other"),
    [
        ("-r base.txt\n", "base.txt"),
        ("--requirement=base.txt\n", "base.txt"),
        ("-r first.txt\n", "base.txt"),
        ("-c base.txt\nx\n", "base.txt"),
        ("-e .\n", "setup.py"),
        ("./lib\n", "lib/code.py"),
        ("helper @ file:lib ; python_version > '3'\n", "lib/code.py"),
        ("-e ./lib[extra]\n", "lib/code.py"),
    ],
)
def test_what_is_named_by_requirements_is_part_of_the_key(tmp_path: Path, requirements: str, other: str) -> None:
    (tmp_path / "lib").mkdir()
    files = {"requirements.txt": requirements, "first.txt": "-r base.txt\n", "base.txt": "a==1\n", "setup.py": "1"}
    files["lib/code.py"] = "1"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    dependencies = agent_in(tmp_path)
    before = dependencies.key()
    assert dependencies.key() == before
    (tmp_path / other).write_text("changed==22\n")
    assert dependencies.key() != before


def test_local_packages_of_a_project_are_part_of_its_key(tmp_path: Path) -> None:
    project = '[project]\nname = "x"\nversion = "1"\n[tool.uv.sources]\nlib = { path = "../lib" }\n'
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "code.py").write_text("1")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "pyproject.toml").write_text(project)
    dependencies = agent_in(tmp_path / "agent")
    before = dependencies.key()
    (tmp_path / "lib" / "code.py").write_text("other")
    assert dependencies.key() != before


def test_folders_with_local_packages_share_nothing_and_others_do(tmp_path: Path) -> None:
    keys = {}
    for text in ("httpx>=0.2  # the client, see https://example.com/x\n", "-e .\n"):
        for name in ("one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "requirements.txt").write_text(text)
            keys[text, name] = agent_in(tmp_path / name).key()
    assert keys["-e .\n", "one"] != keys["-e .\n", "two"]
    assert len(set(keys.values())) == 3


SLOW_UV = """#!/bin/sh
echo "$$" >> {notes}/started
while [ ! -e {notes}/go ]; do sleep 0.05; done
/bin/mkdir -p {home}/bin
echo done >> {notes}/ended
"""


def test_a_restart_waits_for_what_a_killed_one_is_still_installing(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "requirements.txt").write_text("x\n")
    dependencies = agent_in(tmp_path / "agent")
    root = tmp_path / "environments"
    uv = tmp_path / "uv"
    uv.write_text(SLOW_UV.format(notes=tmp_path, home=root / dependencies.key()))
    uv.chmod(0o755)
    code = f"""
from pathlib import Path
from agentcore_rl_toolkit.runtime.agents import environments as e
print(e.build(e.Dependencies.beside(Path({str(tmp_path / "agent" / "agent.py")!r})), Path({str(root)!r}), uv={str(uv)!r}))
"""
    first = subprocess.Popen([sys.executable, "-c", code])
    wait_for((tmp_path / "started").exists)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(2.0)
    assert len((tmp_path / "started").read_text().split()) == 1  # it has not begun
    (tmp_path / "go").touch()
    assert second.wait(30) == 0
    assert len((tmp_path / "started").read_text().split()) == 3  # the killed one's first step, then both of its own
    assert (root / dependencies.key() / "complete").exists()


def test_waiting_for_another_build_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    (tmp_path / "requirements.txt").write_text("x\n")
    dependencies = agent_in(tmp_path)
    monkeypatch.setattr(environments, "BUILD_TIMEOUT_S", 0.5)
    with (tmp_path / f"{dependencies.key()}.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LocalRuntimeError, match="another process"):
            environments.build(dependencies, tmp_path, uv="/bin/true")


def test_an_agent_that_leaves_the_version_open_gets_the_one_that_runs_here(tmp_path: Path) -> None:
    for requirements, code, wanted in (
        ("click>=8\n", "import agentcore_rl_toolkit", True),
        ("click>=8\n", "from bedrock_agentcore import BedrockAgentCoreApp", False),
        ("Agentcore_RL.toolkit[client]  # ours\n", "", True),
        ("agentcore-rl-toolkit[core] ~= 0.2\n", "import agentcore_rl_toolkit", False),
        ("agentcore-rl-toolkit @ file:///somewhere/kit.whl\n", "import agentcore_rl_toolkit", False),
        ("./wheels/agentcore_rl_toolkit-0.3.0-py3-none-any.whl\n", "import agentcore_rl_toolkit", False),
    ):
        (tmp_path / "requirements.txt").write_text(requirements)
        (tmp_path / "tools.py").write_text(code)
        assert agent_in(tmp_path).toolkit is wanted, requirements


@pytest.mark.timeout(600)
@pytest.mark.system
def test_its_environment_has_exactly_that_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCORE_RL_CACHE", str(tmp_path / "cache"))
    environments.toolkit_wheel.cache_clear()
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "requirements.txt").write_text("click>=8\nagentcore-rl-toolkit\n")
    (agent / "agent.py").write_text("import agentcore_rl_toolkit\n")
    try:
        python = environments.build(Dependencies.beside(agent / "agent.py"), environments.cache_dir())
        source = Path(environments.__file__).read_bytes()
    finally:
        environments.toolkit_wheel.cache_clear()
    code = "from agentcore_rl_toolkit.runtime.agents import environments as e; print(e.__file__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    assert Path(found.stdout.strip()).is_relative_to(python.parents[1]), found.stderr
    assert Path(found.stdout.strip()).read_bytes() == source
