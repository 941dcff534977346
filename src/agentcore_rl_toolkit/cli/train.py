"""`agentcore-rl train`: train an agent's file on this machine, or launch a trainer with its configuration."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from ..backends.settings import ENV_AGENT_ARN
from .agents.agentcore_project import deployed_arn
from .models import model_option
from .options import (
    AGENT,
    AGENT_HELP,
    ENV_FILE,
    SectionedCommand,
    adding,
    as_json,
    engine_option,
    from_words,
    read_dotenv,
    settings_option,
    with_agent_as_is,
    with_judge,
    with_sessions,
)

BACKENDS = ("loop", "trl", "slime", "verl", "rllm", "tinker", "sagemaker")
SERVICES = ("tinker", "sagemaker")  # the backends that are training services


# Options of an agent that trains on this machine, the last of them first. `distill` has them, too.
_HERE = (
    as_json,
    click.option("--resume", is_flag=True, help="Continue the newest unfinished run, or the run in --out."),
    click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run. [default: runs/...]"
    ),
    with_sessions,
    with_judge,
    click.option(
        "--credit",
        type=click.Choice(["episode", "turn"]),
        help="A reward for each rollout (episode), or for each model call (turn). [default: episode]",
    ),
    click.option("--rollouts", type=click.IntRange(min=2), help="Rollouts of each input. [default: 8]"),
    click.option("--groups", type=click.IntRange(min=1), help="Inputs of each step. [default: 8; slime: 32; rLLM: 64]"),
    click.option(
        "--steps", type=click.IntRange(min=1), help="Training steps. [default: 32; Tinker, SageMaker: 100; slime: 1]"
    ),
    engine_option,
    settings_option,
    click.option(
        "--config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="YAML, TOML or JSON file with settings. Options override the file.",
    ),
    model_option(),
    click.option(
        "--eval-data", type=click.Path(path_type=Path), help="Rows for the evaluations before and after the training."
    ),
    click.option("--data", type=click.Path(path_type=Path), help="Rows for the training. Each row is a payload."),
    click.option("--agent", type=click.Path(path_type=Path), metavar=AGENT, help=f"{AGENT_HELP}."),
)
with_training = adding(_HERE)
SECTIONS = {
    "Agent and data": "agent data eval_data model engine",
    "Size of the run": "steps groups rollouts",
    "Rewards": "credit judge judge_url judge_model judge_weight",
    "Sessions": "session_env env_file readable writable",
    "The run": "config_path words out resume as_json",
}


@click.command(
    "train",
    cls=SectionedCommand,
    sections={
        **SECTIONS,
        "Agents without a rollout function": "score model_hosts policy_models",
        "Other trainers": "backend dry_run rehearse stop_session",
    },
)
@with_training
@with_agent_as_is
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    metavar="NAME",
    help=f"The trainer: {', '.join(BACKENDS)}. [default: loop]",
)
@click.option("--dry-run", is_flag=True, help="Check the --config of another trainer, and print the plan.")
@click.option(
    "--rehearse",
    is_flag=True,
    help="With --backend sagemaker and --agent: train the built-in policy on this machine instead.",
)
@click.option("--stop-session", metavar="NAME", help="Stop a training session of SageMaker that still runs.")
@click.option("--method", type=click.Choice(["grpo", "distill", "sft"]), default="grpo", hidden=True)
@click.option("--teacher-url", hidden=True)
@click.option("--from", "sources", multiple=True, hidden=True)
@click.argument("trainer_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
def command(
    backend: str | None,
    config_path: Path | None,
    dry_run: bool,
    rehearse: bool,
    stop_session: str | None,
    words: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    resume: bool,
    method: str,
    sources: tuple[str, ...],
    trainer_args: tuple[str, ...],
    **flags: Any,
) -> None:
    """Train an agent with GRPO.

    \b
    Example:
        agentcore-rl train --agent shop/agent.py --data shop/train.jsonl --eval-data shop/eval.jsonl

    With --agent and --data, the agent is trained on this machine. The command uses the services of `agentcore-rl up` in this
    folder, or starts services for the run. All other settings go into --set or --config, such as held_out, learning_rate,
    max_staleness, eval_every, forced_tools, lora_rank, policy_failures, seed, or tracker.

    With --credit turn, the agent returns one reward for each model call. Its settings are discount and normalize.

    With --backend and --config, the command checks the file and starts another trainer: slime, verl, rLLM, Tinker, SageMaker, or
    TRL. Arguments after -- go to the trainer: `train --backend verl --config f.yaml -- trainer.n_gpus_per_node=8`.

    If the file has no agent_runtime_arn or s3_bucket, the command uses AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET. Missing
    variables are read from .env in this folder, and then from .env next to the file.

    `agentcore-rl distill` learns from a teacher, and `agentcore-rl sft` imitates good rollouts.
    """
    from ..errors import ConfigError

    if stop_session is not None:
        from ..backends.sagemaker.session import stop_named

        click.echo(f"session {stop_session} is {asyncio.run(stop_named(stop_session))}")
        return
    if sources and method != "sft":
        raise ConfigError("--from is for `agentcore-rl sft`")
    if method == "sft":
        from .training.sft import imitate

        imitate(sources, flags["model"], words, out)
        return
    if flags["teacher_url"] is not None and method != "distill":
        raise ConfigError("--teacher-url is for `agentcore-rl distill`")
    if rehearse and backend != "sagemaker":
        raise ConfigError("--rehearse is for --backend sagemaker")
    if backend in (None, "loop"):
        if trainer_args:
            raise ConfigError(f"{' '.join(trainer_args)}: arguments of a trainer need --backend")
        distilled = method == "distill"
        train_here(flags, config_path, words, out=out, resume=resume, as_json=as_json, distilled=distilled)
        return
    _take_dotenv(config_path)
    slime_steps = (flags.pop("steps") or 1) if backend == "slime" else 1
    resume = resume and backend not in SERVICES  # these resume by themselves if their folder has a run
    agent: Path | None = flags.pop("agent") if rehearse else None
    arn = deployed_arn(str(flags.get("agent")), Path.cwd())
    if arn is not None:
        os.environ[ENV_AGENT_ARN], flags["agent"] = arn, None
    given = (*flags.values(), words, out, resume or None, as_json or None)
    if config_path is None or any(value not in (None, ()) for value in given):
        raise ConfigError(
            f"backend {backend} trains a deployed agent, and reads all settings from --config FILE "
            f"(docs/backends/{backend}.md); --agent FILE and its options are for --backend loop"
        )
    config = _configured(backend, config_path, agent, rehearse=rehearse)
    if arn not in (None, _arn_of(config)):
        raise ConfigError(
            f"--agent is {arn}, and {config_path} has agent_runtime_arn {_arn_of(config)}: remove one of them"
        )
    if trainer_args:
        if not hasattr(config, "with_args"):
            raise ConfigError(f"backend {backend} accepts no arguments after --")
        config = config.with_args(trainer_args)
    plan = config.plan(slime_steps) if backend == "slime" else config.plan(**({"rehearse": True} if rehearse else {}))
    if dry_run:
        click.echo(plan.render())
        return
    if plan.needs:
        raise ConfigError(f"cannot start {backend}:\n  " + "\n  ".join(plan.needs))
    if not rehearse:
        _show_quotas(config, slime_steps)
    if backend in SERVICES:
        click.echo(plan.render())
        _train_at_service(backend, config, rehearse=rehearse, agent=agent)
    elif backend == "slime":
        config.train(slime_steps)
    elif backend == "trl":
        from ..backends.trl.adapter import train

        train(config)
    else:
        click.echo(plan.render())
        sys.stdout.flush()
        os.execvpe(plan.command[0], list(plan.command), {**os.environ, **plan.environment})


def _configured(backend: str, path: Path, agent: Path | None, *, rehearse: bool) -> Any:
    """Return the configuration of a trainer. ``agent`` is served on this machine. Raises: ConfigError."""
    from ..backends.rllm.settings import RllmConfig
    from ..backends.sagemaker.job import JobConfig
    from ..backends.sagemaker.settings import SageMakerConfig
    from ..backends.settings import read_settings, with_environment
    from ..backends.slime.runner import SlimeRunner
    from ..backends.tinker.settings import TinkerConfig
    from ..backends.trl.settings import TrlConfig
    from ..backends.verl.settings import VerlConfig
    from ..errors import ConfigError
    from .servers.rehearsal import NO_AGENT, rehearsed

    if backend in SERVICES:
        values = with_environment(read_settings(path)) | (NO_AGENT if agent is not None else {})
        config: Any
        if backend == "tinker":
            config = TinkerConfig.from_values(values, where=str(path))
        elif values.get("form") != "job":
            config = SageMakerConfig.from_values(values, where=str(path))
        elif rehearse and agent is None:
            raise ConfigError("--rehearse of a job takes --agent FILE: its sessions need the local service's key")
        else:
            config = JobConfig.from_values(values, where=str(path))
        return rehearsed(config) if rehearse else config
    kinds: dict[str, Any] = {"trl": TrlConfig, "verl": VerlConfig, "rllm": RllmConfig, "slime": SlimeRunner}
    config = kinds[backend].from_file(path)
    if backend == "trl" and config.data_path is None:
        raise ConfigError(f"{path}: `data_path` is needed to train from the command line")
    return config


def train_here(
    flags: dict[str, Any],
    file: Path | None,
    words: tuple[str, ...],
    *,
    out: Path | None,
    resume: bool,
    as_json: bool,
    distilled: bool = False,
    title: str = "",
    alone: bool = False,
) -> None:
    """Train an agent's file on this machine. ``words`` are the settings of --set. ``alone``: not on the services of `up`."""
    from rich.console import Console
    from rich.markup import escape

    from ..errors import ConfigError
    from .output.commands import nearby, program
    from .training.run import carry_out
    from .training.settings import LocalRun, new_run, old_run, read, variable_names
    from .training.stack import Stack

    flags = {name: value for name, value in flags.items() if value not in (None, ())} | from_words(words, LocalRun)
    _take_dotenv(file)
    console = Console(stderr=as_json)
    if resume:
        run_dir, settings = old_run(out, flags)
    else:
        settings = read(flags, file, None if alone else Stack.running())
        if distilled and settings.teacher_url is None:
            raise ConfigError(
                "distillation needs --teacher-url URL: the address of vLLM, or of `policy serve`, with the teacher's model"
            )
        settings.rows()  # before a folder exists
        run_dir = new_run(settings, out)
    begins = f"[bold]{title or f'Training {escape(settings.title)}'}[/]  run directory {escape(nearby(run_dir))}"
    console.print(begins, highlight=False, soft_wrap=True)
    env_file, stored = click.get_current_context().meta.get(ENV_FILE, (None, ()))
    variables = f" --env-file {nearby(env_file)}" if env_file is not None else ""
    variables += "".join(f" --session-env {name}" for name in variable_names(settings.session_env[len(stored) :]))
    command = "quickstart" if alone else "train"
    go_on = f"{program()} {command} --resume --out {nearby(run_dir)}{variables}"
    carry_out(settings, run_dir, console, go_on=go_on, as_json=as_json, alone=alone)


def _train_at_service(backend: str, config: Any, *, rehearse: bool, agent: Path | None) -> None:
    """Train with a service: by its training API, or by a multi-turn RL job of SageMaker. Raises: TrainingServiceError."""
    from rich.console import Console

    from ..backends.sagemaker.adapter import run_async as run_sagemaker
    from ..backends.sagemaker.job import JobConfig, Jobs
    from ..backends.tinker.adapter import run_async as run_tinker
    from ..client.data import read_rows
    from .servers.rehearsal import agent_here, local_sagemaker
    from .training.display import Display, rollouts_of
    from .training.report import Report

    with contextlib.ExitStack() as stack:
        variables = stack.enter_context(local_sagemaker(config.output_dir)) if rehearse else {}
        if agent is not None:
            config = stack.enter_context(agent_here(agent, config, variables))
        if isinstance(config, JobConfig):
            click.echo(f"model package: {asyncio.run(Jobs(config, click.echo).run_async())}")
            return
        data, run = config.data, run_sagemaker if backend == "sagemaker" else run_tinker
        held_out = len(read_rows(data.eval_data_path)) if data.eval_data_path is not None else 0
        findings = Report(data.output_dir).findings
        with Display(Console(), rollouts_of(config.step, held_out), findings) as display:
            asyncio.run(run(config, display.observe))


def _show_quotas(config: Any, slime_steps: int) -> None:
    """Show the quotas of the agent's account before the run starts. Raises: ConfigError if nothing can run under them."""
    from ..deploy.quotas import before_a_run

    if getattr(config, "form", None) == "job":  # SageMaker's rollouts
        return
    rollouts = None
    if hasattr(config, "rollout_batch_size"):
        rollouts = slime_steps * config.rollout_batch_size * config.n_samples_per_prompt
    elif hasattr(config, "steps"):
        rollouts = config.steps * config.groups * config.rollouts
    found = before_a_run(_arn_of(config), endpoint_url=getattr(config, "endpoint_url", None), rollouts=rollouts)
    if found is not None:
        click.echo(found, err=True)


def _arn_of(config: Any) -> str:
    """Return the agent of a trainer's configuration."""
    return str(config.agentcore.get("agent_runtime_arn") if hasattr(config, "agentcore") else config.agent_runtime_arn)


def _take_dotenv(config_path: Path | None) -> None:
    folders = [Path.cwd(), *([config_path.absolute().parent] if config_path is not None else [])]
    for path in dict.fromkeys(folder / ".env" for folder in folders):
        new = {name: value for name, value in read_dotenv(path).items() if name not in os.environ}
        os.environ.update(new)
        if new:
            click.echo(f"from {path}: {', '.join(new)}", err=True)
