"""Files that are their owner's alone, the secrets in them, and no secret on a command line."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit._servers.process import write_private
from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.errors import ConfigError


def test_a_file_is_nobody_elses_from_its_first_byte_on(tmp_path: Path) -> None:
    """Also under an open umask, also while it is being replaced."""
    seen: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for entry in os.scandir(tmp_path):
                try:
                    seen.add(stat.S_IMODE(entry.stat().st_mode))
                except FileNotFoundError:
                    continue

    before = os.umask(0)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for round_ in range(300):
            write_private(tmp_path / "secret", str(round_))
    finally:
        os.umask(before)
        over.set()
        watcher.join()
    assert seen == {0o600}
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("gateway serve --admin-key", "AGENTCORE_RL_GATEWAY_ADMIN_KEY"),
        ("gateway serve --upstream-key", "AGENTCORE_RL_GATEWAY_UPSTREAM_KEY"),
        ("doctor --aws --gateway-admin-key", "AGENTCORE_RL_GATEWAY_ADMIN_KEY"),
        ("eval --data rows.jsonl --api-key", "AGENTCORE_RL_MODEL_API_KEY"),
    ],
)
def test_a_key_on_a_command_line_is_refused_with_its_variable(
    command: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    done = CliRunner().invoke(cli, [*command.split(), "the-secret"])
    assert isinstance(done.exception, ConfigError)
    assert f"Export {variable} instead" in str(done.exception)
    assert "the-secret" not in str(done.exception)


def options_of(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Option]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", option) for below, option in options_of(command, context))
        elif command is not None:
            yield from ((name, option) for option in command.params if isinstance(option, click.Option))


def test_no_option_of_any_command_is_a_secret() -> None:
    """Those that look like one are there to be refused, or name a file."""
    found = [
        f"{command} {option.opts[0]}"
        for command, option in options_of(cli, click.Context(cli))
        if re.search(r"key|secret|password|credential", option.opts[0])
        and not (option.is_flag or option.hidden or isinstance(option.type, click.Path))
    ]
    assert found == []
