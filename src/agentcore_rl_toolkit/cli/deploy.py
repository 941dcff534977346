"""`agentcore-rl deploy`: deploy an agent's folder to AgentCore Runtime on AWS, or remove the deployment."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from .options import as_is_variables, as_json, json_object, read_dotenv, shortened, with_model_calls
from .output.terminal import visible

if TYPE_CHECKING:
    from ..deploy.deployment import Deployment
    from ..deploy.settings import Settings

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
ARN = "AGENTCORE_AGENT_ARN"


@click.command()
@click.argument("what", required=False, type=click.Choice(["iam"]), metavar="[iam]")
@click.option("--agent", metavar="FOLDER|FILE|MODULE", help="The agent: its folder, its file, or its module.")
@click.option("--image", metavar="URI", help="Deploy this image instead of building one from the source.")
@click.option("--code", is_flag=True, help="Deploy an archive instead of an image.")
@click.option(
    "--score-ready",
    is_flag=True,
    help="For an agent without a rollout function: deploy a second agent that accepts rollouts.",
)
@with_model_calls
@click.option("--name", help="Name on AWS. [default: the folder's; with --score-ready NAME_training]")
@click.option(
    "--env",
    "environment",
    multiple=True,
    metavar="K=V",
    help="A variable for all sessions. K without a value copies it from this shell; repeatable.",
)
@click.option(
    "--bucket", envvar="AGENTCORE_S3_BUCKET", show_envvar=True, help="Bucket of the records, or s3://BUCKET/PREFIX."
)
@click.option("--region", help="AWS region. [default: the environment's or profile's]")
@click.option("--role", metavar="ARN", help="Execution role. [default: a new role with least rights]")
@click.option("--subnet", "subnets", multiple=True, help="Subnet of a VPC; repeatable.")
@click.option("--security-group", "security_groups", multiple=True, help="Security group in the VPC; repeatable.")
@click.option("--endpoint", metavar="NAME", help="An endpoint of the agent, which then uses the new version.")
@click.option(
    "--smoke",
    metavar="JSON|none",
    help="Payload of the rollout that tests the deployment; none: no rollout. [default: first row of train.jsonl]",
)
@click.option(
    "--exclude",
    "excluded",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Do not pack this path; repeatable.",
)
@click.option(
    "--vendor", type=FOLDER, help="Only add the toolkit's wheel to a project that AWS's command line deploys."
)
@click.option("--dry-run", is_flag=True, help="Print every file, call and policy, and change nothing.")
@click.option("--remove", is_flag=True, help="Remove everything that deployments of this name created.")
@as_json
def command(
    what: str | None,
    vendor: Path | None,
    region: str | None,
    dry_run: bool,
    remove: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Deploy an agent to AgentCore Runtime, and test it with one rollout.

    Run the command again after an interruption, or to update a deployment. It skips finished steps. It writes the agent's ARN
    and the bucket to .env, where `train --backend` reads them.

    `agentcore-rl deploy iam` deploys nothing. It prints the IAM policies for the agent's sessions, the trainer, `doctor`, and
    the deployer.

    Builds are for linux/arm64, which AgentCore requires. A deployment to a local runtime is built for this machine.

    \b
    Example:
        agentcore-rl deploy --agent shop --bucket my-records --dry-run
    """
    from dotenv import set_key

    from ..deploy import cost
    from ..deploy.artifact import vendor as put_wheel
    from ..deploy.calls import Calls
    from ..deploy.deployment import Deployment

    if vendor is not None:
        click.echo("\n".join(put_wheel(vendor)))
        return
    settings = _settings(options, smokes=not remove and not what)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if not as_json:
            click.echo(visible(line), err=what is not None)

    calls = Calls(region=region, rehearse=dry_run or what is not None, say=say)
    deployment = Deployment(settings, calls)
    if what == "iam":
        _print_policies(deployment, as_json)
        return
    if remove:
        left = deployment.remove()
        if not dry_run and forget_agent(Path(".env"), settings.name, calls.region):
            say("AGENTCORE_AGENT_ARN in .env: is removed")
        click.echo(json.dumps({"left": left}) if as_json else "left: " + "\nleft: ".join(left))
        return
    done = deployment.up()
    if not dry_run and done.arn is not None:
        for variable, value in ((ARN, done.arn), ("AGENTCORE_S3_BUCKET", settings.store), ("AWS_REGION", calls.region)):
            if value is not None:
                set_key(".env", variable, value, quote_mode="never")
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(done), "steps": lines}, indent=2))
        return
    if done.smoke is not None:
        click.echo(visible(f"one rollout: {done.smoke}"))
    if dry_run:
        click.echo("would write .env: AGENTCORE_AGENT_ARN, AGENTCORE_S3_BUCKET and AWS_REGION. Nothing was changed")
    elif done.arn is not None:
        click.echo(f"{done.arn} (version {done.version}), written to .env\n{cost.line(1000)}")


def _settings(options: dict[str, Any], *, smokes: bool) -> Settings:
    """Return the settings of a deployment. ``smokes``: a rollout tests it, unless the options refuse one. Raises: ConfigError."""
    from ..deploy.settings import Settings
    from ..runtime.wire import parse_environment

    names = ("agent", "name", "smoke", "bucket", "environment", "model_hosts", "policy_models", "excluded")
    agent, name, smoke, bucket, environment, hosts, models, excluded = (options.pop(each) for each in names)
    folder, started = _started(agent)
    bucket, prefix = _records(bucket)
    as_is = options["score_ready"]
    return Settings(
        name=_name(name, folder, "_training" if as_is else ""),
        folder=folder,
        **started,
        excluded=list(excluded) if folder is None else _left_out(folder, as_is, excluded),
        platform=_platform(),
        smoke=_payload(smoke, folder) if smokes and smoke != "none" else None,
        bucket=bucket,
        prefix=prefix,
        environment=parse_environment([*as_is_variables(hosts, models), *environment]),
        **options,
    )


def _started(agent: str | None) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder that is packed, and the settings that start the agent in it. Raises: ConfigError without an agent."""
    from ..deploy.artifact import START_FILE
    from ..isolation.project import Project
    from .training.stack import agent_file

    if agent is None:
        return None, {}
    if Path(agent).is_dir():
        folder = Path(agent)
        names = ("agent.py", "rl_app.py", "main.py", "app.py")
        return folder, {"entry": next((name for name in names if (folder / name).is_file()), names[0])}
    file = agent_file(agent)
    project = Project.of(file)
    if file.parent == project.folder:
        return file.parent, {"entry": file.name}
    paths = [Path(path).relative_to(project.folder).as_posix() for path in project.import_paths]
    return project.folder, {"entry": START_FILE, "module": project.module, "import_paths": paths}


def _left_out(folder: Path, as_it_is: bool, excluded: Sequence[Path]) -> list[Path]:
    """Add files that are not packed: those of rows and scorer in the folder's train.toml, and those of `init --from`."""
    import tomllib

    from ..deploy.artifact import files_of

    settings = folder / "train.toml"
    found = tomllib.loads(settings.read_text()) if settings.is_file() else {}
    names = [str(found[name]).partition(":")[0] for name in ("data", "eval_data", "score") if found.get(name)]
    left_out = [*excluded, *(folder / name for name in names)]
    for scorer in files_of(folder, excluded) if as_it_is else ():
        if scorer.name == "score.py" and "def score(payload, answer, " in scorer.read_text():
            left_out += [scorer, scorer.with_name("test_score.py")]
    return left_out


def _name(name: str | None, folder: Path | None, end: str = "") -> str:
    if name is None:
        if folder is None:
            raise ConfigError("--image needs --name, the agent's name on AWS")
        whole = re.sub(r"[^A-Za-z0-9]+", "_", folder.resolve().name).strip("_")
        name = shortened(whole, 48 - len(end), "_") + end
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,47}", name):
        raise ConfigError(
            f"{name!r} cannot be a name: letters, digits and underscores, at most 48, a letter first. Give one with --name"
        )
    return name


def _records(bucket: str | None) -> tuple[str | None, str]:
    """Return bucket and prefix of s3://BUCKET/PREFIX, as .env has it, or of a bucket's name."""
    from ..store import parse_url

    if bucket is None:
        return None, ""
    url = parse_url(bucket)
    if url.scheme != "s3":
        raise ConfigError(f"--bucket {bucket}: agents on AWS write to S3; give the name of a bucket")
    return url.bucket, url.prefix


def _platform() -> str:
    """Return the platform to build for: AgentCore's, or this machine's for a local control plane."""
    from ..deploy.artifact import AGENTCORE_PLATFORM, this_platform

    control = os.environ.get("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL", "")
    local = re.match(r"https?://(127\.|localhost|\[::1\])", control)
    return this_platform() if local else AGENTCORE_PLATFORM


def _payload(smoke: str | None, folder: Path | None) -> dict[str, Any] | None:
    rows = None if folder is None else folder / "train.jsonl"
    if smoke is None:
        if rows is None or not rows.is_file():
            raise ConfigError(
                "one rollout tests the deployment: give its payload as --smoke '{\"prompt\": ...}', or use --smoke none"
            )
        smoke = next((line for line in rows.read_text().splitlines() if line.strip()), "{}")
    return json_object(smoke, "the payload of --smoke")


def _print_policies(deployment: Deployment, as_json: bool) -> None:
    from ..deploy import iam

    place = deployment.place()
    role = deployment.settings.role or place.arn("iam", f"role/{deployment.settings.role_name}", region="")
    policies = {
        "trust": ("who may assume the execution role", iam.execution_trust(place)),
        "execution": ("the rights of sessions", iam.execution(place)),
        "trainer": ("the user of `eval` and `train`", iam.trainer(place)),
        "doctor": ("the user of `doctor --aws`, in addition to the trainer's", iam.doctor(place)),
        "deployer": ("the user of `deploy`", iam.deployer(place, role=role)),
    }
    if as_json:
        click.echo(json.dumps({name: policy for name, (_, policy) in policies.items()}, indent=2))
        return
    for name, (holder, policy) in policies.items():
        click.echo(f"# {name}: {holder}\n{iam.text(policy)}\n")


def forget_agent(path: Path, name: str, region: str | None) -> bool:
    """Remove the ARN of an agent of this name and region from a `.env` file. Return False if the file does not have it."""
    from dotenv import unset_key

    if re.search(rf":{region}:\d+:runtime/{name}-\w+$", read_dotenv(path).get(ARN, "")) is None:
        return False
    unset_key(path, ARN)
    return True
