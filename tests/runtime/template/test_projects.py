"""Agents' files as they lie in projects: packages, `src` layouts, apps that no line runs, and what an edit changes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from agentcore_rl_toolkit.cli.training import stack
from agentcore_rl_toolkit.cli.training.stack import Stack, find_agent
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.isolation.project import Project
from agentcore_rl_toolkit.runtime.agents.environments import fits_here
from agentcore_rl_toolkit.runtime.launcher.handle import TemplateProcess

from ..conftest import Server
from ..test_roots import make_deep

SDK = """
from bedrock_agentcore.runtime import BedrockAgentCoreApp
app = BedrockAgentCoreApp()
"""
APP = """
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
app = Starlette()
app.add_route("/ping", lambda request: JSONResponse({{}}))
app.add_route("/invocations", lambda request: JSONResponse({{"tool": {tool}, "data": open("data.txt").read()}}), ["POST"])
"""
RUN = 'if __name__ == "__main__":\n    uvicorn.run(app)\n'
CODE = {
    "script": {"agent.py": "import tools" + APP.format(tool="tools.NAME") + RUN},
    "no run": {"agent.py": "import tools" + SDK},
    "relative": {"shop/agent.py": "from . import tools" + APP.format(tool="tools.NAME")},
    "package": {
        "shop/__init__.py": "",
        "shop/inner/__init__.py": "",
        "shop/inner/agent.py": "from ..tools import NAME\nimport shop.tools" + APP.format(tool="shop.tools.NAME") + RUN,
    },
    "src": {
        "pyproject.toml": '[project]\nname = "shop"\nversion = "1"\ndependencies = ["click"]\n',
        "src/shop/__init__.py": "",
        "src/shop/agent.py": "from .tools import NAME" + APP.format(tool="NAME") + RUN,
    },
    "beside src": {"agent.py": "from shop.tools import NAME" + APP.format(tool="NAME") + RUN},
}
TOOLS = {"script": "tools.py", "no run": "tools.py", "src": "src/shop/tools.py", "beside src": "src/shop/tools.py"}


def project(folder: Path, kind: str) -> Path:
    """Write a project of this kind; returns the agent's file."""
    files = {"data.txt": "in the project", TOOLS.get(kind, "shop/tools.py"): 'NAME = "hammer"\n', **CODE[kind]}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return next(folder.rglob("agent.py"))


@pytest.mark.parametrize("kind", [kind for kind in CODE if kind != "package"])
async def test_an_agent_is_loaded_as_a_module_of_its_project(kind: str, tmp_path: Path) -> None:
    template = TemplateProcess(script=project(tmp_path, kind), env=dict(os.environ), log_path=tmp_path / "log")
    await template.start()
    assert template.mode == "fork"
    await template.close()


def test_a_package_answers_sees_its_projects_files_and_serves_new_code_after_a_reload(tmp_path: Path) -> None:
    agent = project(tmp_path / "work", "package")
    server = Server(tmp_path, agent=agent)
    try:
        assert server.invoke({}) == {"tool": "hammer", "data": "in the project"}
        old = new_session_id()
        server.invoke({}, old)
        (tmp_path / "work/shop/tools.py").write_text('NAME = "saw"\n')
        assert server.view.reload("probe") == server.arn
        assert [server.invoke({}, session)["tool"] for session in (old, new_session_id())] == ["hammer", "saw"]
    finally:
        server.process.terminate()
        server.process.wait()


def test_the_digest_of_a_project_has_the_files_of_a_deep_folder(tmp_path: Path) -> None:
    agent, left = project(tmp_path, "src"), tmp_path / "src" / "left"
    make_deep(left)
    before = Project.of(agent).digest()
    (left / "deep" / "tools.py").touch()
    assert Project.of(agent).digest() != before
    subprocess.run(["rm", "-rf", str(left)], check=True)  # the removal by pytest is recursive


def test_commands_load_a_changed_agent_anew_and_say_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class View:
        def __init__(self, url: str) -> None: ...

        def reload(self, name: str, **options: object) -> None:
            loaded.append(name)

    loaded: list[str] = []
    agent = project(tmp_path, "src")
    places = dict.fromkeys(("agent_arn", "store", "runtime_url", "gateway_url", "gateway_admin_key", "policy_url"), "")
    mine = Stack(pid=1, agent=str(agent), model=None, digest=Project.of(agent).digest(), **places)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentcore_rl_toolkit.runtime.remote.RuntimeView", View)
    (tmp_path / stack.FOLDER).mkdir()
    newer = mine
    for name, text in (("tools.py", 'NAME = "saw"\n'), ("prompt.md", "Be brief."), ("prompt.md", "Be long.")):
        before = newer.renewed()
        assert before is newer
        (tmp_path / "src/shop" / name).write_text(text)
        newer = before.renewed()
    assert newer.renewed() is newer
    assert json.loads((tmp_path / stack.FOLDER / "up.json").read_text())["digest"] == newer.digest
    assert loaded == ["agent"] * 3
    said = "src/shop/agent.py or what it imports has changed: `agentcore-rl up` loads it again\n"
    assert capsys.readouterr().err == said * 3


def test_a_nested_package_is_found_up_to_its_top(tmp_path: Path) -> None:
    for folder in (tmp_path / "shop", tmp_path / "shop" / "agents", tmp_path / "shop" / "agents" / "math"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    agent = tmp_path / "shop" / "agents" / "math" / "agent.py"
    agent.write_text("")
    found = Project.of(agent)
    assert (found.root, found.package, found.module) == (tmp_path, "shop.agents.math", "shop.agents.math.agent")
    assert Project.of(tmp_path / "alone.py").module == "alone"


def test_an_agent_is_named_by_file_or_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent = project(tmp_path, "src")
    for name in ("src/shop/agent.py", "shop.agent", "shop.agent:app"):
        assert find_agent(name) == agent
    with pytest.raises(ConfigError, match="serves its `app`"):
        find_agent("shop.agent:other")
    agent.write_text(agent.read_text().replace("app = ", "other = "))
    assert find_agent("shop.agent:other") == agent
    assert find_agent("shop.absent") == tmp_path / "shop.absent"


@pytest.mark.parametrize("kind", ["src", "script"])
def test_requirements_of_the_project_decide_over_the_environment(kind: str, tmp_path: Path) -> None:
    agent = project(tmp_path, kind)
    assert fits_here(agent)
    file = Project.of(agent).dependencies or tmp_path / "requirements.txt"
    assert file.parent == tmp_path
    file.write_text(file.read_text().replace("click", "not-there") if file.exists() else "not-there\n")
    assert not fits_here(agent)
