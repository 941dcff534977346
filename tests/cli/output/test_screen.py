"""Help fits a screen, what summarises has `--json`, and what takes long says so: every command of the command line is walked."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.cli.output.waiting import Waiting

LINES, COLUMNS = 24, 100
# What serves until it is stopped, hands on text as it is, or writes files: nothing to summarise.
WITHOUT_JSON = {
    "agentcore-rl completion",
    "agentcore-rl gateway serve",
    "agentcore-rl init",
    "agentcore-rl policy serve",
    "agentcore-rl policy tinker",
    "agentcore-rl policy vllm",
    "agentcore-rl runtime logs",
    "agentcore-rl runtime serve",
    "agentcore-rl view",
    "agentcore-rl up",
    "agentcore-rl version",
}


def walk(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            found = context.command.get_command(context, name)
            assert found is not None
            yield from walk(click.Context(found, info_name=name, parent=context))


def every() -> list[click.Context]:
    options = {"terminal_width": COLUMNS, "max_content_width": COLUMNS, "help_option_names": ["-h", "--help"]}
    return list(walk(click.Context(cli, info_name="agentcore-rl", **options)))  # type: ignore[arg-type]


COMMANDS = {context.command_path: context for context in every()}


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_of_every_command_fits_a_screen(path: str) -> None:
    lines = COMMANDS[path].get_help().splitlines()
    assert len(lines) <= LINES, "put fewer options into `sections` of its `click.command(cls=Command, ...)`"
    assert not any(re.search(r"[a-z,]\.\.\.$", line) for line in lines), "give it a `short_help` that is not cut off"
    examples = ("agentcore-rl ", "[env: ")  # a command to copy stays in one line
    assert all(len(line) <= COLUMNS or line.strip().startswith(examples) for line in lines)


def test_the_whole_help_has_every_option_and_paragraph() -> None:
    with_more = {p: c for p, c in COMMANDS.items() if any("--help-all" in o.opts for o in c.command.params)}
    assert len(with_more) >= 6
    for path, context in with_more.items():
        done = CliRunner().invoke(cli, [*path.split()[1:], "--help-all"])
        assert done.exit_code == 0, done.output
        shown = set(re.findall(r"--[a-z][a-z0-9-]+", done.output))
        for option in context.command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in shown, f"{path}: {option.opts[0]}"
        printed = re.sub(r"\s+", " ", done.output)
        for paragraph in (context.command.help or "").split("\n\n"):
            assert re.sub(r"[\s\b]+", " ", paragraph).strip() in printed


def test_what_summarises_prints_json() -> None:
    leaves = {
        path: context.command for path, context in COMMANDS.items() if not isinstance(context.command, click.Group)
    }
    without = {p for p, command in leaves.items() if not any("--json" in option.opts for option in command.params)}
    assert without == WITHOUT_JSON


def test_what_takes_long_says_so_once_and_then_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((100.0, 100.5, 102.9, 103.1, 110.0, 118.2, 119.0))
    wait = Waiting("loading agent.py", clock=lambda: next(times))
    for _ in range(6):
        wait()
    assert capsys.readouterr().err == "still loading agent.py (3 s)\nstill loading agent.py (18 s)\n"
