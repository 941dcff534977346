"""`agentcore-rl init`: a new agent that passes its test, runs and trains without changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click

from ..errors import ConfigError
from .output.commands import nearby, program

TEMPLATES = Path(__file__).parent / "templates"
FRAMEWORKS = {
    "strands": "Strands",
    "langgraph": "LangGraph",
    "openai-agents": "OpenAI's Agents SDK",
    "anthropic": "Anthropic's Messages API",
    "plain": "no framework",
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")


@click.command()
@click.argument("name", required=False)
@click.option(
    "--from",
    "existing",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="An existing agent. Show its parts, and write a scorer, a test of the scorer, and data next to it.",
)
@click.option(
    "--framework",
    type=click.Choice(list(FRAMEWORKS)),
    default="strands",
    show_default=True,
    help="The agent's framework.",
)
def command(name: str | None, existing: Path | None, framework: str) -> None:
    """Make a new agent in the folder NAME, with tools, a reward and its test, data, settings, and a Dockerfile.

    You can run and train the agent without changes. Then replace its parts with yours.

    With --from FILE, the command does not change the agent, and writes a scorer for it.
    """
    if (name is None) == (existing is None):
        raise ConfigError("give either the NAME of a new agent, or --from FILE of an existing agent")
    if existing is not None:
        _prepare(existing)
        return
    assert name is not None
    folder = write(Path(name), framework)
    click.echo(f"{folder}/ has an agent with {FRAMEWORKS[framework]}. Next:\n")
    click.echo(f"    {program('python')} -m pytest {folder}")
    data = f"--data {folder}/train.jsonl --eval-data {folder}/eval.jsonl"
    click.echo(f"    {program()} train --agent {folder}/agent.py {data}\n\n{folder}/README.md explains each file.")


def _prepare(agent: Path) -> None:
    """Show the parts of an agent, and write a scorer, its test and data next to it. Raises: ConfigError."""
    from .agents.existing import inspect_agent, write_scorer

    found = inspect_agent(agent)
    click.echo(nearby(agent))
    for name, texts in found.items():
        click.echo(f"  {name:<11}{', '.join(texts) or 'not found'}")
    score, test, rows = write_scorer(agent, found["payload"])
    click.echo(f"\nWritten: {', '.join(map(nearby, (score, test, rows)))}. Edit these files, then run:\n")
    shared = f"--agent {nearby(agent)} --score {nearby(score)}"
    click.echo(f"    {program('python')} -m pytest {nearby(test)}")
    for verb in ("eval", "train"):
        click.echo(f"    {program()} {verb} {shared} --data {nearby(rows)}")


def write(folder: Path, framework: str) -> Path:
    """Write the project. Raises: ConfigError if the name is invalid or the folder is not empty."""
    from .._installation import write_wheel

    if not _NAME.fullmatch(folder.name):
        raise ConfigError(
            f"{folder.name!r} cannot be an agent's name: a letter, then letters, digits, _ or -, at most 48"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    for source in (TEMPLATES / "common", TEMPLATES / framework.replace("-", "_")):
        for file in sorted(path for path in source.iterdir() if path.is_file()):
            text = file.read_text()
            if file.suffix != ".py":
                text = text.replace("{{name}}", folder.name).replace("{{framework}}", FRAMEWORKS[framework])
            (folder / file.name).write_text(text)
    write_wheel(folder / "wheels")
    subprocess.run([sys.executable, "rows.py"], cwd=folder, check=True)
    return folder
