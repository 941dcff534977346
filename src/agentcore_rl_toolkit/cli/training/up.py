"""`agentcore-rl up`: runtime, gateway and policy as one thing, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ...errors import AgentCoreRLError, ConfigError
from ..options import engine_option, sandbox_words, with_sandbox
from ..output.terminal import visible
from .services import Services
from .stack import FOLDER, QUIET, Stack, agent_file, describe, explain, model_folder, start


@click.command()
@click.option("--agent", required=True, metavar="FILE", help="The agent's file.")
@click.option(
    "--model", type=click.Path(path_type=Path), metavar="DIR", help="The model [default: the built-in policy]."
)
@engine_option
@click.option(
    "--session-env",
    multiple=True,
    metavar="K=V",
    help="A variable every session sees; K alone: as it is here; repeatable.",
)
@with_sandbox
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep records, turns and logs in this folder."
)
@click.option(
    "--gateways", type=click.IntRange(1), default=1, show_default=True, help="Model gateways; each uses one core."
)
def command(
    agent: str,
    model: Path | None,
    engine: str | None,
    session_env: tuple[str, ...],
    readable: tuple[str, ...],
    writable: tuple[str, ...],
    keep: Path | None,
    gateways: int,
) -> None:
    """Run an agent, a model gateway and the policy on this machine until Ctrl-C.

    Other commands started in this folder (eval, train, invoke) find them. What other programs need is printed, and written to
    .agentcore-rl/up.env for `source`.
    """
    file = agent_file(agent)
    folder_of_model = model_folder(model)
    if Stack.running() is not None:
        raise ConfigError("another `agentcore-rl up` runs in this folder: stop it, or use another folder")
    try:
        with contextlib.ExitStack() as exits:
            folder = keep.resolve() if keep is not None else Path(exits.enter_context(_scratch()))
            serving = {
                "model": folder_of_model,
                "engine": engine or "policy",
                "session_env": session_env,
                "runtime_options": sandbox_words(readable, writable),
            }
            asyncio.run(_serve(file, folder, serving, gateways))
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        sys.exit(130)
    except AgentCoreRLError as e:
        if isinstance(e, ConfigError):
            raise
        click.echo(visible(f"error: {explain(e)}"), err=True)
        sys.exit(1)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="agentcore-rl-up-", ignore_cleanup_errors=True)


async def _serve(agent: Path, folder: Path, serving: dict[str, Any], gateways: int) -> None:
    """Raises: KeyboardInterrupt on SIGTERM and SIGINT; ServiceError when a service dies."""
    admin_key = secrets.token_urlsafe(24)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with Services(folder / "logs", env={**QUIET, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": admin_key}) as services:
        starting = asyncio.create_task(
            asyncio.to_thread(
                start,
                services,
                agent,
                folder=folder,
                **serving,
                admin_key=admin_key,
                gateways=gateways,
                report=lambda name, text: click.echo(visible(f"{name:<12}{text}")),
            )
        )
        stop = asyncio.create_task(stopped.wait())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            services.stop()  # the thread that waits for them ends with an error of its own
            await asyncio.wait({starting})
            starting.exception()
            raise KeyboardInterrupt
        stack = starting.result()
        with stack.publish(Path.cwd()):
            click.echo(f"{'agent':<12}{stack.agent_arn}\n\nIn another shell of this folder:  source {FOLDER}/up.env")
            click.echo(f"which is\n{describe(stack.environment())}\n\nCtrl-C stops everything.")
            watch = asyncio.create_task(services.watch())
            await asyncio.wait({watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            watch.cancel()
    raise KeyboardInterrupt
