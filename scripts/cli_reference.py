"""The command-line reference, made from the commands themselves: a hook of the documentation's site (mkdocs.yml)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from agentcore_rl_toolkit.cli.main import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

Every command with every option. This page is made from the commands.
"""


def page() -> str:
    return HEAD + "".join(f"\n{text}\n" for text in _sections(cli, click.Context(cli, info_name="agentcore-rl")))


def _sections(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        yield _section(command, inner)
        if isinstance(command, click.Group):
            yield from _sections(command, inner)


def _section(command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {context.command_path}", "", f"`{context.command_path} {usage}`".replace(" `", "`"), ""]
    lines += [_text(inspect.cleandoc(command.help or "")), ""]
    rows = [row for row in (_row(p, context) for p in command.params) if row is not None]
    if rows:
        lines += [*rows, ""]
    return "\n".join(lines).rstrip()


def _row(parameter: click.Parameter, context: click.Context) -> str | None:
    if not isinstance(parameter, click.Option) or parameter.hidden:
        return None
    record = parameter.get_help_record(context)
    if record is None:
        return None
    # click writes the default behind the help; it has a column of its own here
    default = parameter.default
    plain = isinstance(default, int | float | str | Path) and not isinstance(default, bool) and default != ""
    names = record[0]
    return f"- `{names}`: {_text(parameter.help or '')}" + (f" Default: `{default}`." if plain else "")


def _text(text: str) -> str:
    """Help as Markdown: one paragraph stays one, and what HTML or tables would read is escaped."""
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    if text.startswith("\b"):  # click's sign for lines that stay as they are
        return "```text\n" + text.removeprefix("\b").strip("\n") + "\n```"
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def on_pre_build(config: object) -> None:
    """Called by MkDocs."""
    text = page()
    if not PAGE.exists() or PAGE.read_text() != text:  # a page that is written anew makes `make docs-serve` build anew
        PAGE.write_text(text)
