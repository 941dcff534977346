"""`agentcore-rl train`: check a training configuration and launch its trainer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

BACKENDS = ("trl", "slime", "verl", "rllm", "tinker")


@click.command("train")
@click.option("--backend", type=click.Choice(BACKENDS), required=True, help="Which trainer.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="YAML, TOML or JSON file; docs/backends lists the keys.",
)
@click.option("--dry-run", is_flag=True, help="Check the file and print what would run; needs no GPU and no trainer.")
@click.option("--num-rollout", type=click.IntRange(min=1), default=1, show_default=True, help="slime: number of steps.")
def command(backend: str, config_path: Path, dry_run: bool, num_rollout: int) -> None:
    """Train an agent with one of the supported trainers.

    AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET fill agent_runtime_arn and s3_bucket where the file leaves them out. A file
    .env in this folder, then one beside the configuration, sets variables that the environment lacks.
    """
    _take_dotenv(config_path)
    from ..backends.rllm.settings import RllmConfig
    from ..backends.slime.runner import SlimeRunner
    from ..backends.trl.config import TrlConfig
    from ..backends.verl.settings import VerlConfig
    from ..errors import ConfigError

    if backend == "slime":
        runner = SlimeRunner.from_yaml(config_path)
        if dry_run:
            click.echo(runner.plan(num_rollout).render())
        else:
            runner.train(num_rollout)
        return
    if backend == "trl":
        config = TrlConfig.from_file(config_path)
        if config.data_path is None:
            raise ConfigError(f"{config_path}: `data_path` is needed to train from the command line")
        plan = config.plan()
    elif backend == "tinker":
        from ..backends.tinker.config import TinkerRunConfig

        tinker = TinkerRunConfig.from_file(config_path)
        plan = tinker.plan()
    else:
        plan = (VerlConfig if backend == "verl" else RllmConfig).from_file(config_path).plan()
    if dry_run:
        click.echo(plan.render())
        return
    if plan.needs:
        raise ConfigError(f"cannot start {backend}:\n  " + "\n  ".join(plan.needs))
    if backend == "tinker":
        import asyncio

        from ..backends.tinker.run import line, run_async

        click.echo(plan.render())
        asyncio.run(run_async(tinker, on_step=lambda result, groups: click.echo(line(result))))
        return
    if plan.command is None:
        from ..backends.trl.adapter import train

        train(TrlConfig.from_file(config_path))
        return
    click.echo(plan.render())
    sys.stdout.flush()
    os.execvpe(plan.command[0], list(plan.command), {**os.environ, **plan.environment})


def _take_dotenv(config_path: Path) -> None:
    from ..backends.dotenv import read_dotenv

    for path in dict.fromkeys((Path(".env").absolute(), config_path.absolute().parent / ".env")):
        if not path.is_file():
            continue
        new = {name: value for name, value in read_dotenv(path).items() if name not in os.environ}
        os.environ.update(new)
        if new:
            click.echo(f"from {path}: {', '.join(new)}", err=True)
