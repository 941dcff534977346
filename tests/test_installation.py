"""The wheel of the version that runs here, and the commands that errors name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, version
from pathlib import Path

import pytest

from agentcore_rl_toolkit import _installation
from agentcore_rl_toolkit._installation import install_command, missing_extra, write_wheel


def test_the_wheel_holds_what_runs_here_and_nothing_compiled(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a")
    names = zipfile.ZipFile(wheel).namelist()
    ours = Path(_installation.__file__).parent
    modules = {f"agentcore_rl_toolkit/{p.relative_to(ours).as_posix()}" for p in ours.rglob("*.py")}
    assert modules <= set(names)
    for needed in ("_examples/strands_math_agent/arithmetic_app.py", "policy/weights/model.safetensors", "py.typed"):
        assert f"agentcore_rl_toolkit/{needed}" in names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert write_wheel(tmp_path / "b").read_bytes() == wheel.read_bytes()


@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_wheel_installs_into_an_empty_environment_and_its_command_works(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    uv, home = [sys.executable, "-m", "uv"], tmp_path / "home"
    python = str(home / "bin" / "python")
    for command in (
        ["venv", "-q", "-p", sys.executable, str(home)],
        ["pip", "install", "-q", "-p", python, str(wheel)],
    ):
        subprocess.run([*uv, *command], check=True, timeout=240, capture_output=True)
    run = [str(home / "bin" / "agentcore-rl"), "version"]
    assert subprocess.run(run, capture_output=True, text=True, timeout=300).stdout.strip() == version(
        _installation.NAME
    )
    # What it lacks is to be had from where it came from, not from the index.
    done = subprocess.run([run[0], "gateway", "serve"], capture_output=True, text=True, timeout=300)
    assert f"pip install 'agentcore-rl-toolkit[gateway] @ {wheel.as_uri()}'" in done.stderr
    check = [*uv, "pip", "check", "-q", "-p", python]
    assert subprocess.run(check, capture_output=True, timeout=300).returncode == 0


@pytest.mark.nightly  # installs torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_agent_is_made_and_trained_from_the_wheel_alone(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith(("AWS_", "AGENTCORE_"))}
    environment |= {"PATH": f"{home / 'bin'}:/usr/bin:/bin"}

    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=work, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", str(home))
    # pip: it knows where this machine has torch for CPUs.
    constraints = Path(__file__).parents[1] / "constraints.txt"
    pip = (str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile", "-c", str(constraints))
    run(*pip, f"{_installation.NAME}[local] @ {wheel.as_uri()}", "pytest")
    program, python = str(home / "bin" / "agentcore-rl"), str(home / "bin" / "python")
    assert run(program, "--version").strip() == version(_installation.NAME)
    run(program, "init", "shop", "--framework", "strands")
    run(python, "-m", "pytest", "-q", "shop")
    rows = (work / "shop" / "eval.jsonl").read_text().splitlines()[:4]
    (work / "few.jsonl").write_text("\n".join(rows) + "\n")
    words = ("--agent", "shop/agent.py", "--data", "shop/train.jsonl", "--eval-data", "few.jsonl", "--out", "run")
    run(program, "train", *words, "--steps", "1", "--groups", "2", "--rollouts", "2")
    summary = json.loads((work / "run" / "summary.json").read_text())
    assert (summary["rollouts"], summary["lost_rollouts"]) == (2 * 4 + 2 * 2, 0)
    where = run(python, "-c", "import sys, agentcore_rl_toolkit as a; print(a.__file__, *sys.path)")
    assert str(Path(_installation.__file__).parents[1]) not in where


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": "file:///src/kit", "dir_info": {"editable": True}}, "pip install -e '/src/kit[trl]'"),
        ({"url": "file:///src/my%20kit", "dir_info": {}}, "pip install '/src/my kit[trl]'"),
        (
            {"url": "file:///w/agentcore_rl_toolkit-0.3.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'agentcore-rl-toolkit[trl] @ file:///w/agentcore_rl_toolkit-0.3.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/kit.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'agentcore-rl-toolkit[trl] @ git+https://host/kit.git@abc'",
        ),
        (None, "pip install 'agentcore_rl_toolkit-9.9-py3-none-any.whl[trl]'    # the wheel that `make wheel` builds"),
    ],
)
def test_an_extra_is_installed_from_where_the_toolkit_came_from(
    source: dict[str, object] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "agentcore_rl_toolkit-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentcore-rl-toolkit\nVersion: 9.9\n")
    if source is not None:
        (info / "direct_url.json").write_text(json.dumps(source))
    monkeypatch.setattr(_installation, "distribution", lambda name: Distribution.at(info))
    install_command.cache_clear()
    try:
        assert install_command("trl") == command
        assert str(missing_extra("TRL is missing", "trl")) == f"TRL is missing. Install it with:\n    {command}"
    finally:
        install_command.cache_clear()
