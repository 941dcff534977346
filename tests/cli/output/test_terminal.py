"""What agents print is shown on the user's terminal, and not obeyed."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli import doctor
from agentcore_rl_toolkit.cli.doctor import machine
from agentcore_rl_toolkit.cli.doctor.finding import fail
from agentcore_rl_toolkit.cli.output.terminal import WaitReport, dialogue_lines, visible
from agentcore_rl_toolkit.errors import LocalRuntimeError, RolloutError

TITLE, CLIPBOARD, UP = "\x1b]0;owned\x07", "\x1b]52;c;cm0gLXJm\x07", "\x1b[1A\x1b[2K"


def test_commands_to_a_terminal_are_written_out() -> None:
    assert visible(f"a{TITLE}b{CLIPBOARD}c") == "a\\e]0;owned\\ab\\e]52;c;cm0gLXJm\\ac"
    assert visible(f"one\ntwo{UP}") == "one\ntwo\\e[1A\\e[2K"
    assert visible("bar 10%\rbar 20%\r\ndone\tok") == "bar 10%\nbar 20%\ndone\tok"
    assert visible("\x9b2J \u202egnp.exe \x7f \ud800") == "\\x9b2J \\u202egnp.exe \\x7f \\ud800"
    assert visible("Grüße, 世界 🙂") == "Grüße, 世界 🙂"
    every = "".join(map(chr, range(0x3000)))
    assert not any(c in visible(every) for c in map(chr, [*range(9), *range(11, 32), *range(0x7F, 0xA0)]))


def test_a_dialogue_is_shown_also_if_its_tool_calls_have_another_form() -> None:
    function = {"name": "look_up", "arguments": "{}"}
    calls = [{"id": "a", "function": function}, {"id": "b", "function": None}, {"id": "c", "function": {}}, "d"]
    messages = [{"role": "assistant", "content": [{"text": "I look"}], "tool_calls": calls}, {"content": None}]
    assert list(dialogue_lines(messages)) == [" assistant  I look look_up({}) None(None)", "         ?  "]


WORDS = f"an agent's words: {TITLE} \x9b2J \u202egnp.exe"
SHOWN = "an agent's words: \\e]0;owned\\a \\x9b2J \\u202egnp.exe"


def test_an_agent_that_does_not_load_commands_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up = importlib.import_module("agentcore_rl_toolkit.cli.training.up")

    def fail(*args: object, **options: object) -> None:
        raise LocalRuntimeError(WORDS)

    (tmp_path / "agent.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(up, "own", fail)
    done = CliRunner().invoke(up.command, ["--agent", "agent.py"])
    assert done.exit_code == 1
    assert f"error: {SHOWN}" in done.output


def test_what_a_doctor_finds_commands_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CHECKS", [("session", lambda: fail("session", WORDS, WORDS))])
    done = CliRunner().invoke(doctor.command, [])
    assert done.exit_code == 1
    assert done.output.count(SHOWN) == 2


def test_markup_in_an_error_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an agent's error says reaches the end of a run, which is printed with colours."""
    pytest.importorskip("rich")
    command = importlib.import_module("agentcore_rl_toolkit.cli.training.quickstart")
    words = "[/red] [link=http://evil.example]here[/link] \x1b]0;owned\x07"

    def fail(*args: object, **options: object) -> None:
        raise RolloutError(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("agentcore_rl_toolkit.cli.training.run"), "train", fail)
        with pytest.raises(SystemExit), click.Context(command.command):
            command.command.callback(  # type: ignore[misc]
                **{
                    **dict.fromkeys(p.name for p in command.command.params),
                    "out": tmp_path / "[bold]",
                    "resume": False,
                    "words": (),
                }
            )
    captured = capsys.readouterr()
    shown = (captured.out + captured.err).replace("\n", "")
    assert "[/red] [link=http://evil.example]here[/link] \\e]0;owned\\a" in shown
    assert "[bold]" in shown
    assert "\x1b]" not in shown


def test_what_takes_long_says_so_once_and_then_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((100.0, 100.5, 102.9, 103.1, 110.0, 118.2, 119.0))
    wait = WaitReport("loading agent.py", clock=lambda: next(times))
    for _ in range(6):
        wait()
    assert capsys.readouterr().err == "still loading agent.py (3 s)\nstill loading agent.py (18 s)\n"
