"""`agentcore-rl quickstart`: `agentcore-rl train` with the math agent of the examples and the built-in problems."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from ...errors import AgentCoreRLError, ConfigError
from ...runs import write_config
from ..options import as_json, engine_option, settings_option
from ..output.commands import nearby, program
from .run import Job, example, load_loop, print_broken, print_end, print_stopped, quiet_libraries, run
from .settings import from_words

# Many problems a step and few rollouts of each: with an easy check and a policy that is soon right, that climbs most surely.
SHAPE = {"steps": 12, "groups": 16, "rollouts": 4}
HELD_OUT = 96  # a standard error of 2 points at 95 %
SMOKE_STEPS, SMOKE_HELD_OUT = 8, 64  # a run of a few steps is a smoke test; most of its time would go into evaluation


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Run directory. [default: runs/<exp_id>]")
@click.option("--steps", type=click.IntRange(1), help="GRPO steps. [default: 12]")
@click.option("--seed", type=int, help="Seed of problems and training.")
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished run, or with the one in --out.")
@click.option(
    "--agent",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Agent file to train. [default: the math agent of the examples]",
)
@settings_option
@engine_option
@as_json
def command(
    out: Path | None,
    resume: bool,
    agent: Path | None,
    engine: str | None,
    words: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Train a small tool-using agent on this machine and watch its reward rise.

    Starts a local AgentCore Runtime, a model gateway and a small policy, runs the Strands math agent of the examples in
    hundreds of isolated sessions, and trains the policy with GRPO on exactly the tokens it sampled. No AWS account, no
    GPU, no downloads; one to two minutes on two cores. Everything is stored under runs/<exp_id>/.
    """
    from rich.console import Console
    from rich.markup import escape

    from .report import Report

    console = Console(stderr=as_json)
    loop = load_loop()
    quiet_libraries()
    given = from_words(words, _settings(loop)) | {k: v for k, v in options.items() if v is not None}
    run_dir, config, held_out = choose_run(loop, out, resume, given)
    job = Job(
        title="the math agent" if agent is None else agent.stem,
        agent=(agent or example("strands_math_agent/arithmetic_app.py")).resolve(),
        model=None,
        run_dir=run_dir,
        config=config,
        rows=loop.arithmetic("train", config.steps * config.groups, config.seed),
        held_out=loop.arithmetic("held_out", held_out, config.seed),
        engine=engine or "policy",
    )
    begins = f"[bold]AgentCore RL quickstart[/]  run directory {escape(nearby(run_dir))}"
    console.print(begins, highlight=False, soft_wrap=True)
    go_on = f"{program()} quickstart --resume --out {nearby(run_dir)}"
    if agent is not None:  # a run's folder does not say whose it is
        go_on += f" --agent {nearby(agent)}"
    try:
        summary = asyncio.run(run(loop, job, console))
    except KeyboardInterrupt:
        print_stopped(console, run_dir, go_on)
        sys.exit(130)
    except AgentCoreRLError as e:
        print_broken(e, run_dir, go_on)
        sys.exit(1)
    print_end(console, job, Report(run_dir), summary)
    left = f"Finished in {summary['wall_s']:.0f} s. See it: {program()} view {nearby(run_dir)}"
    console.print(left, markup=False, soft_wrap=True)
    if as_json:
        click.echo((run_dir / "summary.json").read_text(), nl=False)


def _settings(loop: ModuleType) -> Any:
    """The loop's settings, and how many problems are held out."""
    return dataclasses.make_dataclass(
        "Settings", [("held_out", "int", HELD_OUT)], bases=(loop.Config,), frozen=True, kw_only=True
    )


def choose_run(loop: ModuleType, out: Path | None, resume: bool, options: Mapping[str, Any]) -> tuple[Path, Any, int]:
    """The run directory, configuration and number of held-out problems: new ones, or those of the run to go on with.

    Raises: ConfigError when there is nothing to resume, a run would be overwritten, or options contradict the stored ones.
    """
    if not resume:
        run_dir = (out or Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")).resolve()
        if (run_dir / "config.json").exists():
            raise ConfigError(f"{run_dir} already holds a run; go on with --resume, or choose another --out")
        run_dir.mkdir(parents=True, exist_ok=True)
        options = {**SHAPE, **options}
        short = options["steps"] < SMOKE_STEPS
        held_out = options.get("held_out", SMOKE_HELD_OUT if short else HELD_OUT)
        config = loop.Config(**{k: v for k, v in options.items() if k != "held_out"})
        stored = {**dataclasses.asdict(config), "held_out": held_out}
        write_config(run_dir, stored)
        return run_dir, config, held_out
    if out is None:
        unfinished = [p.parent for p in Path("runs").glob("*/config.json") if not (p.parent / "summary.json").exists()]
        if not unfinished:
            raise ConfigError(
                "there is no unfinished run under runs/; start one without --resume, or name it with --out"
            )
        out = max(unfinished, key=lambda p: p.stat().st_mtime)
    run_dir = out.resolve()
    if not (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} holds no run to go on with (no config.json)")
    stored = json.loads((run_dir / "config.json").read_text())
    changed = {k: v for k, v in options.items() if stored.get(k) != v}
    if changed:
        raise ConfigError(f"a resumed run keeps its configuration; drop {', '.join(changed)}")
    return run_dir, loop.Config(**{k: v for k, v in stored.items() if k != "held_out"}), stored["held_out"]
