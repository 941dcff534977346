"""The command: run the checks, print their findings, and exit with 1 if one failed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from ..models import WORDS, model_option
from ..options import as_json, from_environment, read_dotenv
from ..output.terminal import visible
from .finding import Finding, run


@click.command()
@click.option(
    "--aws", "on_aws", is_flag=True, help="Check the AWS account, bucket, agent and gateway instead of this machine."
)
@click.option("--agent", envvar="AGENTCORE_AGENT_ARN", metavar="ARN", help="With --aws: the deployed agent.")
@click.option("--bucket", envvar="AGENTCORE_S3_BUCKET", help="With --aws: the bucket of the records.")
@click.option(
    "--gateway-url",
    envvar="AGENTCORE_RL_GATEWAY_URL",
    help="With --aws: the address of the gateway, or several with commas.",
)
@model_option(help=f"Check this model instead of the machine: {WORDS}.")
@from_environment("--gateway-admin-key", "AGENTCORE_RL_GATEWAY_ADMIN_KEY")
@click.option(
    "--session-gateway-url",
    metavar="URL",
    help="With --aws: the address of the gateway for sessions. [default: --gateway-url]",
)
@as_json
def command(
    on_aws: bool,
    agent: str | None,
    bucket: str | None,
    gateway_url: str | None,
    model: Path | None,
    gateway_admin_key: str | None,
    session_gateway_url: str | None,
    as_json: bool,
) -> None:
    """Check what training needs. Each line that is not ok states what to do.

    Without options, the command checks this machine and this installation. With --model, it checks the model: its kind, the
    engine that runs it, its memory, its chat template and tool calls, and its sampling speed.

    With --aws, it checks credentials, bucket, agent, quotas, gateway, and model. It also starts a session, checks which services
    the session reaches, and stops it. This does not call the function of the agent. Missing options are read from the
    environment, or from .env in this folder. Objects that the command writes into the bucket are deleted again.

    Exit code: 0, or 1 if a check failed.
    """
    from . import aws, machine
    from . import model as of_model

    if on_aws:
        stored = read_dotenv(Path(".env"))
        account = aws.Account(
            agent_arn=agent or stored.get("AGENTCORE_AGENT_ARN"),
            bucket=bucket or stored.get("AGENTCORE_S3_BUCKET"),
            gateway_url=gateway_url,
            gateway_admin_key=gateway_admin_key,
            session_gateway_url=session_gateway_url,
        )
        checks = account.checks()
    elif model is not None:
        checks = of_model.checks(model)
    else:
        checks = list(machine.CHECKS)
    found: list[Finding] = []
    for finding in run(checks):
        found.append(finding)
        if not as_json:
            click.echo(visible(finding.render(width=18 if model is None else 30)))
    failed = sum(finding.level == "fail" for finding in found)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    else:
        click.echo(f"{len(found)} checks, {failed} failed" if failed else f"{len(found)} checks, none failed")
    if failed:
        sys.exit(1)
