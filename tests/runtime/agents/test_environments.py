"""Environments of deployed agents: when two are the same, and who waits for whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.runtime.agents import environments

UV = """#!/bin/sh
echo "$@" >> {notes}
[ "$1" != venv ] || {{ mkdir -p "$5/bin"; touch "$5/bin/python"; }}
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a uv that only creates folders."""
    uv, notes = tmp_path / "uv", tmp_path / "notes"
    uv.write_text(UV.format(notes=notes))
    uv.chmod(0o755)
    monkeypatch.setattr(environments, "find_uv", lambda: str(uv))
    return notes


def build(folder: Path) -> Path:
    (folder / "agent.py").touch()
    return environments.build(folder / "agent.py", folder.parent / "environments")


def test_folders_with_local_packages_share_nothing_and_others_do(tmp_path: Path, notes: Path) -> None:
    keys = {}
    for text in ("httpx>=0.2  # the client, see https://example.com/x\n", "-e .\n"):
        for name in ("one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "requirements.txt").write_text(text)
            keys[text, name] = build(tmp_path / name)
    assert keys["-e .\n", "one"] != keys["-e .\n", "two"]
    assert len(set(keys.values())) == 3


def test_uv_brings_an_environment_up_to_date_at_each_deploy(tmp_path: Path, notes: Path) -> None:
    (tmp_path / "agent").mkdir()
    requirements = tmp_path / "agent" / "requirements.txt"
    requirements.write_text("-e .\n")
    first, again = (build(tmp_path / "agent") for _ in range(2))
    assert first == again
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["venv", "pip", "pip"]
    requirements.write_text("-e .[more]\n")
    assert build(tmp_path / "agent") != first


def test_an_agent_that_leaves_the_version_open_gets_the_one_that_runs_here(tmp_path: Path, notes: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    for requirements, code, wanted in (
        ("click>=8\n", "import agentcore_rl_toolkit", True),
        ("click>=8\n", "from bedrock_agentcore import BedrockAgentCoreApp", False),
        ("Agentcore_RL.toolkit[client]  # ours\n", "", True),
        ("agentcore-rl-toolkit[core] ~= 0.2\n", "import agentcore_rl_toolkit", False),
        ("agentcore-rl-toolkit @ file:///somewhere/kit.whl\n", "import agentcore_rl_toolkit", False),
        ("./wheels/agentcore_rl_toolkit-0.3.0-py3-none-any.whl\n", "import agentcore_rl_toolkit", False),
    ):
        (folder / "requirements.txt").write_text(requirements)
        (folder / "tools.py").write_text(code)
        notes.unlink(missing_ok=True)
        build(folder)
        assert ("agentcore-rl-toolkit @" in notes.read_text()) is wanted, requirements


@pytest.mark.parametrize(
    ("file", "package", "served", "calls"),
    [
        ("requirements.txt", "click", False, "venv pip"),  # the lock belongs to a pyproject.toml
        ("requirements.txt", "click", True, "venv pip+"),
        ("pyproject.toml", "click", False, "venv sync"),
        ("pyproject.toml", "click", True, "venv sync pip+"),
        ("pyproject.toml", "agentcore-rl-toolkit", True, "venv sync"),
    ],
)
def test_a_lock_has_all_packages_but_the_toolkit(
    tmp_path: Path, notes: Path, file: str, package: str, served: bool, calls: str
) -> None:
    (tmp_path / file).write_text(package if file.endswith(".txt") else f'[project]\ndependencies = ["{package}"]\n')
    (tmp_path / "uv.lock").touch()
    environments.build(tmp_path / "agent.py", tmp_path / "environments", toolkit=served)
    lines = notes.read_text().splitlines()
    assert [line.split()[0] + "+" * ("agentcore-rl-toolkit @" in line) for line in lines] == calls.split()


@pytest.mark.parametrize(
    ("requirements", "fits"),
    [
        ("click>=8\npytest-xdist[psutil]\n", True),
        ("click==0.1\n", False),
        ("pytest[no-such-package]\nno-such-package-here\n", False),
        ("-e .\n", False),
        ("./not-there-0.1-py3-none-any.whl\n", False),
    ],
)
def test_an_agent_runs_in_this_environment_if_that_has_its_packages(
    tmp_path: Path, requirements: str, fits: bool
) -> None:
    (tmp_path / "requirements.txt").write_text(requirements)
    assert environments.fits_here(tmp_path / "agent.py") is fits


def test_a_check_of_the_packages_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "uv"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(environments, "find_uv", lambda: str(slow))
    monkeypatch.setattr(environments, "CHECK_TIMEOUT_S", 0.2)
    (tmp_path / "requirements.txt").write_text("click\n")
    assert environments.fits_here(tmp_path / "agent.py") is False


def test_serve_builds_the_environment_that_an_agents_files_ask_for(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("./not-there-0.1-py3-none-any.whl\n")
    agent = shutil.copy(Path(__file__).parents[1] / "deployable/bare.py", tmp_path / "agent.py")
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--agent", f"a={agent}"]
    environment = {**os.environ, "AGENTCORE_RL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "not-there-0.1-py3-none-any.whl" in done.stderr
    assert "uv pip install" in done.stderr


@pytest.mark.timeout(600)
@pytest.mark.system
def test_its_environment_has_exactly_that_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCORE_RL_CACHE", str(tmp_path / "cache"))
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "requirements.txt").write_text("click>=8\nagentcore-rl-toolkit\n")
    (agent / "agent.py").write_text("import agentcore_rl_toolkit\n")
    python = environments.build(agent / "agent.py")
    source = Path(environments.__file__).read_bytes()
    code = "from agentcore_rl_toolkit.runtime.agents import environments as e; print(e.__file__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    assert Path(found.stdout.strip()).is_relative_to(python.parents[1]), found.stderr
    assert Path(found.stdout.strip()).read_bytes() == source
