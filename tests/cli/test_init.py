"""`agentcore-rl init`: what it writes passes its test and runs as it is, with every framework."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.init import FRAMEWORKS, command, write
from agentcore_rl_toolkit.deploy.score_ready import STARTER, start_command
from agentcore_rl_toolkit.errors import ConfigError


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_new_agent_has_everything(tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["shop", "--framework", framework], catch_exceptions=False)
    folder = tmp_path / "shop"
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "agent.py",
        "tools.py",
        "reward.py",
        "train.jsonl",
        "eval.jsonl",
        "train.toml",
        "Dockerfile",
        "README.md",
    }
    assert len(list((folder / "wheels").glob("agentcore_rl_toolkit-*.whl"))) == 1
    assert "{{" not in "".join(path.read_text() for path in folder.iterdir() if path.is_file() and path.suffix != ".py")
    assert "agentcore-rl-toolkit" not in (folder / "requirements.txt").read_text()
    for said in [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]:
        assert "/python -m pytest shop" in f"/{said}" or "/agentcore-rl train --agent shop/agent.py" in f"/{said}"


def test_a_new_agent_starts_with_awss_tracing_if_its_packages_have_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "shop", "plain")
    (words,) = re.findall(r"^CMD (.*)$", (folder / "Dockerfile").read_text(), re.MULTILINE)
    (tmp_path / "python").write_text("#!/bin/sh\necho started $*\n")
    (tmp_path / "opentelemetry-instrument").write_text('#!/bin/sh\necho traced $*; exec "$@"\n')
    (tmp_path / "python").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for mode, said in ((0o644, "started agent.py\n"), (0o755, "traced python agent.py\nstarted agent.py\n")):
        (tmp_path / "opentelemetry-instrument").chmod(mode)
        assert subprocess.run(json.loads(words), env=env, check=True, capture_output=True, text=True).stdout == said
    ready = subprocess.run(start_command(json.loads(words)), env=env, check=True, capture_output=True, text=True)
    assert ready.stdout.endswith(f"started -m {STARTER} agent.py\n")


def test_a_new_agent_passes_its_own_test_inside_a_project_with_settings_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib --absent'\n"
    )
    write(tmp_path / "shop", "plain")
    tested = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "shop", cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout


def test_what_is_evaluated_is_never_trained_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "shop", "plain")
    train, held_out = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "eval")
    )
    assert len({row["id"] for row in train + held_out}) == len(train) + len(held_out) == 528
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    before = (folder / "train.jsonl").read_bytes()
    assert run("rows.py", cwd=folder).returncode == 0
    assert (folder / "train.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["7up", "a b", ".hidden", "a" * 49])
def test_a_name_that_cannot_be_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        write(tmp_path / name, "plain")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        write(tmp_path / "shop", "plain")
    assert [path.name for path in (tmp_path / "shop").iterdir()] == ["mine.txt"]
