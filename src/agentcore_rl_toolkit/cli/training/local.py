"""Train an agent's file on this machine, with the loop or with TRL."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..._installation import missing_extra
from ...errors import AgentCoreRLError, ConfigError
from ..options import sandbox_words
from ..output.commands import nearby, program
from .run import Job, load_loop, print_broken, print_end, print_stopped, quiet_libraries, run
from .settings import LEARNING_RATES, LocalRun, new_run, old_run, read, variable_names
from .stack import Stack

if TYPE_CHECKING:
    from rich.console import Console


def train(
    backend: str, flags: dict[str, Any], file: Path | None, *, out: Path | None, resume: bool, as_json: bool = False
) -> None:
    """Run to the end; ``as_json`` prints the summary alone to stdout.

    Exit codes: 0, 1 when the run ended early, 2 on a wrong setting, 130 after Ctrl-C.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=as_json)
    quiet_libraries()
    if backend == "trl" and flags.get("staleness"):
        raise ConfigError("TRL's GRPOTrainer collects a batch, then trains it: staleness is for --backend loop")
    if backend == "trl" and importlib.util.find_spec("trl") is None:
        raise missing_extra("--backend trl needs the package 'trl'", "trl")
    if backend == "trl" and flags.get("eval_every"):
        raise ConfigError("eval_every is for --backend loop: TRL evaluates before and after")
    if resume:
        run_dir, settings = old_run(out, flags)
    else:
        settings = read(flags, file)
        settings.rows()  # before a folder is made
        if settings.learning_rate is None:
            settings = dataclasses.replace(settings, learning_rate=LEARNING_RATES[backend])
        run_dir = new_run(settings, out)
    stack = _running(settings, console)
    where = f"  on the services of `agentcore-rl up` ({stack.runtime_url})" if stack is not None else ""
    title = settings.agent.parent.name if settings.agent.stem in ("agent", "rl_app", "app") else settings.agent.stem
    begins = f"[bold]Training {escape(title)}[/]  run directory {escape(nearby(run_dir))}{where}"
    console.print(begins, highlight=False, soft_wrap=True)
    variables = "".join(f" --session-env {name}" for name in variable_names(settings.session_env))
    go_on = f"{program()} train --backend {backend} --resume --out {nearby(run_dir)}{variables}"
    try:
        _train(backend, settings, run_dir, title, stack, console)
    except KeyboardInterrupt:
        print_stopped(console, run_dir, go_on)
        sys.exit(130)
    except AgentCoreRLError as e:
        print_broken(e, run_dir, go_on)
        sys.exit(1)
    if as_json:
        click.echo((run_dir / "summary.json").read_text(), nl=False)


def _train(backend: str, settings: LocalRun, run_dir: Path, title: str, stack: Stack | None, console: Console) -> None:
    from .report import Report

    loop = load_loop()
    rows, held_out = settings.rows()
    job = Job(
        title=title,
        agent=settings.agent,
        model=settings.model,
        run_dir=run_dir,
        config=settings.loop_config(loop),
        rows=rows,
        held_out=held_out,
        trackers=settings.tracker,
        session_env=settings.session_env,
        runtime_options=sandbox_words(settings.readable, settings.writable),
        engine=settings.engine,
    )
    if backend == "trl":
        from .with_trl import train_with_trl

        summary = train_with_trl(loop, job, console, stack=stack)
    else:
        summary = asyncio.run(run(loop, job, console, stack=stack))
    print_end(console, job, Report(run_dir), summary)
    left = f"Finished in {summary['wall_s']:.0f} s. Curve, metrics and trajectories: {nearby(run_dir)}"
    console.print(left, markup=False, soft_wrap=True)


def _running(settings: LocalRun, console: Console) -> Stack | None:
    """The running stack of this folder, if it has this agent and model."""
    if settings.session_env or settings.readable or settings.writable:
        if Stack.running() is not None:
            notice = "`agentcore-rl up` runs here, without these options of sessions: this run starts its own services"
            console.print(notice, style="dim")
        return None
    stack = Stack.serving(settings.agent, settings.model, settings.engine)
    if stack is None and Stack.running() is not None:
        notice = "`agentcore-rl up` runs here with another agent, model or engine: this run starts its own services"
        console.print(notice, style="dim")
    return stack
