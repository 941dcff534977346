"""`agentcore-rl cost`: what a run will cost on AWS, before it starts."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from .options import as_json


@click.command()
@click.option("--rollouts", required=True, type=click.IntRange(1), help="Rollouts in all.")
@click.option("--minutes", required=True, type=click.FloatRange(0, min_open=True), help="Minutes that a rollout takes.")
@click.option(
    "--turns",
    type=click.IntRange(1),
    help="Model calls of a rollout, at 0.5 s of CPU each.",
)
@click.option("--cpu", "cpu_s", type=click.FloatRange(0), metavar="SECONDS", help="CPU seconds that a rollout uses.")
@click.option(
    "--memory", "memory_gb", default=0.5, show_default=True, metavar="GB", help="Highest memory of a session."
)
@click.option("--concurrent", default=128, show_default=True, type=click.IntRange(1), help="Rollouts at once.")
@click.option("--new-sessions-per-minute", default=400.0, show_default=True, help="Your account's quota.")
@click.option("--max-sessions", default=5000, show_default=True, help="Your account's quota of sessions alive.")
@as_json
def command(
    rollouts: int,
    minutes: float,
    turns: int | None,
    cpu_s: float | None,
    memory_gb: float,
    concurrent: int,
    new_sessions_per_minute: float,
    max_sessions: int,
    as_json: bool,
) -> None:
    """Estimate what a run costs on AgentCore Runtime, and its time under quotas.

    \b
    Example:
        agentcore-rl cost --rollouts 10000 --minutes 5 --turns 20
    """
    from ..deploy import cost

    used_s = cpu_s if cpu_s is not None else 2.0 + 0.5 * (turns or 5)
    run = cost.Run(rollouts=rollouts, minutes=minutes, cpu_s=used_s, memory_gb=memory_gb, concurrent=concurrent)
    found = cost.estimate(run, cost.Quotas(new_sessions_per_min=new_sessions_per_minute, sessions=max_sessions))
    if as_json:
        click.echo(json.dumps({**asdict(found), "total": found.total, "cpu_s": used_s, "prices_of": cost.PRICES_OF}))
        return
    click.echo(f"{rollouts:,} rollouts of {minutes:g} min, {used_s:g} s of CPU and {memory_gb:g} GB each")
    for name, dollars in (("CPU", found.cpu), ("memory", found.memory), ("S3", found.s3), ("together", found.total)):
        click.echo(f"  {name:<9} ${dollars:,.2f}")
    click.echo(f"  per 1,000 rollouts ${found.total / rollouts * 1000:,.2f}")
    click.echo(f"takes at least {found.hours:,.1f} h, limited by {found.limited_by}")
    click.echo(
        f"Prices of us-east-1 and us-west-2, {cost.PRICES_OF}. The model's GPUs, logs and network are not in it."
    )
