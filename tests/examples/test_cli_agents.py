"""The coding agents' example without the programs: the payload, the reward, and what a program's end means.

`tests/gateway/test_coding_agents.py` runs the programs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from .loading import EXAMPLES, modules_of

EXAMPLE = EXAMPLES / "cli_agents"
MODULES = ("programs", "task", "reward")


@pytest.fixture(scope="module")
def cli() -> Iterator[SimpleNamespace]:
    with modules_of(EXAMPLE, *MODULES) as found:
        yield found


def run(
    cli: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float = 60.0
) -> tuple[str, Path]:
    """Run a script in the place of Codex."""
    program = folder / "bin" / "codex"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    workspace, home = folder / "workspace", folder / "home"
    cli.task.Task(prompt="x", files={"src/note.txt": "todo\n"}).lay_out(workspace, home)
    model = cli.programs.Connection(base_url="http://127.0.0.1:1/s/v1", api_key="secret", model_id="policy")
    return asyncio.run(cli.programs.run_program("codex", "do {key}", workspace, home, model, limit_s)), workspace


def test_a_program_gets_address_key_and_task_and_works_in_the_workspace(
    cli: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        'for last; do :; done; echo "$last $GATEWAY_KEY"; grep base_url ~/.codex/config.toml; echo done > src/note.txt'
    )
    output, workspace = run(cli, tmp_path, monkeypatch, script)
    assert output.splitlines() == ["do {key} secret", 'base_url = "http://127.0.0.1:1/s/v1"']
    task = cli.task.Task.of({"prompt": "x", "files": {"src/note.txt": ""}, "_rollout": {}})
    assert task.read_back(workspace) == {"src/note.txt": "done\n"}
    for check, wanted in (("grep -q done src/note.txt", 1.0), ("grep -q todo src/note.txt", 0.0)):
        assert asyncio.run(cli.reward.reward(workspace, check)) == wanted


def test_a_program_out_of_time_is_ended_with_what_it_started_and_is_no_error(
    cli: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, workspace = run(cli, tmp_path, monkeypatch, "sleep 600 & wait", limit_s=1.0)
    assert output == ""
    assert workspace.is_dir()


@pytest.mark.parametrize(
    ("said", "ran_out_of"),
    [
        ("API Error: 400 prompt is too long: 45703 tokens > 1024 maximum", "context"),
        ("ERROR: Codex ran out of room in the model's context window.", "context"),
        ("this session may make 4 model calls, all are used", "turns"),
        ("503 the engine is gone", None),
    ],
)
def test_a_program_that_fails_says_whether_the_policy_ran_out(
    cli: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, ran_out_of: str | None
) -> None:
    with pytest.raises(RuntimeError, match="ended with code 3") as failed:
        run(cli, tmp_path, monkeypatch, f'echo "{said}"; exit 3')
    assert failed.value.ran_out_of == ran_out_of
