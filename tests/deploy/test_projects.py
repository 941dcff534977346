"""What is packed of a project: a module below `src`, a Dockerfile where there is none, and never a key or an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.deploy.artifact import files_of, requirements_of, stage, vendor
from agentcore_rl_toolkit.deploy.score_ready import READY_FILE
from agentcore_rl_toolkit.deploy.settings import Settings
from agentcore_rl_toolkit.errors import ConfigError
from serving import wait_for

from .conftest import deployment

AGENT = """
from agentcore_rl_toolkit import AgentCoreRLApp

from .prompts import load
from shop.tools import price

app = AgentCoreRLApp()


@app.rollout_entrypoint
def run(payload):
    return {"rewards": 1.0, "prompt": load(), "price": price()}


if __name__ == "__main__":
    app.run(port=int(__import__("os").environ["PORT"]))
"""
SECRET = (
    ".env",
    ".env.local",
    "server.pem",
    "id_rsa",
    "src/shop/api.key",
    ".git/config",
    "runs/x/config.json",
    ".aws/credentials",
)
PROMPTS = """
import pathlib


def load():
    return (pathlib.Path(__file__).parent / "p.md").read_text()
"""
ANSWERS = ("train.jsonl", "eval.jsonl", "data/rows.jsonl", "score.py")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a package below src, prompts, data, and everything that must stay here."""
    files = {
        "pyproject.toml": '[project]\nname = "shop"\nversion = "1"\ndependencies = ["httpx"]\n',
        "src/shop/__init__.py": "",
        "src/shop/agent.py": AGENT,
        "src/shop/tools.py": "def price():\n    return 3\n",
        "src/shop/prompts/__init__.py": PROMPTS,
        "src/shop/prompts/p.md": "Be kind.",
        "data/prices.csv": "a,1\n",
        "train.toml": 'data = "data/rows.jsonl"\nscore = "score.py:score"\n',
        **dict.fromkeys((*SECRET, *ANSWERS), "planted"),
    }
    for name, text in files.items():
        (tmp_path / "shop" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shop" / name).write_text(text)
    return tmp_path / "shop"


@pytest.mark.parametrize("form", ["image", "code"])
def test_a_dry_run_lists_every_file_and_no_secret(
    project: Path, form: str, monkeypatch: pytest.MonkeyPatch, image_builder: Path
) -> None:
    monkeypatch.chdir(project)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(project / "none"))
    words = ["--agent", "shop.agent", "--name", "shop", "--bucket", "my-records", "--smoke", "none", "--dry-run"]
    done = CliRunner().invoke(
        cli, ["deploy", *words, *(["--code"] if form == "code" else []), "--exclude", "data/prices.csv"]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    packed = {line.removeprefix("would pack ") for line in done.output.splitlines() if line.startswith("would pack ")}
    written = {"agentcore_rl_start.py", *(("Dockerfile", "agentcore_rl_requirements.txt") if form == "image" else ())}
    sources = {"agent.py", "tools.py", "__init__.py", "prompts/__init__.py", "prompts/p.md"}
    assert packed == {"pyproject.toml", "train.toml", *written, *(f"src/shop/{name}" for name in sources)}
    if form == "image":
        image_builder.write_text("#!/bin/sh\nexit 1\n")
        monkeypatch.setenv("PATH", str(image_builder.parent))
        done = CliRunner().invoke(cli, ["deploy", *words])
        assert "neither Docker nor Podman answers here" in str(done.exception)


def test_a_staged_module_runs_as_it_would_on_aws(project: Path, tmp_path: Path) -> None:
    staged = stage(
        project,
        tmp_path / "staged",
        entry="agentcore_rl_start.py",
        module="shop.agent",
        import_paths=["src", "src/shop", "."],
    )
    with (tmp_path / "log").open("wb") as log:
        port = 18000 + (hash(str(tmp_path)) % 2000)
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "agentcore_rl_start.py"],
            cwd=staged,
            env={"PATH": "/usr/bin:/bin", "PORT": str(port), "HOME": str(tmp_path)},
            stdout=log,
            stderr=log,
        )
        try:

            def answered() -> bool:
                try:
                    return httpx.get(f"http://127.0.0.1:{port}/ping").is_success
                except httpx.HTTPError:
                    return False

            wait_for(answered, process=process)
            reply = httpx.post(f"http://127.0.0.1:{port}/invocations", json={"prompt": "x"}, timeout=60).json()
        finally:
            process.terminate()
            process.wait(30)
    assert (reply["prompt"], reply["price"]) == ("Be kind.", 3)


def test_a_project_without_a_list_of_packages_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "pyproject.toml").unlink()
    with pytest.raises(ConfigError, match=r"neither requirements\.txt nor pyproject\.toml"):
        stage(project, tmp_path / "staged", entry="src/shop/agent.py", python="3.13")


def test_dependencies_that_cannot_be_read_are_refused(project: Path) -> None:
    for text in ('[tool.poetry.dependencies]\nhttpx = "*"\n', '[project]\nname = "x"\ndynamic = ["dependencies"]\n'):
        (project / "pyproject.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"no dependencies in \[project\]"):
            requirements_of(project)


def test_a_package_may_be_named_like_the_folder_of_runs(project: Path) -> None:
    package = project / "src" / "shop" / "runs" / "table.py"
    package.parent.mkdir()
    package.write_text("")
    run = project / "src" / "runs" / "one" / "held_out.jsonl"
    run.parent.mkdir(parents=True)
    run.write_text("answers")
    packed = files_of(project)
    assert package in packed
    assert run not in packed


def test_a_dockerfile_of_the_project_is_kept(project: Path, tmp_path: Path) -> None:
    (project / "Dockerfile").write_text("FROM mine\n")
    staged = stage(project, tmp_path / "staged", entry="x.py", module="shop.agent", python="3.13")
    assert (staged / "Dockerfile").read_text() == "FROM mine\n"
    assert not any("agentcore_rl_requirements" in path.name for path in files_of(staged))


@pytest.mark.parametrize("package", ["aws-opentelemetry-distro>=0.10", "AWS_OpenTelemetry.Distro"])
@pytest.mark.parametrize("score_ready", [False, True])
def test_an_agent_with_awss_tracing_starts_with_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score_ready: bool, package: str
) -> None:
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace('["httpx"]', f'["{package}"]'))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(project / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    staged = stage(project, tmp_path / "staged", entry="start.py", module="shop.agent", python="3.13")
    assert 'CMD ["opentelemetry-instrument", "python", "start.py"]' in (staged / "Dockerfile").read_text()
    what = Settings(
        name="shop",
        folder=staged,
        entry="start.py",
        code=True,
        bucket="archives",
        platform="linux/arm64",
        score_ready=score_ready,
    )
    code = deployment(what, rehearse=True)._artifact()["codeConfiguration"]
    assert code["entryPoint"] == ["opentelemetry-instrument", READY_FILE if score_ready else "start.py"]


def test_the_wheel_replaces_a_pinned_version_and_only_in_the_project(tmp_path: Path) -> None:
    other = '[tool.hatch.envs.default]\ndependencies = ["pytest"]\n\n[project]\nname = "x"\nversion = "1"\n'
    now = version("agentcore-rl-toolkit")
    for given, wanted in (
        ('["agentcore-rl-toolkit[sagemaker]==0.2.0", "httpx"]', [f"agentcore-rl-toolkit[sagemaker]=={now}", "httpx"]),
        ('["agentcore-rl-toolkit-extra"]', [f"agentcore-rl-toolkit=={now}", "agentcore-rl-toolkit-extra"]),
    ):
        (tmp_path / "pyproject.toml").write_text(f"{other}dependencies = {given}\n")
        vendor(tmp_path)
        project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
        assert project["project"]["dependencies"] == wanted
        assert project["tool"]["hatch"]["envs"]["default"]["dependencies"] == ["pytest"]


def test_a_project_of_another_tool_gets_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("strands-agents\nagentcore-rl-toolkit==0.2.0\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "shop"\nversion = "1"\ndependencies = ["strands-agents"]\n\n'
        '[tool.uv.sources]\nother = { path = "o" }\n'
    )
    vendor(tmp_path)
    once = [(tmp_path / name).read_text() for name in ("requirements.txt", "pyproject.toml")]
    vendor(tmp_path)
    assert [(tmp_path / name).read_text() for name in ("requirements.txt", "pyproject.toml")] == once
    [wheel] = (tmp_path / "wheels").iterdir()
    assert once[0].splitlines() == ["strands-agents", f"./wheels/{wheel.name}"]
    project = tomllib.loads(once[1])
    assert project["project"]["dependencies"] == [f"agentcore-rl-toolkit=={wheel.name.split('-')[1]}", "strands-agents"]
    assert project["tool"]["uv"]["sources"]["agentcore-rl-toolkit"] == {"path": f"wheels/{wheel.name}"}
    assert json.dumps(project["tool"]["uv"]["sources"]["other"]) == '{"path": "o"}'
    with pytest.raises(ConfigError, match="neither"):
        vendor(tmp_path / "wheels")
