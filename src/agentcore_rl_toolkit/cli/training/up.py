"""`agentcore-rl up`: runs runtime, gateway and policy together until Ctrl-C."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import click

from ...backends.scorer import scorer_files
from ...errors import ConfigError
from ..models import model_option
from ..options import AGENT, AGENT_HELP, engine_option, session_arguments, with_agent_as_is, with_sessions
from ..output.terminal import visible
from .stack import FOLDER, FORCED_TOOLS, Stack, agent_file, own, scratch_folder


@click.command()
@click.option("--agent", required=True, metavar=AGENT, help=f"{AGENT_HELP}.")
@model_option()
@engine_option
@with_agent_as_is
@with_sessions
@click.option(
    "--gateways", type=click.IntRange(1), default=1, show_default=True, help="Model gateways; each uses one core."
)
@click.option(
    "--forced-tools",
    type=click.Choice(FORCED_TOOLS),
    help="What happens if the agent forces a tool call or a schema: the engine enforces it (constrain), the model "
    "decides (wish), or the call is refused (refuse).",
)
@click.option(
    "--history",
    type=click.Choice(("sampled", "template")),
    default="sampled",
    show_default=True,
    help="How earlier replies appear in a prompt: as the sampled tokens, or as the chat template writes them (without thinking).",
)
def command(
    agent: str,
    model: Path | None,
    engine: str | None,
    score: str | None,
    gateways: int,
    forced_tools: str | None,
    history: str,
    **sessions: Any,
) -> None:
    """Run an agent, a model gateway, and the policy (the model) on this machine until Ctrl-C.

    The commands eval, train, and invoke use them if you start these commands in the same folder. Variables for other
    programs are printed, and are written to .agentcore-rl/up.env for `source`.
    """
    file = agent_file(agent)
    if Stack.running() is not None:
        raise ConfigError("another `agentcore-rl up` runs in this folder: stop it, or use another folder")
    (Path.cwd() / FOLDER).mkdir(mode=0o700, exist_ok=True)  # it exists before the sandbox, which hides its contents
    with (
        scratch_folder("up") as scratch,
        own(
            file,
            folder=scratch,
            model=model,
            engine=engine or "policy",
            gateways=gateways,
            forced_tools=forced_tools,
            history=history,
            **session_arguments(sessions, scorer_files(score)),
            score=score,
            report=lambda name, text: click.echo(visible(f"{name:<12}{text}")),
        ) as stack,
        stack.publish(Path.cwd()) as exports,
    ):
        click.echo(f"{'agent':<12}{stack.agent_arn}\n\nIn another shell of this folder:  source {FOLDER}/up.env")
        click.echo(f"which is\n{exports}\nCtrl-C stops everything.")
        threading.Event().wait()  # a signal ends it
