"""Entry point of `agentcore-rl`. Commands load on use, so `--help` and `version` need the base install only."""

from __future__ import annotations

import errno
import importlib
import sqlite3
import sys
from typing import Any

import click

from .._installation import missing_extra
from ..errors import AgentCoreRLError, ConfigError, MissingExtraError
from .output.terminal import visible

# name -> (module with a `group` or a `command`, one line for --help, extra that installs what it needs)
_COMMANDS: dict[str, tuple[str, str, str]] = {
    "quickstart": (".training.quickstart", "Train a small agent on this machine, as a first run.", "local"),
    "init": (".init", "Make a new agent that runs and trains without changes.", ""),
    "up": (".training.up", "Run an agent, a gateway and a model on this machine.", "local"),
    "invoke": (".invoke", "Run one rollout and print its outcome, dialogue and log.", "local"),
    "runtime": (".servers.runtime", "Serve agents with the API of AgentCore Runtime, locally.", "runtime"),
    "serve": (".servers.endpoint", "Serve a trained model to your own clients.", "local"),
    "gateway": (".servers.gateway", "Record the exact tokens of every session.", "gateway"),
    "policy": (".servers.policy", "Run the built-in policy: token ids in, token ids out.", "policy"),
    "eval": (".eval", "Run an agent over a data set and summarize its rewards.", "local"),
    "compare": (".production.compare", "Compare two models, or two evaluations, on the same inputs.", "local"),
    "train": (".train", "Train an agent on this machine, or with another trainer.", "local"),
    "sft": (".training.sft", "Imitate good rollouts of earlier runs.", "local"),
    "distill": (".training.distill", "Train an agent towards the probabilities of a teacher.", "local"),
    "optimize": (".optimize", "Search for better texts of an agent, such as its prompt.", "optimize"),
    "deploy": (".deploy", "Deploy an agent to AgentCore Runtime on AWS, or remove it.", ""),
    "harvest": (".production.harvest", "Turn production traffic into rows of a data set.", ""),
    "promote": (".production.promote", "Put a trained model into production, and let an agent use it.", "local"),
    "view": (".view", "Show runs in the browser: rewards, rollouts, every token.", "view"),
    "runs": (".runs", "Show runs in the terminal, and export rollouts.", ""),
    "doctor": (".doctor", "Check this machine, or the AWS account.", ""),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, "version"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            module = importlib.import_module(_COMMANDS[cmd_name][0], __package__)
            command: click.Command = getattr(module, "group", None) or module.command
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            from .._servers.process import terminated_as_interrupted

            with terminated_as_interrupted():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command[1]) for name, command in _COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)  # without `version`, so that the list fits a screen


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="agentcore-rl-toolkit", message="%(version)s")
def cli() -> None:
    """Train an open-weight model inside the agent that you deploy. Start with `agentcore-rl quickstart`."""


@cli.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    click.echo(installed("agentcore-rl-toolkit"))


def main() -> None:
    """Run the command line; errors of the toolkit print as one message, without a traceback.

    The exit code is 2 for a fault of the command (an option, a setting, a missing extra), 130 after Ctrl-C, and 1 for all others.
    """
    try:
        cli(standalone_mode=True, prog_name="agentcore-rl", complete_var="_AGENTCORE_RL_COMPLETE")
    except AgentCoreRLError as e:
        click.echo(visible(f"error: {e}"), err=True)
        sys.exit(2 if isinstance(e, (ConfigError, MissingExtraError)) else 1)
    except (OSError, sqlite3.OperationalError) as e:
        text = str(e)
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in text:
            text = f"the disk is full ({e}): free space, then continue with --resume if the command has it"
        elif getattr(e, "filename", None) is None:
            raise
        click.echo(visible(f"error: {text}"), err=True)
        sys.exit(1)
    except ModuleNotFoundError as e:
        # An import of a command: name its extra.
        asked = next((arg for arg in sys.argv[1:] if arg in _COMMANDS), None)
        if asked is None or e.name is None or e.name.startswith("agentcore_rl_toolkit"):
            raise
        missing = missing_extra(
            f"this command needs the module {e.name!r}, which is not installed", _COMMANDS[asked][2]
        )
        click.echo(f"error: {missing}", err=True)
        sys.exit(2)
