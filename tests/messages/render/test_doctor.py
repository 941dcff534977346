from __future__ import annotations

from click.testing import CliRunner

from agentcore_rl_toolkit.cli.servers.gateway import group
from agentcore_rl_toolkit.messages.render import examine


def test_every_family_passes_its_self_test(family, renderer):
    report = examine(renderer)
    assert report.parser == family.parser
    assert report.ok, str(report)
    failed_or_skipped = {check.name for check in report.checks if check.ok is None}
    assert failed_or_skipped <= {"parser round trip, reasoning"}, str(report)


def test_the_command_line_examines_directories_and_ends_with_1_when_one_fails(model_dir, tmp_path) -> None:
    good, bad = str(model_dir("hermes")), str(model_dir("markless"))
    done = CliRunner().invoke(group, ["doctor", good])
    assert done.exit_code == 0, done.output
    assert "ok   prefix extension, tool calls" in done.output
    done = CliRunner().invoke(group, ["doctor", good, bad])
    assert done.exit_code == 1
    assert "FAIL" in done.output.partition("markless: parser plain")[2]
    done = CliRunner().invoke(group, ["doctor", good, "--parser", "glm"])
    assert done.exit_code == 1
    assert "FAIL parser round trip, tool calls" in done.output
    template = tmp_path / "other.jinja"
    template.write_text((model_dir("qwen3") / "chat_template.jinja").read_text())
    done = CliRunner().invoke(group, ["doctor", good, "--template", str(template)])
    assert "reasoning and answer are separated" in done.output
